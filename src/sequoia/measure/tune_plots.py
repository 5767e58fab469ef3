"""The plots of a tune report, each drawn into axes that the page or the picture gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from sequoia.measure.charts import COLOURS, DASHED, INK, PLAIN
from sequoia.measure.samples import PowerLaw, fitted_power_law
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option
from sequoia.tree.plan import Plan
from sequoia.tree.profile import AcceptanceProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TREE, _CHAIN, _REJECTED = COLOURS[0], COLOURS[1], COLOURS[1]
_SHADES = ("#440154", "#31688e", "#35b779")  # viridis: their lightness tells them apart as well
_MARKERS = "os^D"
_ASIDE = 1.018  # from one depth to the next: error bars would hide each other
_RANKS_SHOWN = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
_LEAST_SHARE = 1e-4
_ROUNDING = 1e-9
_LEAST_FITTED = 3  # any two points are on a line


@dataclass(frozen=True)
class _Curve:
    """A line through points [n] in the order of x, and how far its band reaches to either side of each."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float]
    colour: str
    marker: str


def draw_acceptance(axes: Axes, plan: Plan) -> None:
    """Rates by rank of the first depths; the share that no rank up to each took, and the power law fitted to it."""
    profile = plan.profile
    _draw_rates(axes, profile)
    _draw_rejected(axes, profile)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.9, 1.1 * max(profile.ranks, 2))
    shown = [rank for rank in _RANKS_SHOWN if rank < profile.ranks]
    axes.set_xticks([rank + 1 for rank in shown], list(map(str, shown)))
    axes.set_ylim(_lowest(profile), 1.15)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _finish(axes, "rank of the child", "share of visits", columns=3)


def draw_latency(axes: Axes, latency: LatencyProfile, chosen: Iterable[Option]) -> None:
    """Time of a target pass by its rows at each context, with the rows of the chosen options."""
    looks = zip(cycle(_SHADES), cycle(_MARKERS), strict=False)
    for (context, timings), look in zip(latency.target.items(), looks, strict=False):
        _draw_curve(axes, _timings(f"{context:,} tokens of context", timings, *look))
    axes.set_ylim(0, None)
    sizes = {option.shape.size for option in chosen}
    _draw_rings(axes, {size: 1e3 * latency.target_seconds(size) for size in sizes})
    _scale_sizes(axes, [*chain.from_iterable(latency.target.values()), *sizes])
    _finish(axes, "rows of the target's pass", "ms", columns=3 if len(latency.target) < 3 else 2)


def draw_rest(axes: Axes, latency: LatencyProfile) -> None:
    """What a round takes besides its target pass."""
    draft = _timings("a draft level, by the nodes it continues", latency.draft, _CHAIN, "s")
    overhead = _timings("overhead, by the tree's nodes", latency.overhead, _TREE, "o")
    for curve in (draft, overhead):
        _draw_curve(axes, curve)
    axes.set_ylim(min(0, axes.get_ylim()[0]), None)
    _scale_sizes(axes, [*latency.draft, *latency.overhead])
    _finish(axes, "nodes", "ms", columns=1)


def draw_speed(axes: Axes, plan: Plan) -> None:
    """Predicted tokens per second by size, of the best tree and the chain, and without speculation."""
    plain, chosen = plan.plain.prediction, plan.chosen
    speed, error = plain.tokens_per_second, plain.tokens_per_second_error
    for curve in (_speeds(plan, "tree", _TREE, "o"), _speeds(plan, "chain", _CHAIN, "s")):
        _draw_curve(axes, curve)
    axes.axhline(speed, color=PLAIN, linewidth=1.2, linestyle=DASHED, label="off")
    axes.axhspan(speed - error, speed + error, color=PLAIN, alpha=0.25, linewidth=0)
    _draw_rings(axes, {chosen.shape.size: chosen.prediction.tokens_per_second})
    _scale_sizes(axes, [1, chosen.shape.size, *(option.shape.size for option in plan.sizes)])
    _finish(axes, "nodes of the tree, the root included", "tokens/s")


def power_law(profile: AcceptanceProfile) -> PowerLaw | None:
    """Fitted to the rejected shares; None where too few are above 0, or where they do not fall."""
    law, known = fitted_power_law(shares := rejected(profile)), sum(share > 0 for share in shares)
    return law if known >= _LEAST_FITTED and isfinite(law.fit) else None


def rejected(profile: AcceptanceProfile) -> list[float]:
    """Share of visits to the root whose first k children were all rejected, for k from 1 [ranks]."""
    return [float(left) if left > _ROUNDING else 0.0 for left in 1 - np.cumsum(profile.rates[0])]


def _lowest(profile: AcceptanceProfile) -> float:
    """Where the axis of shares ends: below all that is shown."""
    shares = [*chain.from_iterable(profile.rates[: len(_SHADES)]), *rejected(profile)]
    return 0.4 * min((share for share in shares if share >= _LEAST_SHARE), default=_LEAST_SHARE)


def _draw_rates(axes: Axes, profile: AcceptanceProfile) -> None:
    """A line for each of the first depths; what is next to 0 has no place on a logarithmic axis."""
    rows = profile.rates[: len(_SHADES)]
    noted = [*profile.provenance.get("errors", ()), *[()] * len(rows)]
    for depth, row in enumerate(rows):
        errors = [*(error if isfinite(error) else 0.0 for error in noted[depth]), *[0.0] * len(row)]
        points = [(rank + 1, rate, errors[rank]) for rank, rate in enumerate(row) if rate >= _LEAST_SHARE]
        if points:
            x, y, error = np.array(points).T
            name = "every depth" if len(profile.rates) == 1 else f"depth {depth}"
            x, colour = x * _ASIDE ** (depth - (len(rows) - 1) / 2), _SHADES[depth]
            axes.errorbar(x, y, [np.minimum(error, 0.999 * y), error], fmt="none", ecolor=colour, elinewidth=0.9)
            axes.plot(x, y, color=colour, marker=_MARKERS[depth], markersize=4.5, linewidth=1.1, label=name)


def _draw_rejected(axes: Axes, profile: AcceptanceProfile) -> None:
    shares = np.array([share for share in rejected(profile) if share > 0])
    children = np.arange(1, len(shares) + 1)
    axes.plot(children, shares, color=_REJECTED, linewidth=1.1, marker=".", markersize=5, label="all rejected")
    if found := power_law(profile):
        # A line of least squares goes through the middle of the points, here of their logarithms.
        height = np.exp(np.log(shares).mean() + found.exponent * np.log(children).mean())
        name = f"power law, η {found.exponent:.2f}, r² {found.fit:.3f}"
        axes.plot(children, height * children**-found.exponent, color=INK, linewidth=0.9, linestyle=DASHED, label=name)


def _timings(name: str, timings: Mapping[int, Timing], colour: str, marker: str) -> _Curve:
    """In milliseconds, with the middle half of the repeats as its band."""
    times = timings.values()
    seconds, spreads = [1e3 * time.seconds for time in times], [500 * time.spread for time in times]
    return _Curve(name, list(timings), seconds, spreads, colour, marker)


def _speeds(plan: Plan, kind: str, colour: str, marker: str) -> _Curve:
    options = sorted((entry for entry in plan.sizes if entry.kind == kind), key=lambda entry: entry.shape.size)
    found = [option.prediction for option in options]
    speeds, errors = [each.tokens_per_second for each in found], [each.tokens_per_second_error for each in found]
    return _Curve(kind, [option.shape.size for option in options], speeds, errors, colour, marker)


def _draw_curve(axes: Axes, curve: _Curve) -> None:
    if not curve.x:
        return
    y, error = np.array(curve.y), np.array(curve.error)
    axes.fill_between(curve.x, y - error, y + error, color=curve.colour, alpha=0.2, linewidth=0)
    look: Any = {"color": curve.colour, "marker": curve.marker, "markersize": 3.5, "linewidth": 1.3}
    axes.plot(curve.x, y, label=curve.name, **look)


def _draw_rings(axes: Axes, points: Mapping[int, float]) -> None:
    """Around what was chosen."""
    look: Any = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.6}
    axes.plot(list(points), list(points.values()), "o", label="chosen", zorder=5, **look)


def _scale_sizes(axes: Axes, sizes: Iterable[int]) -> None:
    most = max(sizes, default=1)
    shown = [2**power for power in range(most.bit_length())]
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.85, 1.15 * max(most, 2))
    axes.set_xticks(shown, list(map(str, shown)))


def _finish(axes: Axes, x: str, y: str, columns: int = 4) -> None:
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.01), "borderaxespad": 0.0}
    axes.legend(ncols=columns, frameon=False, fontsize=8.5, columnspacing=1.4, handlelength=2.2, **place)
