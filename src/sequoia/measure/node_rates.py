"""Probabilities that a node's child of some rank is the accepted one: computed, never counted.

Two for each rank. `given`: the text's own next token is known, and the question is whether a child brings it or the
residual does; a round that follows the text moves on with it. `marginal`: whatever the next token is; the mean of
`given` over the target's distribution, and what a profile averages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia.speculate.sampling import Candidates, Generator, uniform

_WALKS = 2  # sequences of rejected children tried at each node; only ranks from 1 on depend on them
_EXPLICIT = (
    256  # likeliest tokens that can leave the draft's distribution once rejected; each other one is too unlikely
)
_HUGE = 1e100


@dataclass(frozen=True)
class NodeRates:
    given: Tensor  # [nodes, ranks]
    marginal: Tensor  # [nodes, ranks]

    @classmethod
    def none(cls, ranks: int) -> NodeRates:
        """Of no nodes."""
        return cls(torch.zeros(0, ranks, dtype=torch.float64), torch.zeros(0, ranks, dtype=torch.float64))


def matched_rates(candidates: Candidates, tokens: Tensor, target_probs: Tensor | None, ranks: int) -> NodeRates:
    """The likeliest children, of which the one is accepted that equals the target's draw.

    Args:
        tokens: [nodes] the text's next token.
        target_probs: [nodes, columns] of the candidates' tokens; None at temperature 0, where the text's token has all.
    """
    count = min(ranks, len(candidates.tokens))
    scores, columns = candidates.scores.topk(count, dim=-1)
    real = scores > -torch.inf  # past the draft's support children are arbitrary: hardly ever right
    given = (candidates.tokens[columns] == tokens[:, None]) & real
    marginal = given.double() if target_probs is None else target_probs.double().gather(1, columns) * real
    padding = (0, ranks - count)
    return NodeRates(torch.nn.functional.pad(given.double(), padding), torch.nn.functional.pad(marginal, padding))


def drawn_rates(
    candidates: Candidates, tokens: Tensor, target_probs: Tensor, ranks: int, generator: Generator
) -> NodeRates:
    """Children drawn without replacement, verified by Sequoia's rule (Chen et al. 2024, algorithm 2).

    With q the target's and p the draft's distribution, P the draft mass not yet proposed and C₁ = 0, rejecting a child
    of rank r takes (q − C·p)₊ on to C' = C + Z(C)/P, where Z(C) = Σ (q − C·p)₊ is the probability that all children so
    far were rejected. So rank r is accepted with probability Z(C) − Z(C'), and given that the next token is x with
    min(1, C'·p(x)/q(x)) − min(1, C·p(x)/q(x)). Only P depends on which children were rejected; these are drawn from
    their own law, in which a token weighs (C'·p − max(q, C·p))₊, so that no walk is ever in vain.

    Past the draft's support children come from the whole vocabulary and are hardly ever right: they count as wrong.

    Args:
        tokens: [nodes] the text's next token.
        target_probs: [nodes, columns] of the candidates' tokens; what is missing to 1 is that of all others.
    """
    q, p = target_probs.double(), candidates.probs.double()
    q, p = q / q.sum(-1, keepdim=True).clamp(min=1), p / p.sum(-1, keepdim=True)
    chance = _Residual(q, p, 1 - q.sum(-1, keepdim=True))
    ratio = _ratio_at(candidates.tokens, tokens, q, p)  # [nodes, 1] p(x)/q(x)
    likeliest = p.topk(min(_EXPLICIT, p.shape[1]), dim=-1)
    rejected = _Rejected(q.gather(1, likeliest.indices), likeliest.values, _WALKS)
    if p.shape[1] > _EXPLICIT:
        rejected.beyond = p.scatter(1, likeliest.indices, 0.0).sum(-1)[:, None]

    coins = uniform((ranks, len(p), _WALKS), generator).to(p.device)
    constant, left = p.new_zeros(len(p), _WALKS), p.new_ones(len(p), _WALKS)
    given, marginal = [], []
    for coin in coins:
        mass = rejected.mass()
        step = torch.where(mass > 0, left / mass.clamp(min=1 / _HUGE), 0.0)
        before, constant = constant, (constant + step).clamp(max=_HUGE)
        after = torch.minimum(chance(constant), left)
        given.append(((constant * ratio).clamp(max=1) - (before * ratio).clamp(max=1)).mean(1))
        marginal.append((left - after).mean(1))
        rejected.draw(before, constant, after, coin)
        left = after
    return NodeRates(torch.stack(given, 1), torch.stack(marginal, 1))


def _ratio_at(support: Tensor, tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """[nodes, 1] p/q of each node's own token; 0 outside the support."""
    columns = torch.searchsorted(support, tokens).clamp(max=len(support) - 1)[:, None]
    inside = support[columns] == tokens[:, None]
    return torch.where(inside, p.gather(1, columns) / q.gather(1, columns).clamp(min=1e-300), 0.0)


class _Residual:
    """Z(C) = Σ (q − C·p)₊ over all tokens, for any C: sums over those with q/p > C, sorted once.

    Rejected tokens need not be taken out: theirs is 0 from the moment they are rejected.
    """

    def __init__(self, q: Tensor, p: Tensor, others: Tensor) -> None:
        ratio, order = torch.where(p > 0, q / p, torch.inf).sort(dim=-1)
        self._ratio = ratio
        self._q = _sums_from(q.gather(1, order)) + others  # what the draft cannot propose always stays
        self._p = _sums_from(p.gather(1, order))

    def __call__(self, constant: Tensor) -> Tensor:
        """[nodes, walks]"""
        above = torch.searchsorted(self._ratio, constant, right=True)
        return (self._q.gather(1, above) - constant * self._p.gather(1, above)).clamp(min=0)


def _sums_from(values: Tensor) -> Tensor:
    """[nodes, columns + 1] sums over each column and all after it."""
    return torch.nn.functional.pad(values.flip(1).cumsum(1).flip(1), (0, 1))


class _Rejected:
    """Which children were rejected so far, in several walks."""

    def __init__(self, q: Tensor, p: Tensor, walks: int) -> None:
        self._q = q[:, None]  # [nodes, 1, explicit]
        # [nodes, walks, explicit] unproposed, and a column for all others
        self._p = torch.nn.functional.pad(p[:, None].repeat(1, walks, 1), (0, 1))
        self.beyond = p.new_zeros(len(p), 1)  # draft mass of all others

    def mass(self) -> Tensor:
        """[nodes, walks] draft mass not yet proposed, summed anew: the tail keeps its proportions."""
        return self._p.sum(-1) + self.beyond

    def draw(self, before: Tensor, after: Tensor, total: Tensor, coin: Tensor) -> None:
        """One more child of each walk, given that it is rejected; `total` is the sum of all weights.

        Args: all [nodes, walks].
        """
        p = self._p[:, :, :-1]
        weights = (after[:, :, None] * p - torch.maximum(self._q, before[:, :, None] * p)).clamp_(min=0)
        drawn = torch.searchsorted(weights.cumsum(-1), (coin * total)[:, :, None], right=True)
        self._p = self._p.scatter(2, drawn, 0.0)
