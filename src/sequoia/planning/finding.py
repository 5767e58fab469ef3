"""Plan files: read, found in the user's cache, and held against the pair that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from sequoia.draft.shipped import PLAN, shipped_head
from sequoia.errors import FileError, UsageError
from sequoia.model.causal_lm import CausalLM
from sequoia.planning.named import AUTO
from sequoia.planning.pair import differences, is_for_pair, loaded_by_name, pair_of, require_pair
from sequoia.planning.planned import Planned
from sequoia.tree.plan import PlanFile
from sequoia.tree.plan_cache import find as find_plan

GivenPlan = PlanFile | str | Path | None
"""A plan as `sequoia.load` takes it: None looks for one, where the tree is "auto"."""


@dataclass(frozen=True)
class PlanChoice:
    """What was asked for: a plan that was given, or one to look for, or none."""

    file: PlanFile | None
    name: str
    search: bool
    guard: bool
    adapt: bool

    @classmethod
    def of(cls, plan: GivenPlan, tree: object, profile: object, guard: bool = True, adapt: bool = False) -> PlanChoice:
        """Arguments as `sequoia.load` takes them.

        Raises:
            UsageError: two of them contradict each other, or the plan is none.
            FileError: the plan's file is missing or damaged.
        """
        auto = isinstance(tree, str) and tree == AUTO
        if plan is not None and not (auto and profile is None):
            what = "a profile plans" if auto else f"tree is {tree!r}, which names"
            raise UsageError(f"a plan chooses the tree, and {what} another. Give one of the two.")
        if adapt and not (auto and profile is None):
            raise UsageError("adapt plans anew, and a tree is given. Leave out tree and profile, or adapt.")
        name = Path(plan).name if isinstance(plan, (str, PathLike)) else "the plan"
        return cls(_read(plan), name, auto and profile is None, guard, adapt)

    @property
    def most_nodes(self) -> int:
        """Of the trees of a plan that was given."""
        plans = () if self.file is None else self.file.plans
        return max((option.shape.size for plan in plans for option in plan.options), default=1)

    def planned(self, target: CausalLM, draft: object, notice: Callable[[str], None] | None = None) -> Planned | None:
        """What requests of this pair run by; None where there is no plan.

        Raises:
            FileError: the plan is for another pair.
            UsageError: there is none to adapt.
        """
        file = self.file
        if file is None and self.search:
            file = _cached(target, draft, notice)
        if file is None:
            if self.adapt:
                raise UsageError("adapt needs a plan, and this pair has none yet. Run `sequoia tune` for it first.")
            return None
        require_pair(file, self.name, target, draft)
        return Planned(file, self.name, differences(file, target, draft), self.guard, self.adapt)


def _read(plan: GivenPlan) -> PlanFile | None:
    if plan is None or isinstance(plan, PlanFile):
        return plan
    if not isinstance(plan, (str, PathLike)):
        raise UsageError(f"plan is a PlanFile or a plan file, not {plan!r:.80}.")
    return PlanFile.load(plan)


def _cached(target: CausalLM, draft: object, notice: Callable[[str], None] | None) -> PlanFile | None:
    """The plan that was tuned for this pair earlier; none for models given as objects, whose names say little."""
    if not loaded_by_name(target, draft):
        return None
    try:
        return find_plan(pair_of(target, draft)) or _shipped(target, draft)
    except FileError as error:
        if notice is not None:
            notice(f"the plan for this pair is left out: {error}")
        return None


def _shipped(target: CausalLM, draft: object) -> PlanFile | None:
    """The plan that came with a head, where it is for these number formats."""
    folder = shipped_head(target)
    if folder is None or not (folder / PLAN).is_file():
        return None
    file = PlanFile.load(folder / PLAN)
    return file if is_for_pair(file, target, draft) else None
