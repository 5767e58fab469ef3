"""A tree as text: branches downwards, only children on their parent's line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sequoia.tree.expected import edge_rates, scores

if TYPE_CHECKING:
    from sequoia.tree.profile import AcceptanceProfile
    from sequoia.tree.shape import TreeShape

_ROOM_FOR_COUNT = 14
_MOST_LEVELS_LISTED = 16


@dataclass(frozen=True)
class _Sketch:
    """What the lines are made of, each by node."""

    shape: TreeShape
    width: int
    labels: list[str]
    edges: list[str]
    shown: list[bool]
    below: list[int]
    """Descendants."""

    def children(self, node: int) -> list[int]:
        return [child for child in self.shape.children(node) if self.shown[child]]


def draw_tree(shape: TreeShape, profile: AcceptanceProfile | None, width: int, max_nodes: int) -> str:
    """See `TreeShape.draw`."""
    sketch = _sketch(shape, profile, max(width - _ROOM_FOR_COUNT, 1), max_nodes)
    lines = [_heading(shape, profile)]
    stack = [(0, "", "")]
    while stack:
        node, prefix, branch = stack.pop()
        if node < 0:
            lines.append(f"{prefix}└─ … {-node} more")
            continue
        indent = prefix + {"├": "│  ", "└": "   ", "": ""}[branch]
        run, last, column = _run(sketch, node, f"{prefix}{branch}{sketch.edges[node]} " if branch else "", indent)
        indent = indent.ljust(column)
        below = _branches(sketch, last, indent)
        hidden = sketch.below[last] if not below else 0
        run[-1] += f" … {hidden} more" if hidden else ""
        lines.extend(run)
        stack.extend(reversed(below))
    return "\n".join(lines)


def _heading(shape: TreeShape, profile: AcceptanceProfile | None) -> str:
    nodes = "1 node" if shape.size == 1 else f"{shape.size} nodes"
    parts = [nodes, f"depth {shape.depth}"]
    if 0 < shape.depth <= _MOST_LEVELS_LISTED:
        parts.append(f"levels {' '.join(map(str, shape.level_sizes))}")
    if profile is not None:
        parts.append(f"{scores(shape, profile).sum():.3f} expected tokens per round")
    return " · ".join(parts)


def _sketch(shape: TreeShape, profile: AcceptanceProfile | None, width: int, max_nodes: int) -> _Sketch:
    labels, edges = list(map(str, range(shape.size))), ["─"] * shape.size
    order = sorted(range(shape.size), key=shape.depths.__getitem__)
    if profile is not None:
        values = scores(shape, profile)
        labels = [f"{node} ({value:.3f})" for node, value in enumerate(values)]
        edges = [f"─{rate:.3f}─" for rate in edge_rates(shape, profile)]
        # Sorting is stable, so a parent stays before a child of the same score.
        order.sort(key=lambda node: -values[node])
    shown = [False] * shape.size
    for node in order[: max(max_nodes, 1)]:
        shown[node] = True
    return _Sketch(shape, width, labels, edges, shown, _descendants(shape))


def _descendants(shape: TreeShape) -> list[int]:
    below = [0] * shape.size
    for node in range(shape.size - 1, 0, -1):
        below[shape.parents[node]] += below[node] + 1
    return below


def _run(sketch: _Sketch, node: int, lead: str, indent: str) -> tuple[list[str], int, int]:
    """Lines of `node` and the only children that follow it, the last of these, and the column of its branches."""
    lines, column = [lead + sketch.labels[node]], len(indent)
    while len(sketch.shape.children(node)) == 1 and (children := sketch.children(node)):
        node = children[0]
        step = f" {sketch.edges[node]} "
        if len(lines[-1] + step + sketch.labels[node]) > sketch.width:
            lines.append(indent + " ")
        column = len(lines[-1] + step)
        lines[-1] += step + sketch.labels[node]
    return lines, node, column


def _branches(sketch: _Sketch, node: int, indent: str) -> list[tuple[int, str, str]]:
    """(child, prefix, branch) for each child to draw; a last one with -n for n nodes not drawn; none if no room."""
    children = sketch.children(node)
    if any(len(f"{indent}└{sketch.edges[child]} {sketch.labels[child]}") > sketch.width for child in children):
        return []
    hidden = sketch.below[node] - sum(sketch.below[child] + 1 for child in children)
    ends = [*children, -hidden] if children and hidden else children
    return [(child, indent, "└" if child == ends[-1] else "├") for child in ends]
