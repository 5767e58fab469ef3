"""Times of real rounds as they were taken, kept for going on later, and the latency profile that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia.errors import UsageError
from sequoia.measure.round_parts import Parts
from sequoia.tree.checks import require_integer, require_keys, require_list
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.records import check_record, load_record, save_record

_FORMAT, _VERSION = "sequoia-timings", 1


@dataclass(frozen=True)
class Trial:
    """One round, after so many tokens of context, with a tree of so many nodes."""

    context: int
    size: int
    parts: Parts


@dataclass(frozen=True)
class Sweep:
    """Every size once, all within seconds of each other."""

    law: int  # which of the sampling parameters it ran under
    trials: tuple[Trial, ...]
    seconds: float  # that it took altogether


@dataclass(frozen=True)
class Timings:
    """What was timed so far.

    Args:
        contexts: tokens of context, increasing; draft and overhead are taken from the first.
        sizes: of the trees, increasing.
        planned: sweeps that are wanted altogether.
    """

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    planned: int
    sweeps: tuple[Sweep, ...] = ()

    def __post_init__(self) -> None:
        places = sorted((context, size) for context in self.contexts for size in self.sizes)
        for number, sweep in enumerate(self.sweeps):
            if sorted((trial.context, trial.size) for trial in sweep.trials) != places:
                raise UsageError(f"sweeps[{number}] must hold every size at every context once, and does not.")

    @property
    def seconds(self) -> float:
        """That all sweeps took together."""
        return sum(sweep.seconds for sweep in self.sweeps)

    def profile(self, law: int | None = None, *, rising: bool = False) -> LatencyProfile:
        """Medians and interquartile ranges.

        The machine's speed moves, for all sizes alike: each sweep is scaled by how fast its passes were beside those of
        the same sizes in the others, so that sizes compare as if all had been timed at once, at the median speed.

        Args:
            law: draft and overhead under these sampling parameters alone; None pools all. Target passes do not depend
                on them.
            rising: pool neighbouring sizes where the larger one's rounds seem to take less time. That is so of streamed
                weights, where every pass reads the same bytes: up to some size rounds take one time, and what tells
                them apart is how fast the link was at that moment. Elsewhere a kernel can suit the larger size.
        """
        speeds = _speeds(self.sweeps)
        trials = [
            (sweep.law, trial.context, trial.size, _scaled(trial.parts, 1 / speed))
            for sweep, speed in zip(self.sweeps, speeds, strict=True)
            for trial in sweep.trials
        ]
        places: dict[tuple[int, int], list[Parts]] = {}
        for _, context, size, parts in trials:
            places.setdefault((context, size), []).append(parts)
        curves = ({size: places[context, size] for size in self.sizes} for context in self.contexts)
        target = {context: _passes(curve, rising) for context, curve in zip(self.contexts, curves, strict=True)}
        ours = [(size, p) for of, context, size, p in trials if context == self.contexts[0] and law in (None, of)]
        draft = _draft([p for _, p in ours])
        facts = {"sweeps": len(self.sweeps), "seconds": round(self.seconds, 1)}
        facts |= {"fastest_sweep": round(min(speeds), 3), "slowest_sweep": round(max(speeds), 3)}
        facts |= {"scatter": round(_scatter(chain.from_iterable(curve.values() for curve in target.values())), 3)}
        return LatencyProfile(target, draft, _overhead(ours, draft), facts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        sweeps = [
            {"law": sweep.law, "trials": [_trial_record(trial) for trial in sweep.trials], "seconds": sweep.seconds}
            for sweep in self.sweeps
        ]
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "contexts": list(self.contexts),
            "sizes": list(self.sizes),
            "planned": self.planned,
            "sweeps": sweeps,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Timings:
        """Build from what `to_dict` gave. UsageError for anything else."""
        checked = check_record(record, _FORMAT, _VERSION, ["contexts", "sizes", "planned", "sweeps"])
        contexts, sizes = (_integers(name, checked[name]) for name in ("contexts", "sizes"))
        sweeps = tuple(_sweep(sweep) for sweep in require_list("sweeps", checked["sweeps"]))
        return cls(contexts, sizes, require_integer("planned", checked["planned"], 1), sweeps)

    def save(self, path: Path) -> None:
        """Write a versioned JSON file, whole or not at all. FileError if it cannot be written."""
        save_record(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Timings:
        """Read a file that `save` wrote. FileError, naming the path, if it is missing or damaged."""
        return load_record(path, cls.from_dict)


def _speeds(sweeps: Sequence[Sweep], rounds: int = 8) -> list[float]:
    """How long each sweep's passes took beside the median sweep's: Tukey's median polish of the logarithms."""
    keys = [(trial.context, trial.size) for trial in sweeps[0].trials]
    table = np.full((len(sweeps), len(keys)), np.nan)
    for row, sweep in enumerate(sweeps):
        found = {(trial.context, trial.size): trial.parts.target for trial in sweep.trials}
        table[row] = [found.get(key, np.nan) for key in keys]
    logs: NDArray[np.float64] = np.log(table)
    speeds = np.zeros(len(sweeps))
    for _ in range(rounds):
        sizes = np.nanmedian(logs - speeds[:, None], axis=0)
        speeds = np.nanmedian(logs - sizes, axis=1)
    return [float(speed) for speed in np.exp(speeds - np.median(speeds))]


def _scaled(parts: Parts, by: float) -> Parts:
    levels = tuple((width, seconds * by) for width, seconds in parts.levels)
    return Parts(parts.target * by, levels, parts.total * by)


def _timing(seconds: Iterable[float]) -> Timing:
    low, middle, high = np.percentile(list(seconds), [25, 50, 75])
    return Timing(float(middle), float(high - low))


def _passes(rounds: Mapping[int, Sequence[Parts]], rising: bool) -> dict[int, Timing]:
    """By size; `rising` moves passes by what makes whole rounds rise: part of a pass is hidden behind the draft."""
    passes = {size: _timing(parts.target for parts in found) for size, found in rounds.items()}
    if not rising:
        return passes
    totals = [float(np.median([parts.total for parts in found])) for found in rounds.values()]
    moves = [fitted - total for fitted, total in zip(_rising(totals), totals, strict=True)]
    return {
        size: Timing(max(0.0, timing.seconds + move), timing.spread)
        for (size, timing), move in zip(passes.items(), moves, strict=True)
    }


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest values that never fall: isotonic regression, by pooling adjacent violators (Ayer et al. 1955)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [fmean(pool) for pool in pools for _ in pool]


def _scatter(timings: Iterable[Timing]) -> float:
    """How far repeats lie apart, in shares of their median: small on an idle machine."""
    return float(np.median([timing.spread / timing.seconds for timing in timings]))


def _draft(rounds: Sequence[Parts]) -> dict[int, Timing]:
    """By width: levels below the root's, whose times are about linear in the width, so that near widths are pooled."""
    levels = [level for parts in rounds for level in parts.levels[1:]]
    roots = [parts.levels[0] for parts in rounds if parts.levels]
    if not any(width == 1 for width, _ in levels):
        levels += roots
    return _pooled(levels)


def _overhead(rounds: Sequence[tuple[int, Parts]], draft: Mapping[int, Timing]) -> dict[int, Timing]:
    """By size: what a round takes beyond its pass and its levels. The root's level counts as one of width 1: what it
    takes longer, to catch up on the text, is part of the overhead."""
    return _pooled([(size, _beyond(parts, draft)) for size, parts in rounds])


def _beyond(parts: Parts, draft: Mapping[int, Timing]) -> float:
    root = draft[1].seconds if parts.levels else 0.0
    return parts.total - parts.target - root - sum(seconds for _, seconds in parts.levels[1:])


def _pooled(samples: Iterable[tuple[int, float]]) -> dict[int, Timing]:
    """Medians by place; places from 3 on are pooled by octave (3-4, 5-8, 9-16, …) and stand at its median."""
    octaves: dict[int, list[tuple[int, float]]] = {}
    for place, seconds in samples:
        octaves.setdefault((place - 1).bit_length(), []).append((place, seconds))
    pooled = {}
    for _, octave in sorted(octaves.items()):
        middle = np.median([place for place, _ in octave])
        pooled[round(float(middle))] = _timing(seconds for _, seconds in octave)
    return pooled


def _trial_record(trial: Trial) -> dict[str, Any]:
    target, total = trial.parts.target, trial.parts.total
    levels = [[width, seconds] for width, seconds in trial.parts.levels]
    return {"context": trial.context, "size": trial.size, "target": target, "levels": levels, "total": total}


def _integers(name: str, values: Any) -> tuple[int, ...]:
    integers = tuple(require_integer(f"{name}[{i}]", value, 1) for i, value in enumerate(require_list(name, values)))
    if not integers or list(integers) != sorted(set(integers)):
        raise UsageError(f"{name} must be increasing integers, not {values!r:.80}.")
    return integers


def _sweep(record: Any) -> Sweep:
    checked = require_keys("a sweep", record, ["law", "trials", "seconds"])
    trials = tuple(map(_trial, require_list("trials", checked["trials"])))
    return Sweep(require_integer("law", checked["law"], 0), trials, _seconds("seconds", checked["seconds"]))


def _trial(record: Any) -> Trial:
    checked = require_keys("a trial", record, ["context", "size", "target", "levels", "total"])
    levels = [require_list("a level", level) for level in require_list("levels", checked["levels"])]
    if any(len(level) != 2 for level in levels):
        raise UsageError("a level must be its width and its seconds.")
    context, size = (require_integer(name, checked[name], 1) for name in ("context", "size"))
    target, total = (_seconds(name, checked[name]) for name in ("target", "total"))
    timed = tuple((require_integer("a width", width, 1), _seconds("a level", time)) for width, time in levels)
    return Trial(context, size, Parts(target, timed, total))


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise UsageError(f"{name} must be seconds of at least 0, not {value!r}.")
    return float(value)
