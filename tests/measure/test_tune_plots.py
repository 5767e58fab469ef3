"""What the plots of a tune report show, read back from their axes."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import synthetic_plans as synthetic
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sequoia.measure.tree_plot import draw_tree, score_text, tree_rows, tree_size
from sequoia.measure.tune_plots import draw_acceptance, draw_latency, draw_rest, draw_speed, power_law, rejected
from sequoia.tree.expected import scores
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape


def new_axes() -> Axes:
    return Figure(figsize=(5.6, 3.6), layout="constrained").subplots()


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Points by name."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def boxes(figure: Figure, artists) -> list:
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    return [artist.get_window_extent(renderer) for artist in artists]


def test_speeds_by_size_with_their_errors_and_the_chosen_one():
    plan = synthetic.plan_file().plans[0]
    axes = new_axes()
    draw_speed(axes, plan)
    found = lines(axes)
    assert list(found) == ["tree", "chain", "off", "chosen"]
    for kind in ("tree", "chain"):
        options = sorted((entry for entry in plan.sizes if entry.kind == kind), key=lambda entry: entry.shape.size)
        assert found[kind][0] == [option.shape.size for option in options]
        assert found[kind][1] == [option.prediction.tokens_per_second for option in options]
    assert found["chosen"] == ([16], [plan.chosen.prediction.tokens_per_second])
    assert found["off"][1] == [plan.plain.prediction.tokens_per_second] * 2
    trees = [option.prediction for option in plan.sizes if option.kind == "tree"]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(max(each.tokens_per_second + each.tokens_per_second_error for each in trees))


def test_times_at_each_context_and_the_chosen_rows():
    file = synthetic.plan_file()
    axes = new_axes()
    draw_latency(axes, file.latency, [plan.chosen for plan in file.plans])
    found = lines(axes)
    assert list(found) == ["128 tokens of context", "1,024 tokens of context", "chosen"]
    assert found["128 tokens of context"][0] == list(synthetic.ROWS)
    assert found["chosen"] == ([16], [1e3 * file.latency.target_seconds(16)])
    assert axes.get_ylim()[0] == 0
    times = file.latency.target[128]
    band = axes.collections[0].get_paths()[0].vertices
    assert {round(y, 9) for x, y in band if x == 1} >= {
        round(1e3 * (times[1].seconds + sign * times[1].spread / 2), 9) for sign in (-1, 1)
    }


def test_the_rest_of_a_round_may_be_below_0():
    latency = synthetic.latency()
    times = {size: synthetic.Timing(-1e-3, 1e-4) for size in (1, 16)}
    axes = new_axes()
    draw_rest(axes, synthetic.LatencyProfile(latency.target, {}, times))
    assert list(lines(axes)) == ["overhead, by the tree's nodes"]
    assert axes.get_ylim()[0] < -1


def test_rates_have_bars_of_one_error_that_stay_on_the_axis():
    rates = AcceptanceProfile([[0.5, 0.0, 0.01], [0.4]], {"errors": [[0.1, 0.1, 0.02], [math.inf]]})
    times = synthetic.latency()
    axes = new_axes()
    draw_acceptance(axes, synthetic.plan(0.0, rates, times, tree=TreeShape([-1, 0, 0]), sizes=()))
    found = lines(axes)
    assert [name for name in found if not name.startswith("_")][:3] == ["depth 0", "depth 1", "all rejected"]
    assert found["depth 0"][1] == [0.5, 0.01]  # 0 has no place there
    bars = [segment[:, 1] for entry in axes.collections for segment in entry.get_segments()]
    assert [list(bar) for bar in bars] == [
        pytest.approx([0.4, 0.6]),
        pytest.approx([0.01 - 0.00999, 0.03]),
        pytest.approx([0.4, 0.4]),
    ]
    assert found["all rejected"][1] == pytest.approx([0.5, 0.5, 0.49])


def test_the_power_law_that_made_a_profile_is_found_and_drawn():
    rates = synthetic.profile(0.55, exponent=0.7)
    assert rejected(rates) == pytest.approx([0.45 * k**-0.7 for k in range(1, 17)])
    law = power_law(rates)
    assert law == pytest.approx((0.7, 1.0))
    axes = new_axes()
    draw_acceptance(axes, synthetic.plan(0.0, rates, synthetic.latency(), sizes=(4, 8)))
    drawn = lines(axes)["power law, η 0.70, r² 1.000"]
    assert drawn[1] == pytest.approx(rejected(rates))
    assert power_law(AcceptanceProfile([[0.5, 0.2]])) is None  # two points
    assert power_law(AcceptanceProfile([[0.7, 0.2, 0.1, 0.0]])) is None  # no more, but for rounding
    assert power_law(AcceptanceProfile([[0.0, 0.0, 0.0]])) is None  # nothing that falls


@pytest.mark.parametrize("make", [synthetic.plan_file, synthetic.useless_draft, synthetic.hard, synthetic.large_tree])
def test_nothing_is_drawn_outside_or_over_the_legend(make):
    file = make()
    latency = synthetic.latency((128, 1024, 4096, 16384)) if make is synthetic.hard else file.latency
    for draw in (
        lambda axes: draw_speed(axes, file.plans[0]),
        lambda axes: draw_acceptance(axes, file.plans[0]),
        lambda axes: draw_latency(axes, latency, [file.plans[0].chosen]),
        lambda axes: draw_rest(axes, latency),
    ):
        axes = new_axes()
        draw(axes)
        labels = [label for label in (*axes.get_xticklabels(), *axes.get_yticklabels()) if label.get_text()]
        frame, legend, *found = boxes(axes.figure, [axes, axes.get_legend(), *labels])
        assert legend.y0 >= frame.y1
        assert axes.figure.bbox.width >= legend.x1
        across = found[: len(axes.get_xticklabels())]
        assert not any(left.overlaps(right) for left, right in combinations(across, 2))


# The tree

TREES = [
    TreeShape.root_only(),
    TreeShape.chain(16),
    TreeShape.kary(3, 3),
    TreeShape.beam(8, 6),
    TreeShape([-1, 0, 0, 1, 2, 1, 2, 3]),
    optimal_shape(synthetic.profile(), 16, 4),
    optimal_shape(synthetic.profile(0.85, 0.6, depths=12, ranks=24), 128, 16),
]


@pytest.mark.parametrize("shape", TREES, ids=repr)
def test_first_children_are_on_their_parent_s_row_and_branches_lie_apart(shape):
    rows = tree_rows(shape)
    assert sorted(set(rows)) == list(range(sum(not shape.children(node) for node in range(shape.size))))
    assert len(set(zip(rows, shape.depths, strict=True))) == shape.size
    for node in range(1, shape.size):
        parent = shape.parents[node]
        assert (rows[node] == rows[parent]) == (shape.ranks[node] == 0)
    for level in shape.levels:
        below = [sorted({rows[node] for node in range(shape.size) if shape.ancestors[node, top]}) for top in level]
        assert all(found == list(range(found[0], found[-1] + 1)) for found in below)  # so no edge crosses another


@pytest.mark.parametrize("shape", TREES, ids=repr)
def test_scores_are_readable(shape):
    profile = synthetic.profile()
    width, height = tree_size(shape)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    draw_tree(axes, shape, profile, width, height)
    assert [text.get_text() for text in axes.texts] == list(map(score_text, scores(shape, profile)))
    found = boxes(figure, axes.texts)
    assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1) for box in found)
    assert all(figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1) for box in found)
    assert not any(one.overlaps(other) for one, other in combinations(found, 2))
    assert width <= 10.5


def test_nodes_and_branches_are_as_wide_as_they_are_probable():
    shape, profile = optimal_shape(synthetic.profile(), 16, 4), synthetic.profile()
    axes = new_axes()
    draw_tree(axes, shape, profile, 5, 4)
    branches, nodes = axes.collections
    values = scores(shape, profile)
    order = np.argsort(values)
    assert (np.diff(nodes.get_sizes()[order]) >= 0).all()
    assert nodes.get_sizes()[0] == pytest.approx(11**2)
    widths = np.array(branches.get_linewidths())
    assert (np.diff(widths[np.argsort(values[1:])]) >= 0).all()


def test_a_tree_in_little_room_has_no_scores():
    axes = new_axes()
    draw_tree(axes, TREES[-1], synthetic.profile(), 5, 3)
    assert not axes.texts


@pytest.mark.parametrize(("score", "text"), [(1.0, "1"), (0.0, "0"), (0.004, "<0.01"), (0.012, "0.01"), (0.5, "0.50")])
def test_scores_in_words(score, text):
    assert score_text(score) == text
