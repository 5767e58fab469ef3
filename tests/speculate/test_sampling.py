"""Draws follow the laws that verification and enumeration take them to have."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from sequoia.measure.enumeration import ordered_children
from sequoia.speculate.sampling import (
    Candidates,
    Draws,
    Noise,
    Purpose,
    draw_children,
    draw_with_replacement,
    draw_without_replacement,
    invert,
    uniform,
)

ALMOST_ONE = 1 - 2**-53
UNLIKELY = 1e-6  # seeds are fixed: a correct program that passes once passes always


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def candidates(probs: Tensor, rows: int, proposable: int, tokens: list[int] | None = None) -> Candidates:
    """`rows` equal rows of a draft that knows `tokens` alone, or all that may be proposed."""
    ids = torch.arange(proposable) if tokens is None else torch.tensor(tokens)
    own = probs[ids].expand(rows, -1)
    return Candidates(ids, own.log(), own, proposable)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The p-value, with the cells in which few are expected taken together."""
    assert observed[expected == 0].sum() == 0
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    if kept.sum() == 1:
        return 1.0
    return float(stats.chisquare(observed[kept], expected[kept] * observed.sum() / expected.sum()).pvalue)


DISTRIBUTIONS = {
    "random": [0.1, 0.35, 0.3, 0.2, 0.05],
    "peaked": [0.96, 0.01, 0.01, 0.01, 0.01],
    "two tokens": [0.0, 0.7, 0.0, 0.3, 0.0],
    "one token": [0.0, 0.0, 1.0, 0.0, 0.0],
}


@pytest.mark.parametrize("probs", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("draws", [Draws.WITHOUT_REPLACEMENT, Draws.WITH_REPLACEMENT])
@pytest.mark.parametrize("proposable", [5, 4])
@pytest.mark.parametrize("knows_all", [True, False])
def test_children_have_the_law_that_is_enumerated(
    probs: list[float], draws: Draws, proposable: int, knows_all: bool
) -> None:
    """Order included, past the support included."""
    rows, count = 20_000, 3
    draft = torch.tensor(probs)
    draft[proposable:] = 0
    draft /= draft.sum()
    known = None if knows_all else draft.nonzero().flatten().tolist()
    tuples, chances = ordered_children(draws, draft, count, proposable)
    drawn = draw_children(draws, candidates(draft, rows, proposable, known), [count] * rows, generator())
    found = Counter(map(tuple, drawn.tolist()))
    assert set(found) <= set(map(tuple, tuples.tolist()))
    observed = np.array([found[tuple(children)] for children in tuples.tolist()])
    assert chi_square(observed, rows * chances.numpy()) > UNLIKELY


def test_top_k_children_are_the_likeliest_in_order() -> None:
    draft = torch.tensor([0.1, 0.35, 0.3, 0.2, 0.05])
    drawn = draw_children(Draws.TOP_K, candidates(draft, 2, 5), [3, 2], generator())
    assert drawn[0].tolist() == [1, 2, 3]
    assert drawn[1, :2].tolist() == [1, 2]


def test_top_k_goes_past_what_the_draft_knows() -> None:
    draft = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0])
    drawn = draw_children(Draws.TOP_K, candidates(draft, 1, 4, [1, 3]), [4], generator())[0].tolist()
    assert drawn[:2] == [1, 3]
    assert sorted(drawn) == [0, 1, 2, 3]


def test_twelve_tokens_with_more_children_than_support() -> None:
    """All of the support first, in the order of successive draws; then the others, each order equally often."""
    rows, support = 20_000, [2, 3, 7, 8, 11]
    draft = torch.zeros(12)
    draft[support] = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    drawn = draw_without_replacement(draft.expand(rows, -1), [8] * rows, generator())
    assert (drawn[:, :5].sort(-1).values == torch.tensor(support)).all()
    rest = [token for token in range(12) if token not in support]
    orders = list(permutations(rest, 3))
    found = Counter(map(tuple, drawn[:, 5:].tolist()))
    observed = np.array([found[order] for order in orders])
    assert observed.sum() == rows
    assert chi_square(observed, np.full(len(orders), rows / len(orders))) > UNLIKELY


def test_rows_draw_by_themselves() -> None:
    """Rows with fewer children, spent or not, leave the others' law alone."""
    rows = 20_000
    probs = torch.tensor([[0.6, 0.4, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]]).repeat(rows, 1)
    drawn = draw_without_replacement(probs, [3, 1] * rows, generator())
    first = np.bincount(drawn[1::2, 0], minlength=4)
    assert chi_square(first, rows * np.array([0.1, 0.2, 0.3, 0.4])) > UNLIKELY
    third = np.bincount(drawn[::2, 2], minlength=4)
    assert chi_square(third, rows * np.array([0.0, 0.0, 0.5, 0.5])) > UNLIKELY


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1.0)), min_size=2, max_size=12).filter(any),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_without_replacement_is_distinct_and_support_first(weights: list[float], count: int, seed: int) -> None:
    probs = torch.tensor([weights], dtype=torch.float32)
    count = min(count, len(weights))
    drawn = draw_without_replacement(probs, [count], generator(seed))[0].tolist()
    assert len(set(drawn)) == count
    supported = [weights[token] > 0 for token in drawn]
    assert supported == sorted(supported, reverse=True)
    assert sum(supported) == min(count, sum(weight > 0 for weight in weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawing_leaves_the_distribution_as_it_was(dtype: torch.dtype) -> None:
    probs = torch.tensor([[0.1, 0.35, 0.3, 0.2, 0.05]], dtype=dtype)
    before = probs.clone()
    draw_without_replacement(probs, [3], generator())
    draw_with_replacement(probs, 3, generator())
    assert torch.equal(probs, before)


# Large vocabularies with heavy tails: what a coarse grid of numbers would cut off.

VOCAB = 32_768


@pytest.fixture(scope="module")
def heavy_tail() -> Tensor:
    """Half of the mass on tokens that each have less than 1e-4; the ids shuffled."""
    weights = 1 / (10 + torch.arange(VOCAB, dtype=torch.float64))
    return (weights / weights.sum())[torch.randperm(VOCAB, generator=generator(5))].float()


def bucketed(heavy_tail: Tensor, law: np.ndarray, drawn: Tensor) -> float:
    """Chi-square over 64 buckets of tokens of like probability."""
    bucket = np.empty(VOCAB, dtype=np.int64)
    bucket[np.argsort(heavy_tail.numpy(), kind="stable")] = np.arange(VOCAB) * 64 // VOCAB
    observed = np.bincount(bucket[drawn.numpy()], minlength=64)
    expected = np.bincount(bucket, weights=law, minlength=64)
    return chi_square(observed, expected * len(drawn))


def test_the_tail_is_drawn_as_often_as_it_should(heavy_tail: Tensor) -> None:
    law = heavy_tail.double().numpy() / heavy_tail.double().sum().item()
    coins = uniform((1, 400_000), generator())
    assert bucketed(heavy_tail, law, invert(heavy_tail[None], coins)[0]) > UNLIKELY


@pytest.mark.slow
def test_the_tail_is_proposed_as_often_as_it_should(heavy_tail: Tensor) -> None:
    """First and second children, without replacement."""
    first = heavy_tail.double().numpy() / heavy_tail.double().sum().item()
    odds = first / (1 - first)
    second = first * (odds.sum() - odds)
    random = generator()
    drawn = torch.cat([draw_without_replacement(heavy_tail.expand(100, -1), [2] * 100, random) for _ in range(50)])
    assert bucketed(heavy_tail, first, drawn[:, 0]) > UNLIKELY
    assert bucketed(heavy_tail, second, drawn[:, 1]) > UNLIKELY


def test_every_token_can_be_drawn() -> None:
    """Tokens of probability 1e-12 beside others of 1e-4: the numbers drawn lie closer than that."""
    probs = torch.full((VOCAB,), 1e-8, dtype=torch.float64)
    probs[::4] = 1.0
    probs /= probs.sum()
    ends = probs.cumsum(0)
    middles = (ends - probs / 2)[None]
    assert torch.equal(invert(probs[None], middles)[0], torch.arange(VOCAB))
    grid = uniform((1000,), generator()) * 2**44
    assert (grid != grid.floor()).float().mean() > 0.99


def test_a_tail_far_below_the_head_keeps_its_proportions() -> None:
    """Once the head is drawn, tokens of 1e-20 are drawn in proportion."""
    rows = 20_000
    probs = torch.tensor([1.0, 1e-20, 2e-20, 3e-20, 4e-20]).expand(rows, -1)
    drawn = draw_without_replacement(probs, [2] * rows, generator())
    assert (drawn[:, 0] == 0).all()
    assert chi_square(np.bincount(drawn[:, 1], minlength=5), rows * np.array([0, 0.1, 0.2, 0.3, 0.4])) > UNLIKELY


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e3)), min_size=1, max_size=8).filter(any),
    coin=st.one_of(st.sampled_from([0.0, 2**-53, 0.5, ALMOST_ONE]), st.floats(0, ALMOST_ONE)),
)
@settings(max_examples=300, deadline=None)
def test_no_coin_draws_a_token_of_weight_zero(weights: list[float], coin: float) -> None:
    coins = torch.tensor([[coin]], dtype=torch.float64)
    token = int(invert(torch.tensor([weights], dtype=torch.float64), coins))
    assert weights[token] > 0


# Noise.


def numbers(noise: Noise, round_index: int = 0, purpose: Purpose = Purpose.DRAFT, count: int = 8) -> list[float]:
    return uniform((count,), noise.generator(round_index, purpose)).tolist()


def test_a_seed_repeats_its_numbers() -> None:
    assert numbers(Noise(7, request=3), 2) == numbers(Noise(7, request=3), 2)
    assert numbers(Noise(2**100)) == numbers(Noise(2**100))


def test_without_a_seed_no_two_requests_are_alike() -> None:
    assert numbers(Noise()) != numbers(Noise())


def test_within_a_request_asking_twice_gives_the_same() -> None:
    noise = Noise()
    assert numbers(noise, 1) == numbers(noise, 1)


def test_streams_are_independent() -> None:
    """Across seeds, requests, rounds and purposes, consecutive ones above all."""
    streams = [
        numbers(Noise(seed, request), round_index, purpose, count=2000)
        for seed in (0, 1, 2**64)
        for request in range(4)
        for round_index in range(4)
        for purpose in Purpose
    ]
    correlations = np.corrcoef(np.array(streams)) - np.eye(len(streams))
    assert np.abs(correlations).max() < 6 / np.sqrt(2000)


def test_streams_do_not_meet() -> None:
    """A generator that takes 32 bits of its seed, as torch's does on a CPU, would repeat about three times here."""
    noise, rounds = Noise(1), 150_000
    first = {noise.generator(index, Purpose.DRAFT).integers(2**63) for index in range(rounds)}  # type: ignore[union-attr]
    assert len(first) == rounds
