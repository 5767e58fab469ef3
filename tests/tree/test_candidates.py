"""The search for the fastest tree, held against all small trees."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from sequoia.tree.candidates import Costs, Search
from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.planner import optimal_shape, optimal_tokens
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

MOST = 6


@cache
def all_trees(size):
    parents = product(*(range(node) for node in range(1, size)))
    return {TreeShape((-1, *own)).in_level_order() for own in parents}


def branching(profile, sizes):
    trees = (tree for size in sizes for tree in all_trees(size))
    return [tree for tree in trees if 1 < tree.max_children <= profile.ranks]


def random_profile(generator, falling):
    rows = []
    for _ in range(generator.integers(1, 5)):
        row = generator.dirichlet(np.full(generator.integers(3, 6), 0.7))[:-1]
        rows.append(np.sort(row)[::-1] if falling else row)
    return AcceptanceProfile(rows)


def random_latency(generator, widths):
    """Passes with cliffs, up and down; draft levels that take longer the wider they are, as `widths` says."""
    target = generator.random(MOST + 1) + 0.3
    draft = generator.random() * 0.1 + np.cumsum(generator.exponential(size=MOST + 1) * widths)
    return LatencyProfile(
        {0: {rows: Timing(target[rows], 0.0) for rows in range(1, MOST + 1)}},
        {width: Timing(draft[width], 0.0) for width in range(1, MOST + 1)},
        {1: Timing(0.1, 0.0), MOST: Timing(0.1 + 0.1 * generator.random(), 0.0)},
    )


def search(profile, latency, sizes=range(1, MOST + 1), depth=MOST):
    found = Search(profile, Costs.of(latency), sizes, latency.draft)
    return found, found.run(depth)


def seconds_per_token(shape, profile, latency):
    return latency.round_seconds(shape) / expected_tokens(shape, profile)


@pytest.mark.parametrize(("falling", "widths"), [(True, 0.05), (True, 0.0), (False, 0.0)])
@pytest.mark.parametrize("seed", range(40))
def test_the_fastest_of_all_small_trees_is_found(falling, widths, seed):
    generator = np.random.default_rng(seed)
    profile, latency = random_profile(generator, falling), random_latency(generator, widths)
    found, contenders = search(profile, latency)
    trees = branching(profile, range(3, MOST + 1))
    best = min(seconds_per_token(tree, profile, latency) for tree in trees)
    assert contenders[0].seconds_per_token == pytest.approx(best, rel=1e-9)
    assert found.shape(contenders[0]) in trees


@pytest.mark.parametrize("seed", range(40))
def test_where_rates_rise_and_width_costs_it_is_no_slower_than_the_trees_of_most_tokens(seed):
    generator = np.random.default_rng(seed)
    profile, latency = random_profile(generator, False), random_latency(generator, 0.05)
    sizes, depths = range(3, MOST + 1), range(1, MOST)
    shapes = []
    for size, depth in product(sizes, depths):
        if any(tree.size == size and tree.depth <= depth for tree in branching(profile, [size])):
            shapes.append(optimal_shape(profile, size, depth))
    best = min(seconds_per_token(shape, profile, latency) for shape in shapes if shape.max_children > 1)
    assert search(profile, latency)[1][0].seconds_per_token <= best + 1e-12


@pytest.mark.parametrize("falling", [True, False])
def test_every_contender_is_the_tree_it_says_it_is(falling):
    generator = np.random.default_rng(7)
    profile, latency = random_profile(generator, falling), random_latency(generator, 0.05)
    found, contenders = search(profile, latency, sizes=[1, 3, 5], depth=3)
    assert {contender.size for contender in contenders} == {3, 5}
    for contender in contenders:
        shape = found.shape(contender)
        assert (shape.size, shape.depth <= contender.depth <= 3) == (contender.size, True)
        assert contender.seconds_per_token == pytest.approx(seconds_per_token(shape, profile, latency))


def test_wide_levels_are_avoided_where_they_cost():
    profile = AcceptanceProfile([[0.4, 0.3, 0.2]])
    flat = {rows: Timing(1.0, 0.0) for rows in range(1, 33)}
    cheap = LatencyProfile({0: flat}, {1: Timing(0.05, 0.0), 32: Timing(0.05, 0.0)}, {})
    dear = LatencyProfile({0: flat}, {1: Timing(0.05, 0.0), 2: Timing(0.05, 0.0), 3: Timing(1.0, 0.0)}, {})
    widths = []
    for latency in (cheap, dear):
        found, contenders = search(profile, latency, sizes=[20], depth=4)
        shape = found.shape(contenders[0])
        widths.append(max(sum(bool(shape.children(node)) for node in level) for level in shape.levels))
    assert widths[0] > 2
    assert widths[1] == 2


def test_one_rank_has_no_branching_trees():
    profile = AcceptanceProfile([[0.9]])
    assert search(profile, random_latency(np.random.default_rng(0), 0.05))[1] == []
    assert (
        search(AcceptanceProfile([[0.9, 0.1]]), random_latency(np.random.default_rng(0), 0.05), sizes=[1, 2])[1] == []
    )


def test_noise_in_the_rates_costs_the_search_little():
    share = 0.8 * np.arange(1, 17) ** -1.8 / 1.6
    counts = np.random.default_rng(1).multinomial(200, [*share, 1 - share.sum()], size=12)
    profile = AcceptanceProfile(counts[:, :-1] / 200)
    sizes = (8, 16, 32, 64, 128)
    latency = LatencyProfile({0: {rows: Timing(1.0, 0.0) for rows in (1, *sizes)}}, {1: Timing(0.0, 0.0)}, {})
    most = optimal_tokens(profile, 128, 8)
    _, contenders = search(profile, latency, sizes, depth=8)
    for contender in contenders:
        assert 1 / contender.seconds_per_token >= 0.995 * most[contender.size, contender.depth]
