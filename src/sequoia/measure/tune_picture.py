"""The plots of a tune report in one picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sequoia.measure.bench import wording
from sequoia.measure.charts import FADED, INK, png
from sequoia.measure.tree_plot import draw_tree
from sequoia.measure.tune_plots import draw_acceptance, draw_latency, draw_speed
from sequoia.measure.tune_wording import shortened, subject, verdict
from sequoia.tree.plan import Plan, PlanFile, describe_law

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_WIDTH, _ROW, _HEADING = 11.0, 3.6, 0.8  # inches
_LONGEST_NAME, _LONGEST_LINE = 30, 125  # letters

Panels = list[tuple[str, Callable[["Axes"], None]]]


def picture(file: PlanFile) -> bytes:
    """A PNG: for each plan its acceptance, the times of passes, its predicted speed and its tree."""
    blocks = [_panels(file, plan) for plan in file.plans]
    heights = [_HEADING, *[_ROW * math.ceil(len(panels) / 2) for panels in blocks]]
    return png(_WIDTH, sum(heights), partial(_draw, file, blocks, heights))


def _panels(file: PlanFile, plan: Plan) -> Panels:
    panels: Panels = [("time of a target pass", lambda axes: draw_latency(axes, file.latency, [plan.chosen]))]
    if any(map(any, plan.profile.rates)):
        panels.insert(0, ("acceptance by rank", lambda axes: draw_acceptance(axes, plan)))
    if plan.sizes:
        panels.append(("predicted speed by size", lambda axes: draw_speed(axes, plan)))
    tree = plan.option("tree") or plan.chosen
    if tree is not plan.plain:
        name = tree.name if tree is plan.chosen else f"{tree.name}, not chosen"
        panels.append((name, lambda axes: draw_tree(axes, tree.shape, plan.profile, _WIDTH / 2, _ROW - 0.6)))
    return panels


def _draw(file: PlanFile, blocks: list[Panels], heights: list[float], figure: Figure) -> None:
    head, *parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    names = {name: shortened(str(file.pair[name]), _LONGEST_NAME) for name in ("target", "draft") if file.pair[name]}
    head.text(0.01, 0.88, subject({**file.pair, **names}), va="top", fontsize=13, fontweight="bold", color=INK)
    about = shortened(wording.machine(file.machine), _LONGEST_LINE)
    head.text(0.01, 0.42, about, va="top", fontsize=9.5, color=FADED)
    for plan, part, panels in zip(file.plans, parts, blocks, strict=True):
        part.suptitle(f"{describe_law(plan.params)} · {verdict(plan)}", x=0.01, ha="left", fontsize=11)
        _draw_panels(part, panels)


def _draw_panels(part: SubFigure, panels: Panels) -> None:
    places = part.subplots(math.ceil(len(panels) / 2), 2).flat
    for axes, (title, draw) in zip(places, panels, strict=False):
        draw(axes)
        _set_title(axes, title)
    for axes in places[len(panels) :]:
        axes.set_axis_off()


def _set_title(axes: Axes, title: str) -> None:
    """Above the legend, where there is one."""
    if (legend := axes.get_legend()) is None:
        axes.set_title(title, fontsize=10.5, loc="left")
    else:
        legend.set_title(title)
        legend.get_title().set_fontsize(10.5)
        legend.set_alignment("left")
