"""Rounds against the clock: timed, counted, and in the tree that the guard wants next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sequoia.speculate.session import Round, Session
from sequoia.speculate.stats import KindCount, PlanRun, Stats
from sequoia.tree.guard import Guard
from sequoia.tree.shape import TreeShape

Clock = Callable[[], float]
"""Seconds from some moment on."""


def timed_rounds(
    session: Session, stats: Stats, clock: Clock, guard: Guard | None = None, plain_first: int = 0
) -> Iterator[Round]:
    """The rounds of one request up to its end; with a guard each in the tree that past rounds and their times chose.

    Args:
        plain_first: rounds after the first that are plain decoding, for `Stats.gain`.
    """
    tree = session.tree
    while session.finish_reason is None:
        is_plain = plain_first > 0 and stats.rounds <= plain_first
        session.tree = TreeShape.root_only() if is_plain else tree if guard is None else guard.shape
        started = clock()
        round_ = session.step()
        seconds = clock() - started
        # The first round reads the prompt, and a tree cut short buys less: neither tells how fast its kind is.
        if is_plain:
            if stats.rounds > 0:
                stats.plain.add(1, seconds)
        elif stats.plan is not None and stats.rounds > 0 and round_.tree.shape == session.tree:
            _observe(round_, seconds, stats.plan, guard)
        stats.add(round_)
        stats.seconds += seconds
        if stats.rounds == 1:
            stats.first_round_seconds = seconds
        yield round_


def _observe(round_: Round, seconds: float, run: PlanRun, guard: Guard | None) -> None:
    tokens = len(round_.verdict.path) + 1
    kind = run.option.kind if guard is None else guard.kind
    run.kinds.setdefault(kind, KindCount()).add(tokens, seconds)
    if guard is not None:
        guard.observe(tokens, seconds)
        run.events = list(guard.events)
