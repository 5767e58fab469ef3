"""Verification: decide the accepted path from both models' distributions, keeping the target's law exactly.

A rule turns one node into its law: for each child the probability that it is accepted, given that the ones before it
were rejected, and the distribution of the next token when all were. Rules are pure; the walk tosses the coins. All
rules here are lossless for children drawn as they ask (`Verifier.draws`), which enumeration proves in `selftest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.speculate.sampling import Draws, Generator, invert, uniform
from sequoia.speculate.token_tree import TokenTree


@dataclass(frozen=True)
class NodeLaw:
    """What can happen at a node."""

    accept: Tensor  # [nodes, children] probability to accept a child, given that the earlier ones were rejected
    residual: Tensor  # [nodes, vocab] weights of the next token when every child was rejected


_BATCH = 64  # nodes decided together; bounds the memory of a large tree over a large vocabulary

Rule = Callable[[Tensor, Tensor, Tensor, int], NodeLaw]
"""(target_probs [nodes, vocab], draft_probs [nodes, vocab], children [nodes, ranks], proposable) → law.

Children are token ids in rank order, padded with -1.
"""


@dataclass(frozen=True)
class Decision:
    """What happens at a node."""

    accepted: int | None  # the node to go on to
    next_token: int  # where none is


Quick = Callable[[TokenTree, int, Tensor, Tensor], Decision | None]
"""(tree, inner node, target_probs [1, vocab], coins [1, ranks + 1]) → what happens there; None where only the rule can
say. A coin for each child and one for the next token."""


@dataclass(frozen=True)
class Verifier:
    """A rule, and how children are drawn for it.

    `quick` decides as the rule would, where that takes little: most nodes are left through their first child, and on a
    CPU the rule's whole law takes longer than all else between two passes.
    """

    name: str
    rule: Rule
    draws: Draws
    quick: Quick | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round."""

    path: tuple[int, ...]  # accepted nodes, from the root's child down
    next_token: int  # drawn at the end of the path


class TargetProbs(Protocol):
    def __call__(self, nodes: Sequence[int]) -> Tensor:
        """The target's distributions at `nodes`, [nodes, vocab]."""


def verify(tree: TokenTree, target_probs: TargetProbs, verifier: Verifier, generator: Generator) -> Verdict:
    """Walk down from the root: accept a child or stop, then draw the next token.

    On a GPU all nodes are decided in batches and each batch is read once; on a CPU only the visited nodes are.
    """
    coins = uniform((tree.shape.size, tree.shape.max_children + 1), generator)
    decided: dict[int, Decision] = {}
    if tree.tokens.device.type != "cpu":
        for start in range(0, tree.shape.size, _BATCH):
            nodes = range(start, min(start + _BATCH, tree.shape.size))
            decided |= _decide(tree, nodes, target_probs(nodes), verifier.rule, coins)
    node, path = 0, list[int]()
    while True:
        decision = decided.get(node) or _decide_one(tree, node, target_probs([node]), verifier, coins)
        if decision.accepted is None:
            return Verdict(tuple(path), decision.next_token)
        node = decision.accepted
        path.append(node)


def _decide_one(tree: TokenTree, node: int, weights: Tensor, verifier: Verifier, coins: Tensor) -> Decision:
    """As `_decide`, with as little work as the verifier can."""
    if verifier.quick is not None and tree.shape.children(node):
        decision = verifier.quick(tree, node, weights, coins[[node]])
        if decision is not None:
            return decision
    return _decide(tree, [node], weights, verifier.rule, coins)[node]


def _decide(tree: TokenTree, nodes: Sequence[int], weights: Tensor, rule: Rule, coins: Tensor) -> dict[int, Decision]:
    """What happens at each of `nodes`, should the walk come by. A fresh coin for each child and for the next token.

    Args:
        weights: [nodes, vocab] the target's distributions there.
    """
    children = [tree.shape.children(node) for node in nodes]
    coins = coins[list(nodes)]
    ranks = coins.new_zeros(len(nodes), 1, dtype=torch.long)
    if any(children):
        law = _node_law(tree, nodes, children, weights, rule)
        weights, ranks = law.residual, _first_accepted(law.accept, coins)
    outcomes = torch.cat([ranks, invert(weights, coins[:, -1:])], dim=1).tolist()
    return {
        node: Decision(siblings[rank] if rank < len(siblings) else None, token)
        for node, siblings, (rank, token) in zip(nodes, children, outcomes, strict=True)
    }


def _node_law(
    tree: TokenTree, nodes: Sequence[int], children: Sequence[Sequence[int]], target: Tensor, rule: Rule
) -> NodeLaw:
    """The rule's law; a leaf among inner nodes has no children, so its residual is the target's own distribution."""
    width = max(len(siblings) for siblings in children)
    padded = torch.tensor([[*siblings, *[-1] * (width - len(siblings))] for siblings in children], device=target.device)
    tokens = torch.where(padded < 0, -1, tree.tokens[padded])
    target = target.double()
    if target.device.type == "cpu" and len(tree.support) < target.shape[1]:
        law = _law_on_support(tree, nodes, tokens, target, rule)
        if law is not None:
            return law
    return rule(target, tree.draft_probs(nodes, target.shape[1]), tokens, tree.proposable)


def _law_on_support(
    tree: TokenTree, nodes: Sequence[int], tokens: Tensor, target: Tensor, rule: Rule
) -> NodeLaw | None:
    """The same law over the draft's support alone, whose columns may be few.

    Tokens that the draft gives no probability keep their weight in every rule's residual, so one column stands for all
    of them. That does not hold once children come from outside the support; then there is no such law.
    """
    columns = torch.searchsorted(tree.support, tokens.clamp(min=0)).clamp_(max=len(tree.support) - 1)
    draft = tree.support_draft_probs(nodes)
    inside = (tree.support[columns] == tokens) & (draft.gather(1, columns) > 0)
    if not bool((inside | (tokens < 0)).all()):
        return None
    target = _normalised(target)
    weights = target[:, tree.support]
    others = target.sum(-1, keepdim=True) - weights.sum(-1, keepdim=True)
    law = rule(
        torch.cat([weights, others.clamp_(min=0)], dim=1),
        torch.nn.functional.pad(draft, (0, 1)),
        columns.where(tokens >= 0, -1),
        len(tree.support),
    )
    return NodeLaw(law.accept, target.index_copy(1, tree.support, law.residual[:, :-1]))


def _first_accepted(accept: Tensor, coins: Tensor) -> Tensor:
    """[nodes, 1] rank of the first child whose coin falls below its probability, or the number of children."""
    passed = coins[:, : accept.shape[1]] < accept
    stop = passed.new_ones(len(passed), 1)
    return torch.cat([passed, stop], dim=1).int().argmax(dim=1, keepdim=True)


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
    q, p = _normalised(target_probs), _normalised(draft_probs)
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


def _first_child(tree: TokenTree, node: int, target_probs: Tensor, coins: Tensor) -> Decision | None:
    """Accept the first child by what both models give it, or leave it to the rule, which would do it by the same coin
    at the same probability, up to rounding in the last place."""
    child = tree.shape.children(node)[0]
    token, row = int(tree.tokens[child]), tree.support_probs[tree.row[node]]
    column = int(torch.searchsorted(tree.support, token))
    if column == len(tree.support) or int(tree.support[column]) != token:
        return None
    theirs = float(row[column]) * float(target_probs.sum(dtype=torch.float64))
    ours = float(target_probs[0, token]) * float(row.sum(dtype=torch.float64))
    return Decision(child, -1) if theirs > 0 and float(coins[0, 0]) * theirs < ours else None


def _drawn_once(tree: TokenTree, node: int, target_probs: Tensor, coins: Tensor) -> Decision:
    """`sampler_match` as it is told: draw from the target, and go on to the child that is the draw."""
    token = int(invert(target_probs, coins[:, -1:]))
    children = tree.shape.children(node)
    tokens = tree.tokens[list(children)].tolist()
    return Decision(children[tokens.index(token)] if token in tokens else None, token)


_BISECTIONS = 40

GREEDY = Verifier("sampler_match", sampler_match, Draws.TOP_K, _drawn_once)
"""At temperature 0 every lossless rule accepts the target's one token and no other; this one with the least work."""

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Verifier("sequoia", partial(recursive_rejection, replacement=False), Draws.WITHOUT_REPLACEMENT, _first_child),
        Verifier("specinfer", partial(recursive_rejection, replacement=True), Draws.WITH_REPLACEMENT, _first_child),
        Verifier("spectr", k_sequential_selection, Draws.WITH_REPLACEMENT),
        GREEDY,
    )
}


def verifier_named(name: str) -> Verifier:
    """Raises:
    UsageError: there is no such verifier.
    """
    if name not in VERIFIERS:
        raise UsageError(f"unknown verifier {name!r}. Choose one of: {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]


def _normalised(weights: Tensor) -> Tensor:
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
