"""Verification: decide the accepted path from both models' distributions, keeping the target's law exactly.

A rule turns one node into its law (`sequoia.speculate.rules`); the walk tosses the coins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.speculate.rules import (
    NodeLaw,
    Rule,
    k_sequential_selection,
    normalised,
    recursive_rejection,
    sampler_match,
)
from sequoia.speculate.sampling import Draws, Generator, invert, uniform
from sequoia.speculate.token_tree import TokenTree

_BATCH = 64  # nodes decided together; bounds the memory of a large tree over a large vocabulary


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

    `quick` decides as the rule would, without the whole law, which on a CPU takes longer than all else between passes.
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
    target = normalised(target)
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


def _in_turn(tree: TokenTree, node: int, target_probs: Tensor, coins: Tensor, *, replacement: bool) -> Decision | None:
    """`recursive_rejection` as it is told: one child after another, and nothing for those past the accepted one.

    None where a child comes from outside the draft's support, or nothing is left to draw from.
    """
    children, target = tree.shape.children(node), target_probs[0]
    tokens = tree.tokens[list(children)]
    columns = torch.searchsorted(tree.support, tokens).clamp_(max=len(tree.support) - 1)
    if not torch.equal(tree.support[columns], tokens):
        return None
    q, p = target[tree.support].double(), tree.support_probs[tree.row[node]].to(torch.float64, copy=True)
    others = max(float(target.sum(dtype=torch.float64)) - float(q.sum()), 0.0)  # the target's, outside the support
    residual, constant = q, 0.0
    for child, column, coin in zip(children, columns.tolist(), coins[0].tolist(), strict=False):
        theirs, mass, weight = float(p[column]), float(p.sum()), float(residual.sum()) + others
        if theirs <= 0:
            return None
        if coin * theirs * weight < float(residual[column]) * mass:
            return Decision(child, -1)
        constant += weight / mass
        if not replacement:
            q[column] = p[column] = 0.0
        residual = torch.sub(q, p, alpha=constant).clamp_(min=0)
    if float(residual.sum()) + others <= 0:
        return None
    weights = target.double().index_copy(0, tree.support, residual)
    return Decision(None, int(invert(weights[None], coins[:, -1:])))


def _drawn_once(tree: TokenTree, node: int, target_probs: Tensor, coins: Tensor) -> Decision:
    """`sampler_match` as it is told: draw from the target, and go on to the child that is the draw."""
    token = int(invert(target_probs, coins[:, -1:]))
    children = tree.shape.children(node)
    tokens = tree.tokens[list(children)].tolist()
    return Decision(children[tokens.index(token)] if token in tokens else None, token)


GREEDY = Verifier("sampler_match", sampler_match, Draws.TOP_K, _drawn_once)
"""At temperature 0 every lossless rule accepts the target's one token and no other; this one with the least work."""


def _recursive(name: str, draws: Draws) -> Verifier:
    again = draws is Draws.WITH_REPLACEMENT
    rule, quick = partial(recursive_rejection, replacement=again), partial(_in_turn, replacement=again)
    return Verifier(name, rule, draws, quick)


VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        _recursive("sequoia", Draws.WITHOUT_REPLACEMENT),
        _recursive("specinfer", Draws.WITH_REPLACEMENT),
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
