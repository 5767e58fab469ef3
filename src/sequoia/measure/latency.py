"""How long the passes of a pair take here: real rounds of all sizes in turn, at several places in a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from random import Random

from sequoia.draft.ngram_draft import NgramDraft
from sequoia.engine import Engine
from sequoia.errors import FileError, UsageError
from sequoia.measure.collector import long_lived, without_collector
from sequoia.measure.round_parts import Clock, Parts, TimedRequest, clock_of
from sequoia.measure.timings import Sweep, Timings, Trial
from sequoia.params import SamplingParams
from sequoia.tree.checks import full_tree_size, require_integer
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

Progress = Callable[[int, int], None]
"""(sweeps done, sweeps in all)"""
Notice = Callable[[str], None]

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Where the search for cliffs begins."""
STORE_NAME = "timings.json"

_DEPTH = 6  # of the trees, where that gives enough nodes
_SCOUTS = 3  # times that each size is run while sizes are chosen
_SCOUTING = 0.25  # of the seconds, at most
_CLIFF = 0.15  # neighbours whose times differ by more get a size between them
_STRAIGHT = 0.05  # until what is between them is no further than this from the line
_MOST_EXTRA = 8
_MOST_SWEEPS = 40
_PATIENCE = 1.5  # times the seconds, where the machine has become slower than it was while sizes were chosen


def measure_latency(
    engine: Engine,
    *,
    params: Sequence[SamplingParams],
    contexts: Sequence[int] = (128, 1024),
    max_rows: int = 128,
    seconds: float = 60.0,
    text: Sequence[int] = (),
    store: Path | None = None,
    progress: Progress = lambda done, total: None,
    notice: Notice = lambda line: None,
    clock: Clock | None = None,
) -> Timings:
    """Time real rounds of the engine's pair, all sizes in turn, for about `seconds`; or what is missing of that.

    A few rounds of each size show where the time jumps, and sizes between these are added. Then come sweeps through all
    sizes at all contexts, upwards and downwards in turn, with one of the parameters after the other.

    Args:
        params: sampling parameters that will be planned for.
        contexts: tokens of context; where the models have less, that.
        max_rows: of a target pass.
        text: token ids that the contexts are made of, repeated where they do not suffice; random ones where empty.
        store: a folder that holds the sweeps while they become more.
        progress: called after each sweep.
        notice: called with a line of text where what `store` holds is of no use.
        clock: in place of the device's.

    Returns:
        The timings, whose `profile` is the latency profile.

    Raises:
        UsageError: a value is out of its range, or the models' context is too short.
        FileError: the store cannot be written.
    """
    course = _Course(engine, params, require_integer("max_rows", max_rows, 1), text, clock)
    file = None if store is None else store / STORE_NAME
    with long_lived():
        timings = _kept(file, course, notice) or course.scouted(course.places(contexts), seconds)
        progress(len(timings.sweeps), timings.planned)
        while len(timings.sweeps) < timings.planned:
            timings = course.swept(timings)
            if timings.seconds > _PATIENCE * seconds and len(timings.sweeps) >= course.least_sweeps:
                timings = replace(timings, planned=len(timings.sweeps))
            if file is not None:
                timings.save(file)
            progress(len(timings.sweeps), timings.planned)
    return timings


def _kept(file: Path | None, course: _Course, notice: Notice) -> Timings | None:
    """What an earlier run has stored."""
    if file is None or not file.exists():
        return None
    try:
        timings = Timings.load(file)
        course.check(timings)
    except (FileError, UsageError) as error:
        notice(f"what was timed before is of no use, so timing starts anew: {error}")
        return None
    return timings


class _Course:
    """What is run, and the requests that run it."""

    def __init__(
        self,
        engine: Engine,
        params: Sequence[SamplingParams],
        max_rows: int,
        text: Sequence[int],
        clock: Clock | None,
    ) -> None:
        if not params:
            raise UsageError("there are no sampling parameters to time rounds with. Give at least one.")
        self._engine, self._params, self._max_rows, self._text = engine, params, max_rows, text
        self._clock = clock or clock_of(engine.target.device)
        proposer = engine.draft.start()
        self._room = min(filter(None, (engine.target.context_length, proposer.context_length)), default=None)
        self._profile = _usual_rates(engine, proposer.proposable)
        self._shapes: dict[int, TreeShape] = {}
        self._requests: dict[tuple[int, int], TimedRequest] = {}

    @property
    def least_sweeps(self) -> int:
        """One upwards and one downwards with each of the parameters."""
        return 2 * len(self._params)

    def places(self, contexts: Iterable[int]) -> tuple[int, ...]:
        """The contexts, increasing, each with room behind it."""
        asked = {require_integer("contexts", context, 1) for context in contexts}
        if not asked:
            raise UsageError("contexts is empty. Give at least one.")
        if self._room is None:
            return tuple(sorted(asked))
        most = max(self._room // 2, self._room - 4 * self._reserve)
        return tuple(sorted({min(context, most) for context in asked}))

    def check(self, timings: Timings) -> None:
        """UsageError where timings are of another course."""
        if timings.sizes[0] != 1 or timings.sizes[-1] != self._max_rows:
            raise UsageError(f"trees have 1 to {timings.sizes[-1]} nodes, not 1 to {self._max_rows}.")
        if any(sweep.law >= len(self._params) for sweep in timings.sweeps):
            raise UsageError(f"more than {len(self._params)} sampling parameters were timed.")

    def scouted(self, contexts: tuple[int, ...], seconds: float) -> Timings:
        """Nothing timed yet, but which sizes are to be, and how often."""
        started = self._clock()
        runs: dict[int, list[Parts]] = {}

        def run(size: int) -> None:
            runs.setdefault(size, []).append(self._request(contexts[0], 0).measure(self._shape(size)))

        def is_late() -> bool:
            return self._clock() - started > _SCOUTING * seconds

        def target_seconds(size: int) -> float:
            while len(runs.get(size, ())) < len(runs[1]):
                run(size)
            return min(parts.target for parts in runs[size])

        base = [*(size for size in SIZES if size < self._max_rows), self._max_rows]
        for turn in range(_SCOUTS):
            for size in base[::-1] if turn % 2 else base:
                run(size)
            if is_late():
                break
        sizes = refined(base, target_seconds, 0 if is_late() else _MOST_EXTRA)
        sweep = len(contexts) * sum(sum(parts.total for parts in runs[size]) / len(runs[size]) for size in sizes)
        return Timings(contexts, sizes, self._planned(seconds / sweep if sweep > 0 else _MOST_SWEEPS))

    def _planned(self, affordable: float) -> int:
        """As many sweeps with each of the parameters."""
        wanted = min(int(affordable), _MOST_SWEEPS)
        return max(self.least_sweeps, wanted - wanted % len(self._params))

    def swept(self, timings: Timings) -> Timings:
        """One sweep more."""
        turn, law = divmod(len(timings.sweeps), len(self._params))
        places = [(context, size) for size in timings.sizes for context in timings.contexts]
        with without_collector():
            started = self._clock()
            trials = []
            for context, size in places[::-1] if turn % 2 else places:
                request = self._request(context, law if context == timings.contexts[0] else 0)
                trials.append(Trial(context, size, request.measure(self._shape(size))))
            sweep = Sweep(law, tuple(trials), self._clock() - started)
        return replace(timings, sweeps=(*timings.sweeps, sweep))

    @property
    def _reserve(self) -> int:
        """Tokens that a round needs behind its place, and those of the round before it."""
        return self._shape(self._max_rows).depth + 3

    def _shape(self, size: int) -> TreeShape:
        """A usual tree of so many nodes."""
        if size not in self._shapes:
            depth = _DEPTH
            while full_tree_size(self._profile.ranks, depth) < size:
                depth += 1
            self._shapes[size] = optimal_shape(self._profile, size, depth)
        return self._shapes[size]

    def _request(self, context: int, law: int) -> TimedRequest:
        key = context, law
        if key not in self._requests:
            random = Random(0)
            text = self._text or [random.randrange(self._engine.target.vocab_size) for _ in range(context)]
            reach = max(64, context // 4)
            if self._room is not None:
                reach = min(reach, self._room - context)
            place = list(islice(cycle(text), context))
            self._requests[key] = TimedRequest(self._engine, self._params[law], place, reach, self._clock)
        return self._requests[key]


def _usual_rates(engine: Engine, proposable: int) -> AcceptanceProfile:
    """What trees are made for while nothing is known of the pair; no node has more children than can be proposed."""
    usual = AcceptanceProfile.shipped("ngram" if isinstance(engine.draft, NgramDraft) else "model")
    return AcceptanceProfile([row[:proposable] for row in usual.rates])


def refined(sizes: Sequence[int], seconds: Callable[[int], float], most: int) -> tuple[int, ...]:
    """The sizes, and up to `most` between neighbours whose times differ; the widest difference first.

    Args:
        seconds: time of a size.
    """
    times = {size: seconds(size) for size in sizes}
    gaps = list(pairwise(sizes))
    for _ in range(most):
        gaps = [(low, high) for low, high in gaps if high - low > 1 and _ratio(times[low], times[high]) > 1 + _CLIFF]
        if not gaps:
            break
        low, high = max(gaps, key=lambda gap: _ratio(times[gap[0]], times[gap[1]]))
        gaps.remove((low, high))
        middle = (low + high) // 2
        times[middle] = seconds(middle)
        line = times[low] + (times[high] - times[low]) * (middle - low) / (high - low)
        if abs(times[middle] - line) > _STRAIGHT * line:
            gaps += [(low, middle), (middle, high)]
    return tuple(sorted(times))


def _ratio(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return high / low if low > 0 else 1.0
