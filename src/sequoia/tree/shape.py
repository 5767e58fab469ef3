"""TreeShape: the topology of a token tree, its standard shapes and its file."""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sequoia.errors import UsageError
from sequoia.tree.checks import full_tree_size, require_integer, require_nodes
from sequoia.tree.draw import draw_tree
from sequoia.tree.records import check_record, load_record, save_record

if TYPE_CHECKING:
    from sequoia.tree.profile import AcceptanceProfile

_FORMAT, _VERSION = "sequoia-tree", 1


@dataclass(frozen=True, init=False, repr=False)
class TreeShape:
    """Topology of a token tree (Sequoia, Chen et al. 2024, arXiv 2402.12374, section 3.1).

    Node 0 is the root; parents come before their children; siblings are in rank order of appearance. Any order
    that keeps this is legal. Shapes are immutable, and equal when their `parents` are.

    Args:
        parents: for each node the index of its parent, -1 for the root.

    Raises:
        UsageError: `parents` is no such tree, or has more nodes than are ever built.
    """

    parents: tuple[int, ...]

    def __init__(self, parents: Sequence[int]) -> None:
        object.__setattr__(self, "parents", _checked(parents))

    @classmethod
    def root_only(cls) -> TreeShape:
        """Only the root: plain decoding."""
        return cls((-1,))

    @classmethod
    def chain(cls, depth: int) -> TreeShape:
        """One node per level: classic speculative decoding."""
        return cls.chains(1, depth)

    @classmethod
    def chains(cls, count: int, depth: int) -> TreeShape:
        """`count` independent chains of `depth` nodes under the root, numbered level by level."""
        require_integer("count", count, least=1)
        require_integer("depth", depth, least=1)
        require_nodes(f"chains:{count}x{depth}", 1 + count * depth)
        return cls([-1] + [0] * count + list(range(1, count * (depth - 1) + 1)))

    @classmethod
    def kary(cls, branch: int, depth: int) -> TreeShape:
        """The full tree: every node above `depth` has `branch` children, numbered level by level."""
        require_integer("branch", branch, least=1)
        require_integer("depth", depth, least=1)
        size = full_tree_size(branch, depth)
        require_nodes(f"kary:{branch}x{depth}", size)
        return cls([-1] + [(node - 1) // branch for node in range(1, size)])

    @classmethod
    def beam(cls, width: int, depth: int) -> TreeShape:
        """`width` nodes on each of `depth` levels, numbered level by level.

        A level holds what a beam search would keep if each rank were half as probable as the one before it: the
        `width` nodes with the smallest sum of ranks on their path. Ties go to the lower last rank, then to the
        earlier parent. So the root has `width` children, and low ranks have most of the descendants.
        """
        require_integer("width", width, least=1)
        require_integer("depth", depth, least=1)
        require_nodes(f"beam:{width}x{depth}", 1 + width * depth)
        parents, costs = [-1], [0]
        level = range(1)
        for _ in range(depth):
            kept = _next_beam(level, costs, width)
            level = range(len(parents), len(parents) + width)
            parents += [parent for parent, _ in kept]
            costs += [cost for _, cost in kept]
        return cls(parents)

    @cached_property
    def size(self) -> int:
        """Nodes including the root: rows of the verify pass."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges from the root, by node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Edges from the root to the deepest node."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place among the siblings, from 0, by node; 0 for the root."""
        seen = [0] * self.size
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(seen[parent])
            seen[parent] += 1
        return tuple(ranks)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth, each level in node order."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(map(tuple, levels))

    @cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes by depth."""
        return tuple(map(len, self.levels))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes from the root's child down to it; () for the root."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def max_children(self) -> int:
        """Children of the node that has most."""
        return max(map(len, self._children))

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """[size, size], True where the column is the row's node or one of its ancestors. Read-only."""
        mask = np.eye(self.size, dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        mask.setflags(write=False)
        return mask

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node` in rank order."""
        if not 0 <= node < self.size:
            raise UsageError(f"node must be 0 to {self.size - 1}, not {node}.")
        return self._children[node]

    def limit(self, depth: int) -> TreeShape:
        """This shape without the nodes deeper than `depth` edges; itself when there are none."""
        require_integer("depth", depth, least=0)
        if depth >= self.depth:
            return self
        return self._renumbered([node for node in range(self.size) if self.depths[node] <= depth])

    def in_level_order(self) -> TreeShape:
        """This tree numbered level by level, siblings side by side: equal for equal trees."""
        order = [0]
        for node in order:
            order.extend(self._children[node])
        return self._renumbered(order)

    def _renumbered(self, nodes: Sequence[int]) -> TreeShape:
        number = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        return TreeShape([number[self.parents[node]] for node in nodes])

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return {"format": _FORMAT, "version": _VERSION, "parents": list(self.parents)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TreeShape:
        """Build from what `to_dict` gave. UsageError for unknown or missing keys and for what is no tree."""
        return cls(check_record(record, _FORMAT, _VERSION, ["parents"])["parents"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file, whole or not at all. FileError if it cannot be written."""
        save_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TreeShape:
        """Read a file that `save` wrote. FileError, naming the path, if it is missing or damaged."""
        return load_record(path, cls.from_dict)

    def draw(self, profile: AcceptanceProfile | None = None, *, width: int = 100, max_nodes: int = 200) -> str:
        """The tree as text; with a profile, each rank's rate on its edge and each node's score in brackets.

        Lines keep to about `width` columns. Of a larger tree, `max_nodes` nodes are drawn (the best by score, or
        the first levels without a profile) and the rest is counted.
        """
        return draw_tree(self, profile, width, max_nodes)

    def __repr__(self) -> str:
        return f"TreeShape(size={self.size}, depth={self.depth})"

    def __str__(self) -> str:
        return self.draw()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.draw())


def _checked(parents: Sequence[int]) -> tuple[int, ...]:
    if isinstance(parents, (str, bytes, Mapping)) or not hasattr(parents, "__len__"):
        raise UsageError(f"parents must be a list of node indices, not {type(parents).__name__}.")
    require_nodes("the tree", len(parents))
    if len(parents) == 0 or parents[0] != -1:
        found = f"parents[0] is {parents[0]!r}" if len(parents) else "parents is empty"
        raise UsageError(f"a tree starts with its root, marked by parent -1, but {found}.")
    checked = [-1]
    for node, parent in enumerate(parents[1:], start=1):
        index = require_integer(f"parents[{node}]", parent, least=0)
        if index >= node:
            raise UsageError(
                f"parents[{node}] must be an earlier node, 0 to {node - 1}, not {index}. "
                "List parents before their children."
            )
        checked.append(index)
    return tuple(checked)


def _next_beam(level: range, costs: Sequence[int], width: int) -> list[tuple[int, int]]:
    """The (parent, cost) of the `width` cheapest children of `level`, grouped by parent."""
    heap = [(costs[parent], 0, parent) for parent in level]
    heapq.heapify(heap)
    kept = []
    for _ in range(width):
        cost, rank, parent = heap[0]
        kept.append((parent, cost))
        heapq.heapreplace(heap, (cost + 1, rank + 1, parent))
    return sorted(kept)
