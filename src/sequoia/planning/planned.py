"""A plan file at work: the plan that each request runs by, and how well it fits what runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sequoia.params import SamplingParams
from sequoia.planning.adapt import Adaptation, Walk
from sequoia.planning.rounds import Clock, timed_rounds
from sequoia.speculate.session import Round, Session
from sequoia.speculate.stats import PlanRun, Stats
from sequoia.tree.guard import Guard
from sequoia.tree.option import Option
from sequoia.tree.plan import Plan, PlanFile, describe_law, law_of


class Planned:
    """What requests run by.

    Args:
        file: a plan file of this pair.
        name: what people know it by.
        differences: how what runs differs from what it was tuned on.
        guard: whether requests are guarded.
        adapt: whether plans follow what requests accept.
    """

    def __init__(
        self, file: PlanFile, name: str, differences: tuple[str, ...] = (), guard: bool = True, adapt: bool = False
    ) -> None:
        self.file = file
        self.name = name
        self._differences = differences
        self._guards = guard
        self._places = [_Place(plan, Adaptation(plan, file.latency) if adapt else None) for plan in file.plans]

    def plan(self, params: SamplingParams) -> Plan:
        """The plan for these parameters, as it stands now."""
        return self._place(params).plan

    def notice(self, params: SamplingParams) -> str | None:
        """One line on how what it was tuned for differs from what runs; None where it fits."""
        plan = self.file.plan_for(params)
        ours = [] if plan.fits(params) else [f"{describe_law(plan.params)}, not {describe_law(law_of(params))}"]
        found = "; ".join([*ours, *self._differences])
        return f"{self.name} was tuned for {found}. Its predictions may be off: run `sequoia tune`." if found else None

    def rounds(
        self, session: Session, params: SamplingParams, stats: Stats, clock: Clock, plain_first: int = 0
    ) -> Iterator[Round]:
        """One request, counted in `stats`; `plain_first` as for `timed_rounds`.

        A seed repeats a run exactly, and a clock does not: at temperatures above 0, where the output depends on the
        trees, seeded requests have no guard.
        """
        place = self._place(params)
        plan = place.plan
        stats.plan = PlanRun(plan.chosen)
        repeatable = params.seed is not None and params.temperature > 0
        guard = place.take_guard() if self._guards and not repeatable else None
        return place.learning(plan, guard, timed_rounds(session, stats, clock, guard, plain_first))

    def _place(self, params: SamplingParams) -> _Place:
        return self._places[self.file.plans.index(self.file.plan_for(params))]

    def __repr__(self) -> str:
        return f"Planned({self.name})"


@dataclass
class _Place:
    """One plan of the file, and what its requests have taught."""

    start: Plan
    adaptation: Adaptation | None
    idle: list[tuple[Plan, Guard]] = field(default_factory=list)  # of finished requests: they have come to know times

    @property
    def plan(self) -> Plan:
        return self.start if self.adaptation is None else self.adaptation.plan

    def take_guard(self) -> Guard | None:
        """For one request, and for no other at the same time; None where there is nothing to fall back to."""
        plan = self.plan
        self.idle = [(for_plan, guard) for for_plan, guard in self.idle if for_plan is plan]
        if self.idle:
            guard = self.idle.pop()[1]
            guard.restart()
            return guard
        options = _ladder(plan)
        return Guard(options, plan.plain.prediction.seconds_per_token) if len(options) > 1 else None

    def learning(self, plan: Plan, guard: Guard | None, rounds: Iterator[Round]) -> Iterator[Round]:
        """The rounds of a request; at their end, or where the caller leaves off, what they taught is kept."""
        walks: list[Walk] = []
        try:
            for round_ in rounds:
                walks.append((round_.tree.shape, round_.verdict.path))
                yield round_
        finally:
            if self.adaptation is not None:
                self.adaptation.add(walks)
            if guard is not None:
                self.idle.append((plan, guard))


def _ladder(plan: Plan) -> list[Option]:
    """What is predicted to be faster than plain decoding, best first, and that."""

    def speed(option: Option) -> float:
        return option.prediction.seconds_per_token

    better = [option for option in plan.options if speed(option) < speed(plan.plain)]
    return [*sorted(better, key=speed), plan.plain]
