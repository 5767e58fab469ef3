"""One node's walk, every outcome of it: children times coins, integrated and not sampled.

A rule is lossless at a node when the children's probabilities, times what the rule then does with them, add up to
the target's distribution. On a vocabulary of a few tokens that sum can be written out in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor

from sequoia.speculate.rules import Rule
from sequoia.speculate.sampling import Draws
from sequoia.speculate.verify import Verifier

TOLERANCE = 1e-10
_VOCAB_SIZES = (3, 4, 5)
_COUNTS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Node:
    """A node to walk from: both models' distributions there, and how many children are drawn."""

    kind: str
    target_probs: Tensor  # [vocab]
    draft_probs: Tensor  # [vocab], 0 from `proposable` on
    count: int
    proposable: int
    draws: Draws


@dataclass(frozen=True)
class Enumeration:
    """What a verifier's enumerated walks came to."""

    walks: int
    max_error: float
    worst: str  # the kind of node with the largest error

    @property
    def ok(self) -> bool:
        return self.max_error <= TOLERANCE


def enumerate_walks(verifier: Verifier) -> Enumeration:
    """Hold the law of every node of `nodes` against the target's distribution."""
    errors = [(_error(verifier.rule, node), node.kind) for node in nodes(verifier.draws)]
    error, worst = max(errors, key=lambda entry: math.inf if math.isnan(entry[0]) else entry[0])
    return Enumeration(len(errors), error, worst)


def _error(rule: Rule, node: Node) -> float:
    target = node.target_probs.double() / node.target_probs.double().sum()
    return float((walk_law(rule, node) - target).abs().max())


def walk_law(rule: Rule, node: Node) -> Tensor:
    """[vocab] the law of the token that a walk emits at `node`."""
    children, chances = ordered_children(node.draws, node.draft_probs, node.count, node.proposable)
    return chances @ outcome_law(rule, node.target_probs, node.draft_probs, children, node.proposable)


def outcome_law(rule: Rule, target_probs: Tensor, draft_probs: Tensor, children: Tensor, proposable: int) -> Tensor:
    """[tuples, vocab] the law of the emitted token given the children, [tuples, count]."""
    rows = len(children)
    target, draft = target_probs.double().expand(rows, -1), draft_probs.double().expand(rows, -1)
    node_law = rule(target, draft, children, proposable)
    law, left = torch.zeros(rows, target.shape[1], dtype=torch.float64), torch.ones(rows, 1, dtype=torch.float64)
    for rank in range(children.shape[1]):
        accept = node_law.accept[:, rank : rank + 1]
        law.scatter_add_(1, children[:, rank : rank + 1].clamp(min=0), left * accept)
        left = left * (1 - accept)
    return law + left * node_law.residual / node_law.residual.sum(-1, keepdim=True)


def ordered_children(draws: Draws, draft_probs: Tensor, count: int, proposable: int) -> tuple[Tensor, Tensor]:
    """Every ordered tuple of children, [tuples, count], and the probability that `draws` gives it, [tuples]."""
    draft = draft_probs.double() / draft_probs.double().sum()
    if draws is Draws.TOP_K:
        return draft[:proposable].topk(count).indices[None], torch.ones(1, dtype=torch.float64)
    if draws is Draws.WITH_REPLACEMENT:
        tuples = list(product(range(proposable), repeat=count))
        chances = [math.prod(draft[list(tokens)].tolist()) for tokens in tuples]
    else:
        tuples = list(permutations(range(proposable), count))
        chances = [_chance_without_replacement(draft.tolist()[:proposable], tokens) for tokens in tuples]
    return torch.tensor(tuples), torch.tensor(chances, dtype=torch.float64)


def _chance_without_replacement(draft: list[float], tokens: tuple[int, ...]) -> float:
    left, chance = dict(enumerate(draft)), 1.0
    for token in tokens:
        # Past the support the draws go on uniformly over what is left.
        weights = left if any(left.values()) else dict.fromkeys(left, 1.0)
        chance *= weights[token] / math.fsum(weights.values())
        del left[token]
    return chance


def nodes(draws: Draws) -> Iterator[Node]:
    """Nodes that try a rule: ordinary, peaked and one-hot distributions, disjoint and narrow supports, a padded
    vocabulary, and a greedy target with the likeliest children, as the loop has them at temperature 0."""
    for vocab, count, padding in product(_VOCAB_SIZES, _COUNTS, (0, 1)):
        proposable = vocab - padding
        if count > proposable:
            continue
        generator = torch.Generator().manual_seed(100 * vocab + 10 * count + padding)
        for kind, target, draft in _pairs(vocab, generator):
            draft[proposable:] = 0
            if draft.sum() > 0:
                yield Node(kind, target, draft, count, proposable, draws)
        for target in torch.eye(vocab):
            draft = torch.eye(vocab)[int(torch.randint(proposable, (), generator=generator))]
            yield Node("greedy children", target, draft, count, proposable, Draws.TOP_K)


def _pairs(vocab: int, generator: torch.Generator) -> list[tuple[str, Tensor, Tensor]]:
    """(kind, target, draft), in the 32 bits that a softmax gives."""

    def softmax(spread: float) -> Tensor:
        return (spread * torch.randn(vocab, generator=generator)).softmax(-1)

    def only(probs: Tensor, support: Tensor) -> Tensor:
        return probs * support / (probs * support).sum()

    token, lower = torch.arange(vocab), torch.arange(vocab) < vocab // 2 + 1
    return [
        ("random distributions", softmax(1.0), softmax(1.0)),
        ("equal distributions", (same := softmax(1.0)), same.clone()),
        ("a peaked target", softmax(8.0), softmax(1.0)),
        ("a peaked draft", softmax(1.0), softmax(8.0)),
        (
            "a draft sure of an impossible token",
            only(softmax(8.0), token != 0),
            softmax(1.0) * 1e-6 + (token == 0) * (1 - 1e-6),
        ),
        ("disjoint supports", only(softmax(1.0), ~lower), only(softmax(1.0), lower)),
        ("a narrow target", only(softmax(1.0), lower), softmax(1.0)),
        ("a narrow draft", softmax(1.0), only(softmax(1.0), token == 1)),
        ("narrow distributions", only(softmax(1.0), lower), only(softmax(1.0), token < 2)),
        ("a certain target", (token == vocab - 1).float(), softmax(1.0)),
        ("a certain draft", softmax(1.0), (token == 0).float()),
    ]
