"""Draws: children of a node with and without replacement or by rank, and single draws from a distribution.

Noise comes from a generator of its own for each (seed, request, round, purpose), so that a seed repeats a run while
requests, rounds, and the draft and the verifier never share a number.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Generator = np.random.Generator | torch.Generator


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
        self._device = torch.device(device)
        self._key = np.random.SeedSequence(self._entropy, spawn_key=(request,)).generate_state(2, np.uint64)

    def generator(self, round_index: int, purpose: Purpose) -> Generator:
        """A generator for one purpose in one round; the same arguments give the same numbers."""
        if self._device.type == "cpu":
            # A counter's place says whose numbers these are, which is quicker than another seed for each.
            counter = np.array([0, 0, round_index, purpose.value], dtype=np.uint64)
            return np.random.Generator(np.random.Philox(key=self._key, counter=counter))
        sequence = np.random.SeedSequence(self._entropy, spawn_key=(self._request, round_index, purpose.value))
        return torch.Generator(self._device).manual_seed(int(sequence.generate_state(1, np.uint64)[0]) >> 1)


def uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Numbers in [0, 1) in 64 bit, whose grid is fine enough for any tail, on the generator's device."""
    if isinstance(generator, np.random.Generator):
        return torch.from_numpy(generator.random(shape))
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


def draw_children(draws: Draws, candidates: Candidates, counts: Sequence[int], generator: Generator) -> Tensor:
    """Token ids of each row's children.

    Args:
        counts: children of each row, at most the proposable tokens where they must differ.

    Returns:
        [rows, largest count]; what lies past a row's count has no meaning.
    """
    width = max(counts)
    if draws is Draws.WITH_REPLACEMENT:
        return candidates.tokens[draw_with_replacement(candidates.probs, width, generator)]
    if draws is Draws.TOP_K:
        if width > len(candidates.tokens):
            candidates = candidates.everything()
        return candidates.tokens[candidates.scores.topk(width, dim=-1).indices]
    if len(candidates.tokens) < candidates.proposable and bool(((candidates.probs > 0).sum(-1) < width).any()):
        candidates = candidates.everything()
    return candidates.tokens[draw_without_replacement(candidates.probs, counts, generator)]


def draw_without_replacement(probs: Tensor, counts: Sequence[int], generator: Generator) -> Tensor:
    """Successive draws, each from what the ones before it left; past the support, uniform over the rest.

    The mass left is summed anew for every draw, so the tail keeps its proportions however little of it there is.

    Args:
        probs: [rows, candidates].
        counts: draws for each row, at most the number of candidates.

    Returns:
        [rows, largest count] distinct columns, in the order drawn; what lies past a row's count has no meaning.
    """
    if probs.is_cuda:
        return _draw_in_turn(probs.double(), probs.new_zeros(len(counts), 0, dtype=torch.long), counts, generator)
    # Successive draws are independent ones less those that repeat one before, and these share one sum.
    tries = invert(probs, uniform((len(counts), 2 * max(counts)), generator)).tolist()
    drawn = torch.zeros(len(counts), max(counts), dtype=torch.long)
    for row, count in enumerate(counts):
        found = torch.tensor([list(dict.fromkeys(tries[row]))[:count]])
        if found.shape[1] < count:
            found = _draw_in_turn(probs[[row]].double(), found, [count], generator)
        drawn[row, :count] = found[0]
    return drawn


def _draw_in_turn(weights: Tensor, before: Tensor, counts: Sequence[int], generator: Generator) -> Tensor:
    """`draw_without_replacement`, whose first draws, [rows, draws], are given."""
    order = sorted(range(len(counts)), key=lambda row: -counts[row])  # rows still drawing come first
    left, first = weights[order].scatter_(1, before[order], 0.0), before.shape[1]
    coins = uniform((len(counts), max(counts)), generator)
    drawn = functional.pad(before[order], (0, max(counts) - first))
    for rank in range(first, max(counts)):
        rows = slice(sum(count > rank for count in counts))
        cumulative = _cumulative(left[rows])
        spent = cumulative[:, -1:] <= 0
        if spent.is_cuda or bool(spent.any()):
            rest = torch.ones_like(cumulative).scatter_(1, drawn[rows, :rank], 0.0)
            cumulative = torch.where(spent, rest.cumsum(-1), cumulative)
        drawn[rows, rank : rank + 1] = _inverted(cumulative, coins[rows, rank : rank + 1])
        if rank + 1 < max(counts):
            left[rows].scatter_(1, drawn[rows, rank : rank + 1], 0.0)
    found = torch.empty_like(drawn)
    found[order] = drawn
    return found


def draw_with_replacement(probs: Tensor, count: int, generator: Generator) -> Tensor:
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
    return _inverted(_cumulative(weights.double()), coins)


def _cumulative(weights: Tensor) -> Tensor:
    """[rows, vocab] sums up to each token, which a token of weight 0 leaves exactly where it was."""
    cumulative = weights.cumsum(-1)
    if cumulative.is_cuda:  # a parallel scan adds in another order at each place
        cumulative = torch.where(weights > 0, cumulative, 0.0).cummax(-1).values
    return cumulative


def _inverted(cumulative: Tensor, coins: Tensor) -> Tensor:
    total = cumulative[:, -1:]
    # Rounding up to the total would step past the support.
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, torch.minimum(coins * total, below), right=True)
