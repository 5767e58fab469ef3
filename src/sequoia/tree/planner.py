"""Optimal shapes for a profile, and the table of what they are worth."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sequoia.errors import UsageError
from sequoia.tree.checks import full_tree_size, require_integer, require_nodes
from sequoia.tree.expected import expected_tokens, scores
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.programme import programme_shape, programme_table
from sequoia.tree.shape import TreeShape

__all__ = ["Method", "expected_tokens", "optimal_shape", "optimal_tokens", "scores"]

Method = Literal["auto", "heap", "programme"]
"""How to plan: best-first heap (no row of the profile may rise), dynamic programme, or the faster that is exact."""


def optimal_shape(profile: AcceptanceProfile, size: int, depth: int, method: Method = "auto") -> TreeShape:
    """A shape of exactly `size` nodes and at most `depth` edges with the most expected tokens, in level order.

    Children of a node at depth l have the rates of the profile's row l; a node has at most `profile.ranks` children.
    Ranks are not skipped, and nodes of rate 0 are added where `size` asks for them. Sequoia (arXiv 2402.12374,
    section 3.1).

    Raises:
        UsageError: no such tree (the message says what is feasible), or a heap for rates that rise.
    """
    _require_limits(size, depth)
    feasible = full_tree_size(profile.ranks, depth)
    if size > feasible:
        raise UsageError(
            f"no tree has {size} nodes: depth {depth} with {_count(profile.ranks, 'rank')} gives at most "
            f"{_count(feasible, 'node')}. Lower the size, raise the depth or use a profile of more ranks."
        )
    depth = min(depth, size - 1)
    if _resolve(method, profile) == "programme":
        return programme_shape(profile, size, depth)
    parents = [parent for parent, _, _ in _best_first(profile, size, depth)]
    return TreeShape(parents).in_level_order()


def optimal_tokens(profile: AcceptanceProfile, size: int, depth: int, method: Method = "auto") -> NDArray[np.float64]:
    """Expected tokens of the optimal shapes: [size + 1, depth + 1], NaN where no such shape exists.

    Row n, column d: exactly n nodes, at most d edges. Sequoia (arXiv 2402.12374, section 3.1).

    Raises:
        UsageError: `size` or `depth` is out of range, or a heap for rates that rise.
    """
    _require_limits(size, depth)
    useful = min(depth, size - 1)
    fill = programme_table if _resolve(method, profile) == "programme" else _heap_table
    table = np.pad(fill(profile, size, useful), ((0, 0), (0, depth - useful)), mode="edge")
    return np.where(np.isfinite(table), table, np.nan)


def _require_limits(size: int, depth: int) -> None:
    require_integer("size", size, least=1)
    require_integer("depth", depth, least=0)
    require_nodes("the tree", size)


def _resolve(method: str, profile: AcceptanceProfile) -> str:
    if method not in ("auto", "heap", "programme"):
        raise UsageError(f"method must be 'auto', 'heap' or 'programme', not {method!r}.")
    if method == "auto":
        return "heap" if profile.is_monotone else "programme"
    if method == "heap" and not profile.is_monotone:
        raise UsageError("the heap needs rates that never rise with the rank, and these do. Use method='programme'.")
    return method


def _best_first(profile: AcceptanceProfile, size: int, depth: int) -> Iterator[tuple[int, float, bool]]:
    """(parent, score, whether the depth kept it from growing) of the best `size` nodes or all, best first.

    Where rates never rise with the rank, a score is at most the parent's and the elder sibling's, so the best n nodes
    are a tree for each n. Among equal scores the shallower node goes first: fewer draft passes.
    """
    rows: list[list[float]] = profile.table.tolist()
    levels, ranks = len(rows), profile.ranks
    # (-score, depth, age, parent, rank, -score of the parent); the age makes the order definite
    heap = [(-1.0, 0, 0, -1, ranks - 1, -1.0)]
    age = 0
    for node in range(size):
        if not heap:
            return
        score, level, _, parent, rank, parent_score = heapq.heappop(heap)
        yield parent, -score, level == depth
        age += 2
        if rank + 1 < ranks:
            rate = rows[min(level, levels) - 1][rank + 1]
            heapq.heappush(heap, (parent_score * rate, level, age, parent, rank + 1, parent_score))
        if level < depth:
            rate = rows[min(level, levels - 1)][0]
            heapq.heappush(heap, (score * rate, level + 1, age + 1, node, 0, score))


def _heap_table(profile: AcceptanceProfile, size: int, depth: int) -> NDArray[np.float64]:
    table = np.full((size + 1, depth + 1), np.nan)
    for limit in range(depth + 1):
        nodes = list(_best_first(profile, size, limit))
        table[1 : len(nodes) + 1, limit] = np.cumsum([score for _, score, _ in nodes])
        if len(nodes) == size and not any(stopped for _, _, stopped in nodes):
            table[:, limit:] = table[:, limit, None]
            break
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
