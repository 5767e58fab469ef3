"""The choice by measured time per token: tree, chain or off, alone and in batches."""

import numpy as np
import pytest

from sequoia.errors import UsageError
from sequoia.params import SamplingParams
from sequoia.tree.choice import batch_options, plan
from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128)
GOOD = AcceptanceProfile([[0.7, 0.15, 0.05, 0.02], [0.6, 0.2, 0.05, 0.02]])
PARAMS = SamplingParams(temperature=0.6, top_p=0.9)


def latency(target, draft=0.002, overhead=0.0, spread=0.0):
    """Times by functions or constants."""

    def curve(seconds, places):
        call = seconds if callable(seconds) else lambda _: seconds
        return {place: Timing(call(place), spread) for place in places}

    return LatencyProfile(
        {128: curve(target, ROWS)}, curve(draft, (1, 2, 4, 8, 16, 32, 64)), curve(overhead, (1, 16, 128))
    )


def cliff(rows):
    """A pass that takes half as long again past 16 rows, and twice as long past 32."""
    return 0.03 if rows <= 16 else 0.045 if rows <= 32 else 0.06


def chosen(profile, times, **limits):
    return plan(profile, times, params=PARAMS, **limits).chosen


def test_a_bigger_tree_that_is_slower_is_not_chosen():
    tree = chosen(GOOD, latency(cliff, draft=0.001)).shape
    assert tree.size == 16
    flat = chosen(GOOD, latency(0.03, draft=0.001)).shape
    assert expected_tokens(flat, GOOD) > expected_tokens(tree, GOOD)
    assert flat.size == 128


def test_off_where_off_is_faster():
    steep = latency(lambda rows: 0.03 * rows)
    result = plan(GOOD, steep, params=PARAMS)
    assert result.chosen.kind == "off"
    assert [option.kind for option in result.options] == ["off", "chain", "tree"]
    assert all(option.prediction.tokens_per_round > 1 for option in result.options[1:])
    assert chosen(GOOD, latency(0.03, draft=0.1)).kind == "off"


def test_a_useless_draft_means_off():
    assert chosen(AcceptanceProfile([[0.0, 0.0, 0.0]]), latency(cliff)).kind == "off"
    assert chosen(AcceptanceProfile([[1e-4, 1e-5]]), latency(cliff)).kind == "off"
    assert chosen(AcceptanceProfile([[0.0, 0.0]]), latency(0.03, draft=0.0)).kind == "off"


def test_a_perfect_free_draft_goes_deep():
    perfect = AcceptanceProfile([[1.0, 0.0]])
    result = plan(perfect, latency(0.03, draft=0.0), params=PARAMS, max_depth=12)
    assert (result.chosen.kind, result.chosen.shape.depth) == ("chain", 12)
    assert result.chosen.prediction.tokens_per_round == 13.0
    nearly = AcceptanceProfile([[0.97, 0.02]])
    assert chosen(nearly, latency(0.03, draft=0.0)).shape.depth == 16


def test_overhead_counts():
    calm = chosen(GOOD, latency(0.03, draft=0.001)).shape
    busy = chosen(GOOD, latency(0.03, draft=0.001, overhead=lambda size: 0.001 * size)).shape
    assert busy.size < calm.size


def test_the_context_decides_too():
    times = {rows: Timing(0.03, 0.0) for rows in ROWS}
    late = {rows: Timing(0.03 * rows, 0.0) for rows in ROWS}
    both = LatencyProfile({128: times, 4096: late}, {1: Timing(0.001, 0.0)}, {})
    assert chosen(GOOD, both).kind == "tree"
    assert chosen(GOOD, both, context=4096).kind == "off"


def test_all_is_kept_that_the_curve_shows():
    result = plan(GOOD, latency(cliff), params=PARAMS, max_size=40, max_depth=5)
    assert result.params == {"temperature": 0.6, "top_p": 0.9}
    assert result.profile == GOOD
    trees, chains = ([option for option in result.sizes if option.kind == kind] for kind in ("tree", "chain"))
    assert [option.shape.size for option in trees] == [size for size in ROWS if 2 < size <= 40]
    assert [option.shape for option in chains] == [TreeShape.chain(depth) for depth in range(1, 6)]
    assert all(option.shape.depth <= 5 for option in result.sizes)
    for kind, options in (("tree", trees), ("chain", chains)):
        assert result.option(kind).prediction.seconds_per_token == min(o.prediction.seconds_per_token for o in options)
    for option in (*result.options, *result.sizes):
        tokens = expected_tokens(option.shape, GOOD)
        assert option.prediction.tokens_per_round == pytest.approx(tokens)
        assert option.prediction.seconds_per_round == latency(cliff).round_seconds(option.shape)
        assert option.prediction.tokens_error == 0.0


def test_errors_in_time_come_from_the_spreads():
    option = chosen(GOOD, latency(cliff, spread=0.003))
    spread = latency(cliff, spread=0.003).round_spread(option.shape)
    assert option.prediction.seconds_error == pytest.approx(spread / 1.349)
    assert option.prediction.tokens_per_second_error > 0


def test_sizes_may_be_given_and_limits_hold():
    result = plan(GOOD, latency(cliff), params={"temperature": 0.0}, sizes=[1, 2, 10, 11, 500])
    assert [option.shape.size for option in result.sizes if option.kind == "tree"] == [10, 11]
    assert plan(GOOD, latency(cliff), params={}, max_size=1).options[1:] == ()
    assert plan(GOOD, latency(cliff), params={}, max_depth=0).options[1:] == ()
    two = plan(GOOD, latency(cliff), params={}, max_size=2)
    assert [option.kind for option in two.options] == ["off", "chain"]
    for limits in ({"max_size": 0}, {"max_depth": -1}, {"batch": 0}, {"sizes": [2.5]}):
        with pytest.raises(UsageError, match="must be an integer"):
            plan(GOOD, latency(cliff), params={}, **limits)


def test_nothing_is_planned_beyond_what_was_timed():
    few = LatencyProfile({128: {1: Timing(1.0, 0.0), 4: Timing(1.0, 0.0)}}, {1: Timing(0.0, 0.0)}, {})
    assert max(option.shape.size for option in plan(GOOD, few, params={}).sizes) == 4


def test_without_a_draft_there_is_only_plain_decoding():
    alone = LatencyProfile({128: {1: Timing(0.03, 0.0), 8: Timing(0.03, 0.0)}}, {}, {})
    result = plan(GOOD, alone, params=PARAMS)
    assert ([option.kind for option in result.options], result.sizes) == (["off"], ())


def test_one_rank_allows_chains_only():
    result = plan(AcceptanceProfile([[0.8]]), latency(cliff), params=PARAMS)
    assert [option.kind for option in result.options] == ["off", "chain"]


def test_a_simulation_replaces_the_figures_and_the_choice():
    asked = []

    def predict(shape):
        asked.append(shape)
        return (1.0 + shape.depth, 0.25) if shape.max_children > 1 else (1.01, 0.125)

    result = plan(GOOD, latency(0.03), params=PARAMS, predict=predict)
    assert len(set(asked)) == len(asked)
    assert TreeShape.root_only() not in asked
    assert result.option("chain").prediction.tokens_error == 0.125
    assert result.plain.prediction.tokens_error == 0.0
    deepest = max(option.shape.depth for option in result.sizes if option.kind == "tree")
    assert result.chosen.shape.depth == deepest
    assert result.chosen.prediction.tokens_per_round == 1.0 + deepest
    assert result.chosen in result.sizes
    useless = plan(GOOD, latency(0.03), params=PARAMS, predict=lambda shape: (1.0, 0.0))
    assert useless.chosen.kind == "off"


def test_speculation_pays_less_the_more_requests_share_a_pass():
    times = latency(lambda rows: 0.03 if rows <= 32 else 0.03 * rows / 32)
    one, four, many = batch_options(GOOD, times, (1, 4, 64))
    assert one.chosen == plan(GOOD, times, params={}).chosen
    assert one.speedup > four.speedup > many.speedup == 1.0
    assert (one.chosen.kind, many.chosen.kind) == ("tree", "off")
    assert four.chosen.shape.size * 4 <= 32
    assert [option.batch for option in (one, four, many)] == [1, 4, 64]
    assert [option.extrapolated for option in (one, four, many)] == [False, False, False]
    assert batch_options(GOOD, latency(0.03), (64,))[0].extrapolated


def test_batches_simulate_each_shape_once():
    asked = []

    def predict(shape):
        asked.append(shape)
        return expected_tokens(shape, GOOD), 0.01

    batch_options(GOOD, latency(cliff), (1, 4, 16), predict=predict)
    assert len(set(asked)) == len(asked)


def test_the_number_of_looks_stays_small(monkeypatch):
    """Ample for sizes up to 128 and depths up to 16: what takes the time is looking at limits and building optima."""
    from sequoia.tree import candidates

    calls = {"looks": 0, "optima": 0}
    look, optimal_shape = candidates.Search._look, candidates.optimal_shape

    def counting(name, call):
        def counted(*arguments):
            calls[name] += 1
            return call(*arguments)

        return counted

    monkeypatch.setattr(candidates.Search, "_look", counting("looks", look))
    monkeypatch.setattr(candidates, "optimal_shape", counting("optima", optimal_shape))
    share = 0.8 * np.arange(1, 33) ** -1.8 / 1.6
    counts = np.random.default_rng(0).multinomial(600, [*share, 1 - share.sum()], size=12)
    profile = AcceptanceProfile(counts[:, :-1] / 600)
    assert not profile.is_monotone
    assert chosen(profile, latency(cliff, draft=lambda width: 0.001 * (1 + 0.1 * width))).kind == "tree"
    assert calls["looks"] <= 16 * 8
    assert calls["optima"] < 50
