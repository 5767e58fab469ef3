"""The page's plots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from sequoia.measure.bench import wording
from sequoia.measure.bench.bootstrap import Estimate
from sequoia.measure.bench.summary import BASELINE, MethodSummary, SettingSummary
from sequoia.measure.charts import COLOURS, DASHED, INK, PLAIN, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = COLOURS[0]
_MARKERS = "osD^vPX*h"
_TICKS_APART = 1.2
_ASIDE = 1.06  # from one kind of tree to the next: those of one size would hide each other


def speed_plot(summary: SettingSummary, limit: float) -> str:
    """Tokens per second of each method, in the run's order; `limit` is the axis's end, equal for all settings."""
    found = ((entry, entry.overall.tokens_per_second) for entry in summary.methods)
    bars = [(entry, estimate) for entry, estimate in found if estimate is not None]
    height = 0.95 + 0.34 * len(bars)
    described = "; ".join(f"{entry.method.name} {wording.with_interval(speed)} tokens/s" for entry, speed in bars)
    return svg(f"speed at {summary.setting}: {described}", height, lambda axes: _draw_speed(axes, bars, limit))


def size_plot(summary: SettingSummary) -> str | None:
    """Tokens per round by tree size; None if no method has a tree."""
    entries = [entry for entry in summary.methods if _has_tree(entry)]
    if not entries:
        return None
    points = "; ".join(
        f"{entry.method.name} {entry.method.tree_size} nodes {wording.figure(entry.overall.accepted_length)}"
        for entry in entries
    )
    height = max(3.4, 1.2 + 0.2 * len(entries))
    return svg(f"tokens per round at {summary.setting}: {points}", height, lambda axes: _draw_sizes(axes, entries))


def fastest(settings: Sequence[SettingSummary]) -> float:
    """The most tokens per second of any method, its interval included."""
    found = (entry.overall.tokens_per_second for setting in settings for entry in setting.methods)
    return max((_bounds(estimate)[1] for estimate in found if estimate is not None), default=1.0)


def _has_tree(entry: MethodSummary) -> bool:
    return (entry.method.tree_size or 0) > 1 and entry.overall.accepted_length is not None


def _bounds(estimate: Estimate) -> tuple[float, float]:
    return (
        estimate.value if estimate.low is None else estimate.low,
        estimate.value if estimate.high is None else estimate.high,
    )


def _draw_speed(axes: Axes, bars: Sequence[tuple[MethodSummary, Estimate]], limit: float) -> None:
    for row, (entry, estimate) in enumerate(bars):
        low, high = _bounds(estimate)
        axes.barh(row, estimate.value, height=0.62, color=PLAIN if entry.method.name == BASELINE else _BAR)
        axes.plot([low, high], [row, row], color=INK, linewidth=1.4, solid_capstyle="butt")
        # On paper of its own, for plain's line may run below it.
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(high + 0.02 * limit, row, _label(entry), va="center", fontsize=8.5, bbox=paper)
        if entry.method.name == BASELINE:
            axes.axvline(estimate.value, color=INK, linewidth=0.9, linestyle=DASHED)
    axes.set_yticks(range(len(bars)), [_name(entry.method.name) for entry, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * limit)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens/s, decoding alone")


def _label(entry: MethodSummary) -> str:
    value = wording.figure(entry.overall.tokens_per_second)
    known = entry.overall.speedup is not None and entry.method.name != BASELINE
    return f"{value} · {wording.figure(entry.overall.speedup, '×')}" if known else value


def _name(name: str) -> str:
    """Short enough for a margin; names of files may hold what no font and no file takes."""
    name = name.encode("utf-8", "replace").decode("utf-8")
    return name if len(name) <= 30 else f"{name[:14]}…{name[-15:]}"


def _draw_sizes(axes: Axes, entries: Sequence[MethodSummary]) -> None:
    sizes = [1, *(entry.method.tree_size or 1 for entry in entries)]
    families = list(_families(entries))
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, max(sizes) * 1.15 * _ASIDE ** (len(families) / 2))
    axes.axhline(1, color=PLAIN, linewidth=0.9, linestyle=DASHED)
    ends = []
    for index, (family, members) in enumerate(families):
        colour, marker = COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)]
        aside = _ASIDE ** (index - (len(families) - 1) / 2)
        ends.append((*_draw_family(axes, members, colour, marker, aside), family, colour))
    lowest, highest = axes.get_ylim()
    axes.set_ylim(min(lowest, 0.9), highest)
    _label_at_margin(axes, ends)
    axes.set_xticks(_ticks(sizes), list(map(str, _ticks(sizes))))
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("nodes of the tree, the root included (dashed: plain)")
    axes.set_ylabel("tokens per round")


def _families(entries: Sequence[MethodSummary]) -> Iterator[tuple[str, list[MethodSummary]]]:
    """Methods that differ only in their numbers, in the order of their sizes; a family of one has the method's name."""

    def family(entry: MethodSummary) -> str:
        return re.sub(r":\d+(x\d+)*$", "", entry.method.spec or entry.method.name)

    ordered = sorted(entries, key=lambda entry: (family(entry), entry.method.tree_size or 0))
    for name, group in groupby(ordered, family):
        members = list(group)
        yield _name(name if len(members) > 1 else members[0].method.name), members


def _draw_family(
    axes: Axes, members: Sequence[MethodSummary], colour: str, marker: str, aside: float
) -> tuple[float, float]:
    """Points joined by a line, moved sideways by a factor; returns the last one."""
    points = [
        (aside * (member.method.tree_size or 1), estimate)
        for member in members
        if (estimate := member.overall.accepted_length) is not None
    ]
    for size, estimate in points:
        axes.plot([size, size], _bounds(estimate), color=colour, linewidth=1.1, alpha=0.55)
    sizes, values = [size for size, _ in points], [estimate.value for _, estimate in points]
    axes.plot(sizes, values, color=colour, marker=marker, markersize=6, linewidth=1.3)
    return sizes[-1], values[-1]


def _label_at_margin(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names right of the axes, moved apart, each joined to its point."""
    lowest, highest = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end[1])
    least = min(0.055, 1 / max(len(ordered), 1))
    heights = _moved_apart([(value - lowest) / (highest - lowest) for _, value, _, _ in ordered], least)
    for (size, value, name, colour), height in zip(ordered, heights, strict=True):
        axes.annotate(
            name,
            xy=(size, value),
            xytext=(1.05, height),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "shrinkB": 4},
            annotation_clip=False,
        )


def _moved_apart(heights: Sequence[float], least: float) -> list[float]:
    """Ascending numbers in 0 to 1, at least `least` apart, close to where they were."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - least
    return moved


def _ticks(sizes: Sequence[int]) -> list[int]:
    """The sizes whose labels do not run into each other on a logarithmic axis; frequent ones first."""
    shown: list[int] = []
    for size in sorted(set(sizes), key=lambda size: (-sizes.count(size), size)):
        if all(max(size, other) >= _TICKS_APART * min(size, other) for other in shown):
            shown.append(size)
    return sorted(shown)
