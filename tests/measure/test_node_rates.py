"""Rates in closed form against the verifier's own rule, by enumeration of all children that can be drawn."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from sequoia.measure import node_rates
from sequoia.measure.node_rates import drawn_rates, matched_rates
from sequoia.speculate.sampling import Candidates
from sequoia.speculate.verify import VERIFIERS

VOCAB, RANKS = 5, 4


def _distribution(seed: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)


def _enumerated(q: Tensor, p: Tensor) -> Tensor:
    """[ranks, vocab] probability that a rank's child is accepted and is this token, by `verify`'s rule."""
    found = torch.zeros(RANKS, VOCAB, dtype=torch.float64)
    for children in permutations(range(VOCAB), RANKS):
        left, chance = p.clone(), 1.0
        for token in children:
            chance *= float(left[token] / left.sum())
            left[token] = 0
        accept = VERIFIERS["sequoia"].rule(q[None], p[None], torch.tensor([children]), VOCAB).accept[0]
        reached = 1.0
        for rank, token in enumerate(children):
            found[rank, token] += chance * reached * accept[rank]
            reached *= float(1 - accept[rank])
    return found


def _candidates(p: Tensor, rows: int) -> Candidates:
    p = p.expand(rows, -1)
    return Candidates(torch.arange(p.shape[1]), p.log(), p, p.shape[1])


@pytest.mark.parametrize(("seed", "spread"), [(0, 0.2), (1, 1.0), (2, 1.5), (3, 4.0)])
@pytest.mark.parametrize("explicit", [256, 3])
def test_drawn_rates_are_the_rules_own(
    seed: int, spread: float, explicit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rates, "_EXPLICIT", explicit)
    monkeypatch.setattr(node_rates, "_WALKS", 4)
    q, p, rows = _distribution(seed), _distribution(seed + 100, spread), 3000
    if explicit < VOCAB:  # the tail is taken for inexhaustible, so it has to be small
        p[p.argsort()[: VOCAB - explicit]] = 1e-5
        p /= p.sum()
    expected = _enumerated(q, p)
    for token in range(VOCAB):
        tokens = torch.full((rows,), token)
        noise = np.random.default_rng(token)
        found = drawn_rates(_candidates(p, rows), tokens, q.expand(rows, -1), RANKS, noise)
        for name, values, law in (
            ("given", found.given, expected[:, token] / q[token]),
            ("marginal", found.marginal, expected.sum(1)),
        ):
            error = values.std(0) / rows**0.5
            gap = (values.mean(0) - law).abs()
            assert (gap <= 4 * error + (1e-7 if explicit > VOCAB else 1e-3)).all(), (name, token)


def test_the_first_rank_needs_no_draw() -> None:
    q, p = _distribution(4), _distribution(5)
    found = drawn_rates(_candidates(p, 2), torch.tensor([1, 1]), q.expand(2, -1), 1, np.random.default_rng())
    torch.testing.assert_close(found.marginal[:, 0], torch.minimum(q, p).sum().expand(2))
    torch.testing.assert_close(found.given[:, 0], (p[1] / q[1]).clamp(max=1).expand(2))


def test_what_the_draft_cannot_propose_is_never_accepted() -> None:
    """Three columns of a vocabulary of many: the rest of the target's mass is one number."""
    p = torch.tensor([[0.5, 0.5, 0.0]])
    candidates = Candidates(torch.tensor([4, 7, 9]), p.log(), p, 100)
    found = drawn_rates(
        candidates,
        torch.tensor([11]),
        torch.tensor([[0.1, 0.2, 0.3]]),
        6,
        np.random.default_rng(0),
    )
    assert (found.given == 0).all()
    # 0.3 at first. Then 7 is proposed for certain, or 4, and what is left of the target has none of either.
    torch.testing.assert_close(found.marginal, torch.tensor([[0.3, 0, 0, 0, 0, 0]], dtype=torch.float64))


def test_unlikely_tokens_keep_their_proportions() -> None:
    """Once a token with nearly all of the draft's mass is rejected, the next child comes from what little is left."""
    p = torch.tensor([[1.0, 1e-13, 1e-20]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    found = drawn_rates(_candidates(p, 1), torch.tensor([2]), q, 3, np.random.default_rng(0))
    torch.testing.assert_close(
        found.marginal, torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(found.given, torch.tensor([[0, 0, 1.0]], dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_probabilities(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = (4 * torch.randn(30, 40, generator=generator)).softmax(-1)
    p = (8 * torch.randn(30, 40, generator=generator)).softmax(-1)
    candidates = Candidates(torch.arange(40), p.log(), p, 40)
    tokens = q.multinomial(1, generator=generator)[:, 0]
    found = drawn_rates(candidates, tokens, q, 12, np.random.default_rng(seed))
    for rates in (found.given, found.marginal):
        assert (rates >= -1e-9).all()
        assert (rates.sum(1) <= 1 + 1e-9).all()
        assert torch.isfinite(rates).all()


def test_likeliest_children_are_accepted_where_one_is_the_targets_token() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, -torch.inf], [0.0, 1.0, 2.0, 3.0]])
    candidates = Candidates(torch.tensor([2, 4, 6, 8]), scores, scores.softmax(-1), 20)
    greedy = matched_rates(candidates, torch.tensor([6, 2]), None, 5)
    assert greedy.given.tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert torch.equal(greedy.given, greedy.marginal)
    target = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    sampled = matched_rates(candidates, torch.tensor([8, 11]), target, 3)
    assert sampled.given.tolist() == [[0, 0, 0], [0, 0, 0]]  # past the first's support; not among the second's tokens
    torch.testing.assert_close(sampled.marginal.float(), torch.tensor([[0.1, 0.3, 0.2], [0.4, 0.3, 0.2]]))
