"""Optimal trees by dynamic programming: for any rates, rising with the rank or not.

The value of a subtree is counted from its own root (score 1), so with rates that depend on the depth it is a function
of three things: the depth of its root, the depth it may still grow, and its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

FloatArray = NDArray[np.float64]


def programme_table(profile: AcceptanceProfile, size: int, depth: int) -> FloatArray:
    """Optimal expected tokens [size + 1, depth + 1], -inf where no tree has that size and depth.

    Sequoia (arXiv 2402.12374, section 3.1 and appendix), with depth and per-depth rates as further states. About
    rows · depth · size² steps for a profile of few rows: see `_add_child`.
    """
    shared = min(depth, len(profile.rates) - 1)
    leaf = _leaf(size)
    # values[r]: subtrees whose root is at the current level and may grow r edges. [1 + depth - level, size + 1]
    values = np.concatenate(_shared_values(profile.row(shared), leaf, depth - shared))
    for level in reversed(range(shared)):
        # Depth stops mattering at some point: from there on all rows are the same.
        distinct = int(np.argmax(np.all(values == values[-1], axis=1))) + 1
        best = _best(profile.row(level), values[:distinct])
        values = np.concatenate([leaf, best, *[best[-1:]] * (len(values) - distinct)])
    return values.T


def programme_shape(profile: AcceptanceProfile, size: int, depth: int) -> TreeShape:
    """An optimal tree of exactly `size` nodes and at most `depth` edges, in level order; it must be feasible."""
    values = _values_by_level(profile, size, depth)
    parents, level = [-1], [(0, size)]
    for depth_of_level in range(depth):
        level = [(node, nodes) for node, nodes in level if nodes > 1]
        if not level:
            break
        most = max(nodes for _, nodes in level)
        split = _Splitter(profile.row(depth_of_level), values[depth_of_level + 1][:, : most + 1])
        deeper = []
        for node, nodes in level:
            for child_nodes in split(nodes):
                deeper.append((len(parents), child_nodes))
                parents.append(node)
        level = deeper
    return TreeShape(parents)


def _values_by_level(profile: AcceptanceProfile, size: int, depth: int) -> list[FloatArray]:
    """For each level from 0 to `depth`, the values [1, size + 1] of subtrees there that may grow to `depth`."""
    shared = min(depth, len(profile.rates) - 1)
    values = _shared_values(profile.row(shared), _leaf(size), depth - shared)
    for level in reversed(range(shared)):
        values.append(_best(profile.row(level), values[-1]))
    return values[::-1]


def _shared_values(rates: FloatArray, leaf: FloatArray, depth: int) -> list[FloatArray]:
    """Values [1, size + 1] of subtrees that may grow 0, 1, ... `depth` edges, with the same rates at each level."""
    values = [leaf]
    for _ in range(depth):
        deeper = _best(rates, values[-1])
        if np.array_equal(deeper, values[-1]):
            return values + [values[-1]] * (depth + 1 - len(values))
        values.append(deeper)
    return values


def _leaf(size: int) -> FloatArray:
    values = np.full((1, size + 1), -np.inf)
    values[:, 1] = 1.0
    return values


def _best(rates: FloatArray, subtree: FloatArray) -> FloatArray:
    forests = _forests(rates, subtree)
    best = next(forests)
    for forest in forests:
        best = np.maximum(best, forest)
    return best


def _forests(rates: FloatArray, subtree: FloatArray) -> Iterator[FloatArray]:
    """Best values [caps, size + 1] of a node with exactly 0, 1, 2, ... children.

    rates [ranks] are those of its children; subtree [caps, size + 1] holds the values of a child's subtree.
    """
    caps, width = subtree.shape
    forest = np.repeat(_leaf(width - 1), caps, axis=0)
    yield forest
    for rank in range(min(len(rates), width - 2)):
        order = int(np.count_nonzero(rates[: rank + 1] >= rates[rank]))
        forest = _add_child(forest, _gains(rates[rank], subtree), rank, order)
        yield forest


def _gains(rate: float, subtree: FloatArray) -> FloatArray:
    # 0 · -inf is no number, so infeasible sizes are set apart.
    return np.multiply(subtree, rate, out=np.full_like(subtree, -np.inf), where=np.isfinite(subtree))


def _add_child(forest: FloatArray, gains: FloatArray, rank: int, order: int) -> FloatArray:
    """max over m of forest(n - m) + gains(m): the child of `rank` takes m nodes.

    Subtrees of siblings can be exchanged, and values never fall with size, so some optimum gives larger subtrees to
    larger rates. The child whose rate is the `order`-th largest so far then takes at most (n - 1) / order nodes. With
    falling rates that divides the work over all ranks by about ranks / ln(ranks).
    """
    size = forest.shape[1] - 1
    best = np.full_like(forest, -np.inf)
    if rank == 0:
        # Without elder siblings nothing is left to choose: the child takes all but its parent.
        best[:, 2:] = gains[:, 1:-1] + 1.0
        return best
    totals = np.empty_like(forest)
    for nodes in range(1, (size - 1) // order + 1):
        start = max(order * nodes, rank + nodes) + 1
        total = totals[:, start:]
        np.add(forest[:, start - nodes : size + 1 - nodes], gains[:, nodes, None], out=total)
        np.maximum(best[:, start:], total, out=best[:, start:])
    return best


class _Splitter:
    """Splits the nodes of an optimal subtree among its root's children, for all subtrees of one level."""

    def __init__(self, rates: FloatArray, subtree: FloatArray) -> None:
        self.forests = np.concatenate(list(_forests(rates, subtree)))  # [children, size + 1]
        self.gains = [_gains(rate, subtree)[0] for rate in rates]

    def __call__(self, nodes: int) -> list[int]:
        """Sizes of the children's subtrees, in rank order."""
        sizes = []
        for rank in reversed(range(int(np.argmax(self.forests[:, nodes])))):
            totals = self.forests[rank, nodes - 1 : 0 : -1] + self.gains[rank][1:nodes]
            sizes.append(int(np.argmax(totals)) + 1)
            nodes -= sizes[-1]
        return sizes[::-1]
