"""LatencyProfile: how long the passes of a pair take on a machine, by rows and width."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer, require_keys
from sequoia.tree.records import check_record, load_record, save_record
from sequoia.tree.shape import TreeShape

_FORMAT, _VERSION = "sequoia-latency", 1
_MOST_SECONDS = 1e9

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """What repeats of one thing took, in seconds: the median and the interquartile range."""

    seconds: float
    spread: float

    def to_dict(self) -> dict[str, float]:
        """Plain data that `from_dict` reads."""
        return {"seconds": self.seconds, "spread": self.spread}

    @classmethod
    def from_dict(cls, record: Any, name: str = "a timing") -> Timing:
        """Build from what `to_dict` gave. UsageError, calling it `name`, for anything else."""
        checked = require_keys(name, record, ["seconds", "spread"])
        return cls(checked["seconds"], checked["spread"])


@dataclass(frozen=True, repr=False)
class LatencyProfile:
    """Measured times of passes, in the very configuration that will run.

    Between measured points times are linear. Beyond the last they go on with the slope of the upper half of what was
    measured, and never fall; below the first they are those of the first.

    Args:
        target: tokens of context → rows → time of one target pass. Each context has a time of 1 row: plain decoding.
        draft: width → time of one draft level; width is the nodes that the draft continues. {} without a draft.
        overhead: tree size → time of a round beyond its passes; below 0 where passes overlap. {} for none.
        provenance: plain data that says where the times come from; kept in the file.

    Raises:
        UsageError: a value is out of its range; the message names it.
    """

    target: Mapping[int, Mapping[int, Timing]]
    draft: Mapping[int, Timing]
    overhead: Mapping[int, Timing]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = _checked_curve("target", self.target, 0, lambda name, curve: _timings(name, curve, 0.0))
        for context, curve in target.items():
            if 1 not in curve:
                raise UsageError(f"target[{context}] has no time of 1 row, which plain decoding needs. Measure it.")
        if not target:
            raise UsageError("target has no times. Measure at least 1 row at one context.")
        if not isinstance(self.provenance, Mapping):
            raise UsageError(f"provenance must be a mapping, not {type(self.provenance).__name__}.")
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "draft", _timings("draft", self.draft, 0.0))
        object.__setattr__(self, "overhead", _timings("overhead", self.overhead, -_MOST_SECONDS))
        object.__setattr__(self, "provenance", dict(self.provenance))

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of target passes that were measured at every context, increasing."""
        return tuple(sorted(set.intersection(*map(set, self.target.values()))))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of context at which target passes were measured, increasing."""
        return tuple(self.target)

    def target_seconds(self, rows: int, context: int | None = None) -> float:
        """Time of a target pass over `rows` tokens after `context` tokens; None is the smallest measured context."""
        return self._target(rows, context, _seconds)

    def draft_seconds(self, width: int) -> float:
        """Time of a draft level that continues `width` nodes. UsageError where no draft was measured."""
        return self._draft(width, _seconds)

    def overhead_seconds(self, size: int) -> float:
        """Time of a round beyond its passes, with a tree of `size` nodes."""
        return _at(self.overhead, size, _seconds) if self.overhead else 0.0

    def round_seconds(self, shape: TreeShape, context: int | None = None, batch: int = 1) -> float:
        """Time of a round: its target pass, a draft level for each depth that has inner nodes, and the overhead.

        A round takes at least its target pass. With a `batch` of requests rows, widths and sizes count that many times:
        an estimate on paper, since each request also has a context of its own to read.
        """
        target = self.target_seconds(shape.size * batch, context)
        draft = sum(self.draft_seconds(width * batch) for width in level_widths(shape))
        return max(target, target + draft + self.overhead_seconds(shape.size * batch))

    def round_spread(self, shape: TreeShape, context: int | None = None, batch: int = 1) -> float:
        """Interquartile range of `round_seconds`.

        The spreads of target, draft and overhead as of independent things; those of the draft's levels add up, since
        they were measured as one.
        """
        draft = sum(self._draft(width * batch, _spread) for width in level_widths(shape))
        overhead = _at(self.overhead, shape.size * batch, _spread) if self.overhead else 0.0
        return math.hypot(self._target(shape.size * batch, context, _spread), draft, overhead)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        target = {str(context): _curve_record(curve) for context, curve in self.target.items()}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "target": target,
            "draft": _curve_record(self.draft),
            "overhead": _curve_record(self.overhead),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> LatencyProfile:
        """Build from what `to_dict` gave. UsageError for unknown or missing keys and for values out of range."""
        checked = check_record(record, _FORMAT, _VERSION, ["target", "draft", "overhead", "provenance"])
        target = _read_curve("target", checked["target"], _read_timings)
        draft, overhead = (_read_timings(name, checked[name]) for name in ("draft", "overhead"))
        return cls(target, draft, overhead, checked["provenance"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file, whole or not at all. FileError if it cannot be written."""
        save_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyProfile:
        """Read a file that `save` wrote. FileError, naming the path, if it is missing or damaged."""
        return load_record(path, cls.from_dict)

    def _target(self, rows: int, context: int | None, part: Callable[[Timing], float]) -> float:
        if context is None:
            return _at(next(iter(self.target.values())), rows, part)
        return _at(self.target, context, lambda curve: _at(curve, rows, part))

    def _draft(self, width: int, part: Callable[[Timing], float]) -> float:
        if not self.draft:
            raise UsageError("no draft was timed, so only plain decoding can be charged. Measure a draft's levels too.")
        return _at(self.draft, width, part)

    def __repr__(self) -> str:
        return f"LatencyProfile(contexts={list(self.contexts)}, rows={list(self.rows)}, widths={list(self.draft)})"


def level_widths(shape: TreeShape) -> list[int]:
    """For each draft level the nodes that the draft continues: inner nodes by depth; [] for the root alone."""
    return [sum(bool(shape.children(node)) for node in level) for level in shape.levels[:-1]]


def _seconds(timing: Timing) -> float:
    return timing.seconds


def _spread(timing: Timing) -> float:
    return timing.spread


def _at(points: Mapping[int, T], place: int, value: Callable[[T], float]) -> float:
    """Value at `place` of the line through `points`, which are in increasing order."""
    places = list(points)
    above = bisect_left(places, require_integer("rows, width, size and context", place, least=0))
    if above < len(places) and (places[above] == place or above == 0):
        return value(points[places[above]])
    if above < len(places):
        low, high = places[above - 1], places[above]
    else:
        high = places[-1]
        low = max((p for p in places if 2 * p <= high), default=places[0])
    at_low, at_high = value(points[low]), value(points[high])
    if above == len(places):
        slope = max(0.0, at_high - at_low) / (high - low) if high > low else 0.0
        return at_high + slope * (place - high)
    return at_low + (at_high - at_low) * (place - low) / (high - low)


def _checked_curve(name: str, curve: Any, least: int, check: Callable[[str, Any], T]) -> dict[int, T]:
    if not isinstance(curve, Mapping):
        raise UsageError(f"{name} must map integers to times, not be {type(curve).__name__}.")
    places = sorted(require_integer(f"a key of {name}", place, least) for place in curve)
    return {place: check(f"{name}[{place}]", curve[place]) for place in places}


def _timings(name: str, curve: Any, least: float) -> dict[int, Timing]:
    return _checked_curve(name, curve, 1, lambda place, timing: _checked_timing(place, timing, least))


def _checked_timing(name: str, timing: Any, least: float) -> Timing:
    if not isinstance(timing, Timing):
        raise UsageError(f"{name} must be a Timing, not {timing!r}.")
    seconds = _number(f"{name}.seconds", timing.seconds, least)
    if least == 0 and seconds == 0 and name.startswith("target"):
        raise UsageError(f"{name}.seconds must be above 0.")
    return Timing(seconds, _number(f"{name}.spread", timing.spread, 0.0))


def _number(name: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= _MOST_SECONDS:
        raise UsageError(f"{name} must be a number of seconds of at least {least:g}, not {value!r}.")
    return float(value)


def _curve_record(curve: Mapping[int, Timing]) -> dict[str, Any]:
    return {str(place): timing.to_dict() for place, timing in curve.items()}


def _read_curve(name: str, record: Any, read: Callable[[str, Any], T]) -> dict[int, T]:
    if not isinstance(record, Mapping):
        raise UsageError(f"{name} must be an object of times, not {type(record).__name__}.")
    curve = {}
    for place, value in record.items():
        if not (isinstance(place, str) and place.isascii() and place.isdigit() and len(place) < 10):
            raise UsageError(f"a key of {name} must be an integer, not {place!r}.")
        curve[int(place)] = read(f"{name}[{place}]", value)
    return curve


def _read_timings(name: str, record: Any) -> dict[int, Timing]:
    return _read_curve(name, record, lambda place, value: Timing.from_dict(value, place))
