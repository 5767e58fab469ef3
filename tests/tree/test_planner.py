"""Optimal shapes, held against brute force, a published vector and each other."""

import json
from functools import cache
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia.errors import UsageError
from sequoia.tree.planner import expected_tokens, optimal_shape, optimal_tokens, scores
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

ORACLE = json.loads(Path(__file__).with_name("optimal_tokens.json").read_text())
PUBLISHED = AcceptanceProfile([ORACLE["rates"]])
MOST_BRUTE_FORCE_NODES = 8


@cache
def ordered_trees(size):
    """All ordered trees of `size` nodes, each once: those whose depth-first depths rise by at most 1."""
    sequences = [(0,)]
    for _ in range(size - 1):
        sequences = [(*depths, new) for depths in sequences for new in range(1, depths[-1] + 2)]
    return [from_depths(depths) for depths in sequences]


def from_depths(depths):
    last, parents = {-1: -1}, []
    for node, depth in enumerate(depths):
        parents.append(last[depth - 1])
        last[depth] = node
    return TreeShape(parents)


def brute_force(profile, size, depth):
    feasible = [t for t in ordered_trees(size) if t.depth <= depth and t.max_children <= profile.ranks]
    return max((expected_tokens(tree, profile) for tree in feasible), default=np.nan)


@st.composite
def profiles(draw, monotone=False, most_ranks=5, most_rows=4):
    weight = st.one_of(st.just(0.0), st.floats(0, 1, allow_subnormal=False), st.sampled_from([0.25, 0.5]))
    rows = []
    for _ in range(draw(st.integers(1, most_rows))):
        weights = draw(st.lists(weight, min_size=1, max_size=most_ranks))
        scale = draw(st.floats(0.1, 1)) / max(1.0, sum(weights))
        row = [value * scale for value in weights]
        rows.append(sorted(row, reverse=True) if monotone else row)
    return AcceptanceProfile(rows)


def assert_same(table, other):
    np.testing.assert_array_equal(np.isnan(table), np.isnan(other))
    np.testing.assert_allclose(table, other, rtol=0, atol=1e-12)


def test_the_number_of_ordered_trees_is_a_catalan_number():
    assert [len(ordered_trees(size)) for size in range(1, 9)] == [1, 1, 2, 5, 14, 42, 132, 429]
    assert len({tree.in_level_order() for tree in ordered_trees(7)}) == 132


def test_published_vector():
    expected = {(int(n), int(d)): v for n, row in ORACLE["expected_tokens"].items() for d, v in row.items()}
    table = optimal_tokens(PUBLISHED, max(n for n, _ in expected), max(d for _, d in expected))
    for (size, depth), value in expected.items():
        if value is None:
            assert np.isnan(table[size, depth])
            with pytest.raises(UsageError, match=f"no tree has {size} nodes"):
                optimal_shape(PUBLISHED, size, depth)
        else:
            assert table[size, depth] == pytest.approx(value, abs=1e-9)
            shape = optimal_shape(PUBLISHED, size, depth)
            assert (shape.size, shape.depth <= depth) == (size, True)
            assert expected_tokens(shape, PUBLISHED) == pytest.approx(value, abs=1e-9)


def test_scores_by_hand():
    profile = AcceptanceProfile([[0.6, 0.25], [0.5, 0.1]])
    shape = TreeShape([-1, 0, 0, 1, 1, 3, 0])
    assert scores(shape, profile) == pytest.approx([1, 0.6, 0.25, 0.3, 0.06, 0.15, 0])
    assert expected_tokens(TreeShape.root_only(), profile) == 1.0


def test_when_siblings_beat_a_chain():
    siblings, chain = TreeShape([-1, 0, 0]), TreeShape.chain(2)
    low, high = AcceptanceProfile([[0.6, 0.25]]), AcceptanceProfile([[0.6, 0.4]])
    assert expected_tokens(chain, low) == pytest.approx(1.96)
    assert expected_tokens(siblings, low) == pytest.approx(1.85)
    assert expected_tokens(siblings, high) == pytest.approx(2.0)
    assert optimal_shape(low, 3, 8) == chain
    assert optimal_shape(high, 3, 8) == siblings


def test_best_first_would_lose_on_rates_that_rise():
    profile = AcceptanceProfile([[0.4, 0.1, 0.3, 0.05]])
    assert optimal_tokens(profile, 4, 3)[4, 3] == pytest.approx(1.8)
    assert optimal_shape(profile, 4, 3) == TreeShape([-1, 0, 0, 0])
    assert optimal_tokens(AcceptanceProfile([[0.4, 0.1]]), 4, 3)[4, 3] == pytest.approx(1.66)


@settings(max_examples=25, deadline=None)
@given(profiles(), st.sampled_from(["auto", "programme"]))
def test_equals_brute_force_over_all_ordered_trees(profile, method):
    table = optimal_tokens(profile, MOST_BRUTE_FORCE_NODES, 7, method)
    limits = list(product(range(1, MOST_BRUTE_FORCE_NODES + 1), range(8)))
    found = np.full_like(table, np.nan)
    for size, depth in limits:
        found[size, depth] = brute_force(profile, size, depth)
    assert_same(table, found)


@settings(max_examples=50, deadline=None)
@given(profiles(monotone=True, most_ranks=8, most_rows=6), st.integers(1, 40), st.integers(0, 12))
def test_heap_equals_programme_where_rates_fall(profile, size, depth):
    heap = optimal_tokens(profile, size, depth, method="heap")
    assert heap.shape == (size + 1, depth + 1)
    assert_same(heap, optimal_tokens(profile, size, depth, method="programme"))


@settings(max_examples=60, deadline=None)
@given(profiles(most_ranks=8, most_rows=6), st.integers(1, 40), st.integers(0, 12))
def test_shapes_attain_the_table_within_the_limits(profile, size, depth):
    value = optimal_tokens(profile, size, depth)[size, depth]
    for method in ["auto", "programme"]:
        if np.isnan(value):
            with pytest.raises(UsageError, match="no tree has"):
                optimal_shape(profile, size, depth, method)
            continue
        shape = optimal_shape(profile, size, depth, method)
        assert shape.size == size
        assert shape.depth <= depth
        assert shape.max_children <= profile.ranks
        assert shape == shape.in_level_order()
        assert expected_tokens(shape, profile) == pytest.approx(value, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(profiles(most_ranks=6), st.integers(1, 30), st.integers(0, 8))
def test_more_nodes_or_depth_never_hurt(profile, size, depth):
    table = optimal_tokens(profile, size, depth)
    # Where the next size is feasible; and a feasible size stays so with more depth.
    assert not np.any(np.diff(table, axis=0) < -1e-12)
    assert not np.any(np.diff(table, axis=1) < -1e-12)
    assert not np.any(np.isnan(table[1:, 1:]) & ~np.isnan(table[1:, :-1]))


def test_rates_by_depth_are_counted_from_the_root():
    profile = AcceptanceProfile([[0.2, 0.2, 0.2], [0.9, 0.05]])
    assert optimal_shape(profile, 3, 5) == TreeShape([-1, 0, 0])
    assert optimal_shape(profile, 6, 9).level_sizes == (1, 3, 2)
    assert optimal_tokens(profile, 6, 9)[6, 9] == pytest.approx(1 + 3 * 0.2 + 2 * 0.18)
    falling = AcceptanceProfile([[0.9, 0.05], [0.3, 0.3, 0.3]])
    assert optimal_shape(falling, 5, 3) == TreeShape([-1, 0, 1, 1, 1])


def test_nodes_of_rate_zero_fill_up_to_the_size():
    profile = AcceptanceProfile([[0.5, 0.0, 0.0]])
    for method in ["heap", "programme"]:
        shape = optimal_shape(profile, 4, 1, method)
        assert shape == TreeShape([-1, 0, 0, 0])
        assert optimal_tokens(profile, 4, 1, method)[4, 1] == pytest.approx(1.5)


def test_infeasible_says_what_is_feasible():
    with pytest.raises(UsageError, match="depth 1 with 32 ranks gives at most 33 nodes"):
        optimal_shape(PUBLISHED, 34, 1)
    with pytest.raises(UsageError, match="depth 3 with 1 rank gives at most 4 nodes"):
        optimal_shape(AcceptanceProfile([[0.5]]), 5, 3)
    with pytest.raises(UsageError, match="depth 0 with 32 ranks gives at most 1 node"):
        optimal_shape(PUBLISHED, 2, 0)
    assert optimal_shape(PUBLISHED, 1, 0) == TreeShape.root_only()
    assert optimal_shape(PUBLISHED, 33, 1).level_sizes == (1, 32)


@pytest.mark.parametrize("plan", [optimal_shape, optimal_tokens])
def test_arguments_are_checked(plan):
    for size, depth in [(0, 1), (-3, 1), (2.0, 1), (4, -1), (True, 1)]:
        with pytest.raises(UsageError, match="must be an integer of at least"):
            plan(PUBLISHED, size, depth)
    with pytest.raises(UsageError, match="65,536"):
        plan(PUBLISHED, 10**12, 10**12)
    with pytest.raises(UsageError, match="method must be"):
        plan(PUBLISHED, 4, 2, "fast")
    with pytest.raises(UsageError, match="never rise"):
        plan(PUBLISHED, 4, 2, "heap")


def test_large_depths_and_sizes_need_no_recursion_or_waste():
    certain = AcceptanceProfile([[1.0]])
    assert optimal_shape(certain, 3000, 10**9) == TreeShape.chain(2999)
    assert optimal_shape(certain, 1500, 10**9, method="programme") == TreeShape.chain(1499)
    halving = AcceptanceProfile([list(accumulate([0.5] * 12, lambda rate, half: rate * half))])
    shape = optimal_shape(halving, 20_000, 10**6)
    assert shape.size == 20_000
    table = optimal_tokens(halving, 200, 400)
    assert table.shape == (201, 401)
    assert table[200, 400] == pytest.approx(expected_tokens(optimal_shape(halving, 200, 400), halving))
