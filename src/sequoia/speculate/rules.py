"""Rules of verification: what can happen at one node, exact for children drawn as the verifier asks.

A rule turns one node into its law: for each child the probability that it is accepted, given that the ones before it
were rejected, and the distribution of the next token when all were. Rules are pure. All of them are lossless for
children drawn as they ask (`Verifier.draws`), which enumeration proves in `selftest`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BISECTIONS = 40


@dataclass(frozen=True)
class NodeLaw:
    """What can happen at a node."""

    accept: Tensor  # [nodes, children] probability to accept a child, given that the earlier ones were rejected
    residual: Tensor  # [nodes, vocab] weights of the next token when every child was rejected


Rule = Callable[[Tensor, Tensor, Tensor, int], NodeLaw]
"""(target_probs [nodes, vocab], draft_probs [nodes, vocab], children [nodes, ranks], proposable) → law.

Children are token ids in rank order, padded with -1.
"""


def recursive_rejection(
    target_probs: Tensor, draft_probs: Tensor, children: Tensor, proposable: int, *, replacement: bool
) -> NodeLaw:
    """Reject one child after another, taking what it stood for out of the target each time.

    The residual before child i is (q − C·p)₊ over the tokens not yet proposed, with q the target's and p the draft's
    distribution; a rejection adds Z/P to C, with Z the residual's sum and P the draft's unproposed mass. So each child
    costs a reduction over the vocabulary, and no residual is stored. Without replacement this is Sequoia's
    verification (Chen et al. 2024, algorithm 2), with it SpecInfer's (Miao et al. 2024, algorithm 2).
    """
    real = children >= 0
    index = torch.where(real, children, children[:, :1]).clamp(min=0)  # padding repeats the first child
    # Only ratios matter below, so neither distribution has to sum to exactly 1.
    child_q, child_p = target_probs.gather(1, index) * real, draft_probs.gather(1, index) * real  # [nodes, ranks]
    q, p = target_probs, draft_probs
    if replacement:
        mass = p.sum(-1, keepdim=True).expand_as(child_p)
    else:  # q and p hold the tokens that are no children; the children not yet rejected are added apart
        q, p = q.scatter(1, index, 0.0), p.scatter(1, index, 0.0)
        mass = p.sum(-1, keepdim=True) + _from_here_on(child_p)
    spent = real & (mass <= 0)
    may_be_spent = spent.device.type != "cpu" or bool(spent.any())

    constant, over, under = torch.zeros_like(q[:, :1]), [], []  # R(child)/D(child) as a fraction
    for rank in range(children.shape[1]):
        if may_be_spent:  # past the draft's support children come uniformly from the tokens not yet proposed
            now = spent[:, rank : rank + 1]
            q = torch.where(now, _residual(q, p, constant), q)
            child_q = torch.where(now, _residual(child_q, child_p, constant), child_q)
            p = torch.where(now, _all_but(index, p, proposable), p)
            child_p = torch.where(now, real.to(p.dtype), child_p)
            mass = torch.where(now, p.sum(-1, keepdim=True) + _from_here_on(child_p), mass)
            constant, spent = constant.masked_fill(now, 0.0), spent & ~now
        ahead = _residual(child_q[:, rank:], child_p[:, rank:], constant)
        weight = _residual(q, p, constant).sum(-1, keepdim=True)
        if not replacement:
            weight = weight + ahead.sum(-1, keepdim=True)
        left = mass[:, rank : rank + 1]
        over.append(ahead[:, :1] * left)
        under.append(child_p[:, rank : rank + 1] * weight)
        constant = torch.addcdiv(constant, weight * real[:, rank : rank + 1], left.clamp(min=1e-300))
    accept = _share(torch.cat(over, dim=1), torch.cat(under, dim=1))
    residual = torch.where(real[:, :1], _residual(q, p, constant), target_probs)
    return NodeLaw(accept * real, _or_else(residual, target_probs))


def k_sequential_selection(target_probs: Tensor, draft_probs: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    """SpecTr's selection among k independent draws (Sun et al. 2023, algorithm 3).

    Every draw is accepted with probability min(1, q/(ρp)). Any ρ with 1 − (1 − β)^k ≤ ρβ, where β = Σ min(p, q/ρ),
    keeps the target's law; the smallest accepts most, and bisection approaches it from above.
    """
    q, p = normalised(target_probs), normalised(draft_probs)
    real = children >= 0
    count = real.sum(-1, keepdim=True).double()
    low, high = torch.ones_like(count), count.clamp(min=1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        overlap = torch.minimum(p, q / middle).sum(-1, keepdim=True)
        enough = _any_of(overlap, count) <= middle * overlap
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    taken = torch.minimum(p, q / high)
    overlap = taken.sum(-1, keepdim=True)
    scale = torch.where(overlap > 0, _any_of(overlap, count) / overlap.clamp(min=1e-300), count)
    index = children.clamp(min=0)
    accept = _share(q.gather(1, index), high * p.gather(1, index)) * real
    return NodeLaw(accept, _or_else((q - scale * taken).clamp_(min=0), q))


def sampler_match(target_probs: Tensor, draft_probs: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    """Draw once from the target and accept the child that equals the draw, written as one test per child.

    Lossless for any children, deterministic ones too, for it never looks at the draft's distribution.
    """
    same = children[:, :, None] == children[:, None, :]
    first = same.int().argmax(-1) == torch.arange(children.shape[1], device=children.device)
    real, index = (children >= 0) & first, torch.where(children >= 0, children, children[:, :1]).clamp(min=0)
    child = target_probs.gather(1, index) * real
    unmatched = torch.where(children[:, :1] >= 0, target_probs.scatter(1, index, 0.0), target_probs)
    accept = _share(child, unmatched.sum(-1, keepdim=True) + _from_here_on(child))
    return NodeLaw(accept * real, _or_else(unmatched, target_probs))


def normalised(weights: Tensor) -> Tensor:
    """To a sum of 1; rows without any weight (a leaf's draft distribution) stay as they are."""
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, torch.ones_like(total))


def _residual(q: Tensor, p: Tensor, constant: Tensor) -> Tensor:
    return torch.addcmul(q, p, constant, value=-1).clamp_(min=0)


def _from_here_on(values: Tensor) -> Tensor:
    """[nodes, ranks] sum over this and all later ranks."""
    return values.flip(1).cumsum(1).flip(1)


def _all_but(index: Tensor, like: Tensor, proposable: int) -> Tensor:
    """[nodes, vocab] 1 at every proposable token that is not in `index`."""
    rest = torch.zeros_like(like)
    rest[:, :proposable] = 1
    return rest.scatter_(1, index, 0.0)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """min(1, part / whole), where nothing of anything is 0 and something of nothing is 1."""
    return torch.where(whole > 0, part / whole, (part > 0).to(part.dtype)).clamp(max=1)


def _any_of(chance: Tensor, count: Tensor) -> Tensor:
    """1 − (1 − chance)^count without cancellation."""
    return -torch.expm1(count * torch.log1p(-chance.clamp(max=1)))


def _or_else(weights: Tensor, otherwise: Tensor) -> Tensor:
    """A residual without mass is reached with probability 0; rounding that gets there falls back on the target."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, otherwise)
