"""Draws: children of a node with and without replacement or by rank, and single draws from a distribution.

Noise comes from a generator of its own for each (seed, request, round, purpose), so that a seed repeats a run while
requests, rounds, and the draft and the verifier never share a number.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

_NO_SUPPORT = 1e-300  # a rate so small that the race turns to it only when every likelier token has come in


class Draws(Enum):
    """How a node's children are drawn from its draft distribution."""

    WITHOUT_REPLACEMENT = "without replacement"
    WITH_REPLACEMENT = "with replacement"
    TOP_K = "top-k"


class Purpose(Enum):
    DRAFT = 0
    VERIFY = 1


class Noise:
    """The source of all randomness of one request."""

    def __init__(self, seed: int | None = None, request: int = 0, device: torch.device | str = "cpu") -> None:
        self._entropy = secrets.randbits(128) if seed is None else seed
        self._request = request
        self._device = device

    def generator(self, round_index: int, purpose: Purpose) -> torch.Generator:
        """A generator for one purpose in one round; the same arguments give the same numbers."""
        sequence = np.random.SeedSequence(self._entropy, spawn_key=(self._request, round_index, purpose.value))
        seed = int(sequence.generate_state(1, np.uint64)[0]) >> 1  # torch takes 63 bits on every device
        return torch.Generator(self._device).manual_seed(seed)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) in 64 bit, whose grid is fine enough for any tail."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


@dataclass(frozen=True)
class Candidates:
    """The tokens that one level's children are drawn from."""

    tokens: Tensor  # [candidates] token ids, increasing
    scores: Tensor  # [rows, candidates] processed logits, which rank the tokens for top-k
    probs: Tensor  # [rows, candidates] draft distributions
    proposable: int  # token ids from here on are never drawn

    def everything(self) -> Candidates:
        """The same with a column for every proposable token."""
        if len(self.tokens) == self.proposable:
            return self
        scores = self.scores.new_full((len(self.scores), self.proposable), -torch.inf)
        return Candidates(
            torch.arange(self.proposable, device=self.tokens.device),
            scores.index_copy_(1, self.tokens, self.scores),
            torch.zeros_like(scores).index_copy_(1, self.tokens, self.probs),
            self.proposable,
        )


def draw_children(draws: Draws, candidates: Candidates, count: int, generator: torch.Generator) -> Tensor:
    """[rows, count] token ids of each row's children.

    Args:
        count: children per row, at most the proposable tokens where they must differ.
    """
    if draws is Draws.WITH_REPLACEMENT:
        columns = draw_with_replacement(candidates.probs, count, generator)
    elif draws is Draws.TOP_K:
        if count > len(candidates.tokens):
            candidates = candidates.everything()
        columns = candidates.scores.topk(count, dim=-1).indices
    else:
        if len(candidates.tokens) < candidates.proposable and bool(((candidates.probs > 0).sum(-1) < count).any()):
            candidates = candidates.everything()
        columns = draw_without_replacement(candidates.probs, count, generator)
    return candidates.tokens[columns]


def draw_without_replacement(probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Successive draws without replacement by an exponential race; past the support, uniform over the rest.

    Args:
        probs: [rows, candidates].
        count: draws per row, at most the number of candidates.

    Returns:
        [rows, count] distinct columns, in the order drawn.
    """
    arrivals = uniform(tuple(probs.shape), generator).neg_().log1p_().neg_()  # exponential, of rate 1
    arrivals /= probs.double().clamp_(min=_NO_SUPPORT)
    return arrivals.topk(count, dim=-1, largest=False).indices


def draw_with_replacement(probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[rows, vocab] → [rows, count] independent draws."""
    return invert(probs, uniform((len(probs), count), generator))


def invert(weights: Tensor, coins: Tensor) -> Tensor:
    """Draw by the inverse of the cumulative distribution; a token of weight 0 is never returned.

    Args:
        weights: [rows, vocab] non-negative, with a positive sum.
        coins: [rows, draws] in [0, 1).

    Returns:
        [rows, draws] tokens.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    last = torch.searchsorted(cumulative, total)  # where rounding up to the total would step past the support
    return torch.minimum(torch.searchsorted(cumulative, coins * total, right=True), last)
