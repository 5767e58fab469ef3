"""A plan file at work: the plan that each request runs by, and how well it fits what runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sequoia.params import SamplingParams
from sequoia.planning.adapt import Adaptation
from sequoia.planning.rounds import Clock, timed_rounds
from sequoia.speculate.session import Round, Session
from sequoia.speculate.stats import PlanRun, Stats
from sequoia.tree.option import Option
from sequoia.tree.plan import Plan, PlanFile, describe_law, law_of

if TYPE_CHECKING:
    from sequoia.tree.guard import Guard


class Planned:
    """What requests run by.

    Args:
        file: a plan file of this pair.
        name: what people know it by.
        differences: how what runs differs from what it was tuned on.
        guard: whether requests are guarded.
        adapt: whether plans follow what finished requests accepted.
    """

    def __init__(
        self, file: PlanFile, name: str, differences: tuple[str, ...] = (), guard: bool = True, adapt: bool = False
    ) -> None:
        self.file = file
        self.name = name
        self._differences = differences
        self._guards = guard
        self._adaptations = [Adaptation(plan, file.latency) for plan in file.plans] if adapt else []

    def plan(self, params: SamplingParams) -> Plan:
        """The plan for these parameters, as it stands now."""
        plan = self.file.plan_for(params)
        return self._adaptation(plan).current() if self._adaptations else plan

    def rounds(self, session: Session, params: SamplingParams, stats: Stats, clock: Clock) -> Iterator[Round]:
        """One request, counted in `stats`."""
        guard = self.guard(params)
        stats.plan = PlanRun(self.plan(params).chosen)
        return self._learning(params, stats, timed_rounds(session, stats, clock, guard))

    def guard(self, params: SamplingParams) -> Guard | None:
        """A guard for one request, where there is something to fall back to.

        A seed repeats a run exactly, and a guard's clock does not: at temperatures above 0, where the output depends on
        the trees, seeded requests run without.
        """
        repeatable = params.seed is not None and params.temperature > 0
        plan = self.plan(params)
        options = _ladder(plan)
        if not self._guards or repeatable or len(options) == 1:
            return None
        from sequoia.tree.guard import Guard

        return Guard(options, plan.plain.prediction.seconds_per_token)

    def notice(self, params: SamplingParams) -> str | None:
        """One line on how what it was tuned for differs from what runs; None where it fits."""
        plan = self.file.plan_for(params)
        ours = [] if plan.fits(params) else [f"{describe_law(plan.params)}, not {describe_law(law_of(params))}"]
        found = "; ".join([*ours, *self._differences])
        return f"{self.name} was tuned for {found}. Its predictions may be off: run `sequoia tune`." if found else None

    def _learning(self, params: SamplingParams, stats: Stats, rounds: Iterator[Round]) -> Iterator[Round]:
        """The rounds, which adapting plans learn from at their end, or where the caller leaves off."""
        try:
            yield from rounds
        finally:
            if self._adaptations:
                self._adaptation(self.file.plan_for(params)).add(stats)

    def _adaptation(self, plan: Plan) -> Adaptation:
        return self._adaptations[self.file.plans.index(plan)]

    def __repr__(self) -> str:
        return f"Planned({self.name})"


def _ladder(plan: Plan) -> list[Option]:
    """From the chosen option down: what is predicted to be faster than plain decoding, best first, and that."""
    plain = plan.plain.prediction.seconds_per_token
    better = [option for option in plan.options if option.prediction.seconds_per_token < plain]
    return [*sorted(better, key=lambda option: option.prediction.seconds_per_token), plan.plain]
