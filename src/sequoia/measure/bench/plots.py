"""The page's plots: each an SVG whose ids are its own, so that any number of them share a page."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any
from zlib import crc32

from sequoia.measure.bench import wording
from sequoia.measure.bench.bootstrap import Estimate
from sequoia.measure.bench.summary import BASELINE, MethodSummary, SettingSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FADED, _GRID, _BAR, _PLAIN = "#24292f", "#57606a", "#d0d7de", "#2f6f9f", "#8c959f"
_COLOURS = ("#2f6f9f", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0e7a86", "#cf222e", "#57606a")
_MARKERS = "osD^vPX*h"
_WIDTH = 5.6  # inches
_TICKS_APART = 1.2
_ASIDE = 1.06  # from one kind of tree to the next: those of one size would hide each other
_STYLE: Any = {
    "font.size": 9.5,
    "text.color": _INK,
    "text.parse_math": False,  # a file's name may hold a $
    "axes.edgecolor": _FADED,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FADED,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "figure.constrained_layout.w_pad": 0.08,
    "svg.fonttype": "none",  # the reader's fonts have the characters that Matplotlib's own lack
    "svg.hashsalt": "sequoia",
}


def speed_plot(summary: SettingSummary, limit: float) -> str:
    """Tokens per second of each method, in the run's order; `limit` is the axis's end, equal for all settings."""
    found = ((entry, entry.overall.tokens_per_second) for entry in summary.methods)
    bars = [(entry, estimate) for entry, estimate in found if estimate is not None]
    height = 0.95 + 0.34 * len(bars)
    described = "; ".join(f"{entry.method.name} {wording.with_interval(speed)} tokens/s" for entry, speed in bars)
    return _svg(f"speed at {summary.setting}: {described}", height, lambda axes: _draw_speed(axes, bars, limit))


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
    return _svg(f"tokens per round at {summary.setting}: {points}", height, lambda axes: _draw_sizes(axes, entries))


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
        axes.barh(row, estimate.value, height=0.62, color=_PLAIN if entry.method.name == BASELINE else _BAR)
        axes.plot([low, high], [row, row], color=_INK, linewidth=1.4, solid_capstyle="butt")
        # On paper of its own, for plain's line may run below it.
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(high + 0.02 * limit, row, _label(entry), va="center", fontsize=8.5, bbox=paper)
        if entry.method.name == BASELINE:
            axes.axvline(estimate.value, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
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
    axes.axhline(1, color=_PLAIN, linewidth=0.9, linestyle=(0, (4, 3)))
    ends = []
    for index, (family, members) in enumerate(families):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
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


def _svg(description: str, height: float, draw: Callable[[Axes], None]) -> str:
    with _silent():
        from matplotlib import rc_context, rcdefaults, rcParams
        from matplotlib.figure import Figure

        with rc_context():
            rcdefaults()  # not the user's style
            rcParams.update(_STYLE)
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            draw(figure.subplots())
            return _with_own_ids(_rendered(figure), description)


def _rendered(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()


@contextmanager
def _silent() -> Iterator[None]:
    """No lines about the font cache or missing glyphs, which the reader's own fonts have."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _with_own_ids(svg: str, description: str) -> str:
    """The element alone, its ids made unlike other plots', with a text for those who do not see it."""
    svg = svg[svg.index("<svg") :]
    mark = f"p{crc32(description.encode('utf-8', 'replace')):08x}"
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{mark}-", svg)
    # The style would hold for the whole page.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
