"""Dynamic trees without a model: the best nodes of all, whatever order they are found in."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sequoia.errors import UsageError
from sequoia.tree.dynamic import BestFirst, Candidate, DynamicTree, require_one_shape
from sequoia.tree.shape import TreeShape

_VOCAB = 3


def _law(path: tuple[int, ...], seed: int) -> list[float]:
    """A distribution that depends on the whole path."""
    rng = random.Random(f"{seed} {path}")
    weights = [rng.random() ** 3 for _ in range(_VOCAB)]
    return [weight / sum(weights) for weight in weights]


def _grown(rule: DynamicTree, seed: int) -> tuple[TreeShape, list[tuple[int, ...]], list[int]]:
    """The shape, each node's path of tokens but the root's, and how many nodes each level expanded."""
    best = BestFirst(rule)
    paths, expanded = [()], []
    frontier = best.expanded[:]
    while frontier:
        expanded.append(len(frontier))
        start = len(best.expanded) - len(frontier)
        found = [
            Candidate(node.score + math.log(prob), start + row, node.depth + 1, token)
            for row, node in enumerate(frontier)
            for token, prob in enumerate(_law(paths[start + row], seed))
        ]
        frontier = list(best.add(sorted(found, key=lambda node: -node.score)))
        paths += [(*paths[node.parent], node.token) for node in frontier]
    shape, nodes, _ = best.shape()
    lines = [()]
    for parent, node in zip(shape.parents[1:], nodes, strict=True):
        lines.append((*lines[parent], node.token))
    return shape, lines[1:], expanded


def _best_paths(rule: DynamicTree, seed: int) -> set[tuple[int, ...]]:
    """By listing every path there is."""
    everything = {
        path: math.prod(_law(path[:end], seed)[path[end]] for end in range(len(path)))
        for depth in range(1, rule.depth + 1)
        for path in itertools.product(range(_VOCAB), repeat=depth)
    }
    return set(sorted(everything, key=lambda path: -everything[path])[: rule.size - 1])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("size", "depth"), [(2, 1), (4, 1), (6, 3), (13, 4), (30, 4)])
def test_the_most_probable_paths_of_all(size: int, depth: int, seed: int) -> None:
    rule = DynamicTree(size, depth, width=size)
    shape, paths, _ = _grown(rule, seed)
    assert set(paths) == _best_paths(rule, seed)
    assert len(paths) == shape.size - 1


def test_nodes_are_numbered_level_by_level_and_siblings_best_first() -> None:
    shape, paths, _ = _grown(DynamicTree(14, 4), seed=3)
    assert list(shape.depths) == sorted(shape.depths)
    for node in range(shape.size):
        law = [_law(paths[child - 1][:-1], 3)[paths[child - 1][-1]] for child in shape.children(node)]
        assert law == sorted(law, reverse=True)


def test_width_bounds_what_a_level_expands() -> None:
    _, _, wide = _grown(DynamicTree(40, 4, width=40), seed=1)
    _, _, narrow = _grown(DynamicTree(40, 4, width=2), seed=1)
    assert max(wide) > 2
    assert narrow == [1, 2, 2, 2]


def test_a_certain_child_does_not_displace_its_parent() -> None:
    """Equal scores: the parent stays, or there would be no tree."""
    best = BestFirst(DynamicTree(3, 5))
    assert [node.token for node in best.add([Candidate(-1.0, 0, 1, 7), Candidate(-1.0, 0, 1, 8)])] == [7, 8]
    assert best.add([Candidate(-1.0, 1, 2, 9)]) == []
    shape, nodes, rows = best.shape()
    assert shape == TreeShape((-1, 0, 0))
    assert [node.token for node in nodes] == [7, 8]
    assert rows == {0: 0, 1: 1, 2: 2}


def test_expanded_nodes_that_fell_out_have_no_node() -> None:
    best = BestFirst(DynamicTree(3, 3))
    best.add([Candidate(-1.0, 0, 1, 4), Candidate(-5.0, 0, 1, 5)])
    best.add([Candidate(-1.5, 1, 2, 6), Candidate(-6.0, 2, 2, 7)])
    shape, nodes, rows = best.shape()
    assert shape == TreeShape((-1, 0, 1))
    assert [node.token for node in nodes] == [4, 6]
    assert rows == {0: 0, 1: 1, 2: 3}


def test_no_candidates_leave_the_root() -> None:
    best = BestFirst(DynamicTree(8, 3))
    assert not best.add([])
    assert best.shape()[0] == TreeShape.root_only()


def test_limits() -> None:
    rule = DynamicTree(9, 4, width=3)
    assert rule.limit(4) is rule
    assert rule.limit(2) == DynamicTree(9, 2, width=3)
    assert rule.limit(0).size == 1


@pytest.mark.parametrize("numbers", [(0, 1), (4, 0), (4, 1, 0), (4, 1.5), (10**9, 3)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        DynamicTree(*numbers)


def test_it_has_no_shape_to_draw() -> None:
    assert require_one_shape(TreeShape.chain(2)) == TreeShape.chain(2)
    with pytest.raises(UsageError, match="planned anew in each round"):
        require_one_shape(DynamicTree(8, 3))
