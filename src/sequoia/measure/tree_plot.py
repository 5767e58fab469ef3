"""A tree as a plot: depth to the right, a row for each leaf, and the more probable a node, the wider it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sequoia.measure.charts import COLOURS, INK
from sequoia.tree.expected import scores
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_NODE, _EDGE = COLOURS[0], "#a9c8e0"
_ROW, _WIDEST_COLUMN, _ALL_COLUMNS = 0.19, 0.64, 10.0  # inches
_WIDEST_NODE, _WIDEST_EDGE = 11.0, 7.0  # points, for a score of 1
_LABEL = 6.8  # points
_LEAST_ROW, _LEAST_COLUMN = 8.0, 27.0  # points that a label needs


def tree_size(shape: TreeShape) -> tuple[float, float]:
    """Width and height in inches that `draw_tree` needs to show each node's score."""
    column = min(_WIDEST_COLUMN, _ALL_COLUMNS / (shape.depth + 1))
    return column * (shape.depth + 1), _ROW * (max(tree_rows(shape)) + 2)


def draw_tree(axes: Axes, shape: TreeShape, profile: AcceptanceProfile, width: float, height: float) -> None:
    """Draw into axes of this many inches, with the scores where there is room for them.

    The first child is on its parent's row, so that nothing crosses: the top row is the path of first children.
    """
    values, rows = scores(shape, profile), tree_rows(shape)
    row, column = 72 * height / (max(rows) + 2), 72 * width / (shape.depth + 1)
    scale = min(1.0, 0.9 * row / _WIDEST_NODE)
    axes.set_axis_off()
    axes.set_xlim(-0.3, shape.depth + 0.7)
    axes.set_ylim(max(rows) + 0.8, -1.2)
    _draw_edges(axes, shape, values, rows, scale)
    widths = scale * (2.5 + (_WIDEST_NODE - 2.5) * np.sqrt(values))
    axes.scatter(shape.depths, rows, s=widths**2, color=_NODE, linewidths=0, zorder=3)
    if row >= _LEAST_ROW and column >= _LEAST_COLUMN:
        _draw_scores(axes, shape, values, rows, widths, scale)


def tree_rows(shape: TreeShape) -> list[int]:
    """Row of each node from the top: a first child's is its parent's, and no two branches share one."""
    rows, free, stack = [0] * shape.size, 0, [0]
    while stack:
        node = stack.pop()
        if shape.ranks[node]:
            free += 1
        rows[node] = free
        stack.extend(reversed(shape.children(node)))
    return rows


def _draw_edges(axes: Axes, shape: TreeShape, values: NDArray[np.float64], rows: Sequence[int], scale: float) -> None:
    from matplotlib.collections import LineCollection

    nodes = range(1, shape.size)
    lines = [_edge(shape.depths[node], rows[shape.parents[node]], rows[node]) for node in nodes]
    widths = scale * (0.6 + (_WIDEST_EDGE - 0.6) * values[1:])
    axes.add_collection(LineCollection(lines, linewidths=widths, colors=_EDGE, capstyle="butt"), autolim=False)


def _edge(depth: int, start: int, end: int) -> NDArray[np.float64]:
    """Points [n, 2] of the curve to a node at `depth` from its parent's row to its own."""
    if start == end:
        return np.array([[depth - 1, start], [depth, end]], dtype=np.float64)
    along = np.linspace(0, 1, 25)
    across = along**2 * (3 - 2 * along)
    return np.stack([depth - 1 + along**0.8, start + (end - start) * across], axis=1)


def _draw_scores(
    axes: Axes,
    shape: TreeShape,
    values: NDArray[np.float64],
    rows: Sequence[int],
    widths: NDArray[np.float64],
    scale: float,
) -> None:
    for depth, row, value, width in zip(shape.depths, rows, values, widths, strict=True):
        axes.annotate(
            score_text(float(value)),
            (depth, row),
            xytext=(width / 2 + 0.5, 1.2 + scale * _WIDEST_EDGE / 2 * value),
            textcoords="offset points",
            fontsize=_LABEL,
            color=INK,
            zorder=4,
        )


def score_text(score: float) -> str:
    """0.43; <0.01"""
    return "<0.01" if 0 < score < 0.01 else f"{score:.2f}".removesuffix(".00")
