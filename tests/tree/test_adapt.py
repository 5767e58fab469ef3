"""AdaptiveProfile: follows what is accepted, keeps the prior where nothing is offered, forgets."""

import numpy as np
import pytest

from sequoia.errors import UsageError
from sequoia.tree.adapt import AdaptiveProfile
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

PRIOR = AcceptanceProfile([[0.4, 0.2, 0.1], [0.3, 0.2, 0.1]], {"by": "test"})
TRUE = AcceptanceProfile([[0.6, 0.05, 0.15], [0.5, 0.1, 0.05]])


def walk(shape, profile, generator):
    """The accepted path of one round whose acceptance follows the profile."""
    path, node = [], 0
    while children := shape.children(node):
        row = profile.row(shape.depths[node])[: len(children)]
        rank = generator.choice(len(row) + 1, p=[*row, 1 - row.sum()])
        if rank == len(row):
            break
        node = children[rank]
        path.append(node)
    return path


def counted(shape, paths):
    visits, accepted = [0] * shape.depth, [[0] * shape.max_children for _ in range(shape.depth)]
    for path in paths:
        for node in (0, *path):
            if shape.children(node):
                visits[shape.depths[node]] += 1
        for node in path:
            accepted[shape.depths[node] - 1][shape.ranks[node]] += 1
    return visits, accepted


def test_without_counts_it_is_the_prior():
    profile = AdaptiveProfile(PRIOR).profile
    np.testing.assert_allclose(profile.table, PRIOR.table, atol=1e-12)
    assert profile.provenance == {"adapted_from": {"by": "test"}, "rounds": 0.0}


@pytest.mark.parametrize("way", ["observe", "add"])
def test_it_finds_the_rates_though_not_all_nodes_offer_all_ranks(way):
    shape = optimal_shape(TRUE, 9, 2)
    counts = [len(shape.children(node)) for node in shape.levels[1]]
    assert counts == [3, 1, 1]
    generator = np.random.default_rng(0)
    paths = [walk(shape, TRUE, generator) for _ in range(5000)]
    adaptive = AdaptiveProfile(PRIOR, half_life=1e9)
    if way == "observe":
        for path in paths:
            adaptive.observe(shape, path)
    else:
        for part in range(0, len(paths), 500):
            adaptive.add(*counted(shape, paths[part : part + 500]), shape)
    np.testing.assert_allclose(adaptive.profile.table, TRUE.table, atol=0.03)
    assert adaptive.profile.provenance["rounds"] == pytest.approx(5000, abs=1)


def test_one_round_by_hand():
    #       0
    #   1   2   3      root: 3 children; 2 has one child, 4
    #       4
    shape = TreeShape([-1, 0, 0, 0, 2])
    adaptive = AdaptiveProfile(PRIOR, prior_trials=1.0, half_life=1e9)
    adaptive.observe(shape, [2])
    shares = [0.4 / 2, (0.2 / 0.6 + 1) / 2, 0.1 / 0.4]
    expected = [shares[0], 0.8 * shares[1], 0.8 * (1 - shares[1]) * shares[2]]
    np.testing.assert_allclose(adaptive.profile.row(0), expected, atol=1e-8)
    np.testing.assert_allclose(adaptive.profile.row(1)[0], 0.15, atol=1e-8)


def test_ranks_never_offered_keep_the_priors_rate_scaled_to_what_is_left():
    adaptive = AdaptiveProfile(PRIOR, prior_trials=1e-6)
    adaptive.add([100], [[70]])
    first, second, third = adaptive.profile.row(0)
    assert first == pytest.approx(0.7, abs=1e-6)
    assert second == pytest.approx(0.2 * 0.3 / 0.6, abs=1e-6)
    assert third == pytest.approx(0.1 * 0.3 / 0.6, abs=1e-6)
    np.testing.assert_allclose(adaptive.profile.row(1), PRIOR.row(1), atol=1e-12)


def test_all_accepted_leaves_nothing_and_no_row_exceeds_one():
    adaptive = AdaptiveProfile(PRIOR, prior_trials=1e-9)
    adaptive.add([10, 10], [[10], [0, 0, 10]])
    np.testing.assert_allclose(adaptive.profile.table, [[1, 0, 0], [0, 0, 1]], atol=1e-6)


def test_more_of_a_rank_than_the_shape_seemed_to_offer():
    """Only the unlikely second child has three children, and yet all visits took the third of them."""
    shape = TreeShape([-1, 0, 0, 1, 2, 2, 2])
    adaptive = AdaptiveProfile(AcceptanceProfile([[0.98, 0.01], [0.4, 0.2, 0.1]]), prior_trials=1e-6)
    adaptive.add([10, 10], [[0, 10], [0, 0, 10]], shape)
    assert adaptive.profile.row(1)[2] > 0.5
    assert adaptive.profile.row(1).sum() <= 1


def test_old_counts_fade():
    adaptive = AdaptiveProfile(PRIOR, half_life=50)
    for _ in range(10):
        adaptive.add([100], [[100, 0, 0]])
    assert adaptive.profile.row(0)[0] > 0.6
    for _ in range(10):
        adaptive.add([100], [[0, 0, 0]])
    assert adaptive.profile.row(0)[0] < 0.2
    for _ in range(5):
        adaptive.add([0], [[]])
    assert adaptive.profile.row(0)[0] < 0.2


def test_deep_and_late_counts():
    """Depths beyond the prior's rows go to its last row; ranks that it does not have are left out."""
    shape = TreeShape.chain(4)
    deep = AdaptiveProfile(PRIOR, prior_trials=1.0, half_life=1e9)
    deep.add([4, 4, 4, 4], [[4], [4], [4], [4]])
    one = AdaptiveProfile(PRIOR, prior_trials=1.0, half_life=1e9)
    for _ in range(4):
        one.observe(shape, [1, 2, 3, 4])
    np.testing.assert_allclose(deep.profile.table, one.profile.table, atol=1e-6)
    assert deep.profile.row(1)[0] > deep.profile.row(0)[0] - 0.1
    wide = AdaptiveProfile(PRIOR)
    wide.observe(TreeShape([-1, 0, 0, 0, 0, 0]), [5])
    assert wide.profile.ranks == 3
    assert wide.profile.row(0).sum() < PRIOR.row(0).sum()
    counts = AdaptiveProfile(PRIOR)
    counts.add([1], [[0, 0, 0, 0, 1]], TreeShape([-1, 0, 0, 0, 0, 0]))
    np.testing.assert_allclose(counts.profile.table, wide.profile.table, atol=1e-3)


def test_a_plan_follows():
    chain = AcceptanceProfile([[0.45, 0.3, 0.2]])
    adaptive = AdaptiveProfile(chain)
    shape = optimal_shape(chain, 8, 4)
    generator = np.random.default_rng(1)
    for _ in range(500):
        adaptive.observe(shape, walk(shape, AcceptanceProfile([[0.9, 0.02, 0.01]]), generator))
    assert optimal_shape(adaptive.profile, 8, 7).depth > shape.depth


@pytest.mark.parametrize(
    ("visits", "accepted", "shape", "message"),
    [
        ([1], [[1], [1]], None, "visits has 1 depths but accepted has 2"),
        ([1], [[1, 1]], None, r"accepted\[0\] sums to 2, more than its 1 visits"),
        ([-1], [[0]], None, r"visits\[0\] must be"),
        ([1], [[-1]], None, r"accepted\[0\]\[0\] must be"),
        ([1, 1], [[1], [1]], TreeShape.chain(1), "no node deeper than 0 has children"),
    ],
)
def test_what_are_no_counts_is_refused(visits, accepted, shape, message):
    adaptive = AdaptiveProfile(PRIOR)
    with pytest.raises(UsageError, match=message):
        adaptive.add(visits, accepted, shape)
    np.testing.assert_allclose(adaptive.profile.table, PRIOR.table, atol=1e-12)


@pytest.mark.parametrize("numbers", [{"prior_trials": 0}, {"half_life": -1}, {"half_life": float("inf")}])
def test_numbers_are_above_zero(numbers):
    with pytest.raises(UsageError, match="must be a number above 0"):
        AdaptiveProfile(PRIOR, **numbers)
