"""How a token tree is grown level by level from a draft's logits, in a given shape or best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.model.language_model import Block
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Candidates, Draws, Generator, draw_children
from sequoia.speculate.token_tree import TokenTree, TreeLayout, layout_of
from sequoia.tree.dynamic import BestFirst, Candidate, DynamicTree, Tree
from sequoia.tree.shape import TreeShape


@dataclass(frozen=True)
class Frontier:
    """The nodes of one depth that a draft is asked to continue."""

    depth: int
    tokens: Tensor  # [nodes]
    paths: Callable[[], list[list[int]]]  # for each node the tokens from the root's child down, its own included
    block: Callable[[int], Block]  # root's position → the nodes as new rows of a draft that holds all earlier ones
    parents: Tensor  # [nodes] places of their parents in the frontier before; empty for the root


LevelLogits = Callable[[Frontier], Tensor]
"""A draft's logits, [nodes, candidates], at the nodes of a frontier."""


@dataclass(frozen=True)
class Growth:
    """How this round's tree is to be grown; a draft only supplies the logits."""

    tree: Tree
    processors: Processors
    draws: Draws
    proposable: int  # token ids from here on are never proposed
    generator: Generator
    device: torch.device

    def run(self, root: int, support: Tensor, level_logits: LevelLogits) -> TokenTree:
        """Grow level by level, one call of `level_logits` for each.

        Args:
            root: the last emitted token.
            support: [candidates] increasing token ids below `proposable`; all others have no draft probability.
            level_logits: see `LevelLogits`.
        """
        if isinstance(self.tree, DynamicTree):
            return self._best_first(BestFirst(self.tree), root, support, level_logits)
        return self._shaped(layout_of(self.tree, self.device), root, support, level_logits)

    def nothing(self, root: int) -> TokenTree:
        """A tree that proposes nothing, for a draft that cannot yet."""
        return TokenTree.root_only(layout_of(TreeShape.root_only(), self.device), root)

    def _shaped(self, layout: TreeLayout, root: int, support: Tensor, level_logits: LevelLogits) -> TokenTree:
        """Draw each node's children, as many as the shape has."""
        tokens = torch.full((layout.shape.size,), root, dtype=torch.long, device=self.device)
        levels = []
        for depth, level in enumerate(layout.levels):
            frontier = Frontier(
                depth,
                tokens[list(level.nodes)],
                partial(layout.paths, level.nodes, tokens),
                partial(layout.level_block, depth),
                level.parents,
            )
            scores = self._scores(frontier, support, level_logits)
            probs = self.processors.probs(scores)
            candidates = Candidates(support, scores, probs, self.proposable)
            tokens[level.children] = draw_children(self.draws, candidates, level.counts, self.generator)[level.sources]
            levels.append(probs)
        return TokenTree(layout, tokens, support, torch.cat(levels), layout.row, self.proposable)

    def _best_first(self, best: BestFirst, root: int, support: Tensor, level_logits: LevelLogits) -> TokenTree:
        """Choose the nodes with the highest product of draft probabilities."""
        levels, frontier = [], best.expanded[:]
        while frontier:
            scores = self._scores(_frontier(best.expanded, len(frontier), root, self.device), support, level_logits)
            levels.append(self.processors.probs(scores))
            # At temperature 0 the distribution is one token, and how sure the draft is of it only the scores tell.
            weights = scores.softmax(-1) if self.processors.params.temperature == 0 else levels[-1]
            frontier = list(best.add(_children(best, frontier, weights, support)))
        shape, nodes, rows = best.shape()
        tokens = torch.tensor([root, *(node.token for node in nodes)], device=self.device)
        return TokenTree(TreeLayout(shape, self.device), tokens, support, torch.cat(levels), rows, self.proposable)

    def _scores(self, frontier: Frontier, support: Tensor, level_logits: LevelLogits) -> Tensor:
        """[nodes, candidates] processed logits."""
        logits = level_logits(frontier)
        paths = frontier.paths() if self.processors.read_paths else []
        return self.processors.scores(logits, paths, support, model="draft")


def require_fit(tree: Tree, draws: Draws) -> None:
    """Raises:
    UsageError: the verifier needs children drawn in a way that a dynamic tree's are not.
    """
    if isinstance(tree, DynamicTree) and draws is not Draws.TOP_K:
        raise UsageError(
            f"a dynamic tree's children are chosen, and this verifier needs them drawn {draws.value}. "
            "Use sampler_match, which is exact for any children."
        )


def _children(best: BestFirst, frontier: Sequence[Candidate], weights: Tensor, support: Tensor) -> list[Candidate]:
    """The likeliest children of the nodes expanded last, best first.

    Args:
        weights: [nodes, candidates] draft distributions.
    """
    start, depth, width = len(best.expanded) - len(frontier), frontier[0].depth + 1, weights.shape[1]
    above = torch.tensor([[node.score] for node in frontier], dtype=torch.float64, device=weights.device)
    scores = (above + weights.double().log().clamp_(max=0.0)).flatten()
    top = scores.topk(min(best.most_children, len(scores)))
    places = torch.stack([top.indices // width, support[top.indices % width]]).tolist()
    return [
        Candidate(score, start + row, depth, token)
        for score, row, token in zip(top.values.tolist(), *places, strict=True)
        if score > -torch.inf
    ]


def _frontier(expanded: Sequence[Candidate], count: int, root: int, device: torch.device) -> Frontier:
    """The last `count` expanded nodes."""
    start = len(expanded) - count
    lines = [_line(expanded, row) for row in range(start, len(expanded))]

    def block(position: int) -> Block:
        visible = torch.zeros(count, len(expanded), dtype=torch.bool)
        for row, line in enumerate(lines):
            visible[row, [0, *line]] = True
        depths = torch.tensor([node.depth for node in expanded])
        return Block((position + depths).to(device), visible.to(device))

    tokens = [node.token if node.depth else root for node in expanded[start:]]
    before = next((row for row, node in enumerate(expanded) if node.depth == expanded[-1].depth - 1), None)
    parents = [] if before is None else [node.parent - before for node in expanded[start:]]
    return Frontier(
        expanded[-1].depth,
        torch.tensor(tokens, device=device),
        lambda: [[expanded[row].token for row in line] for line in lines],
        block,
        torch.tensor(parents, dtype=torch.long, device=device),
    )


def _line(expanded: Sequence[Candidate], row: int) -> list[int]:
    """Places of a node and its ancestors but the root, from above."""
    line: list[int] = []
    while row > 0:
        line.append(row)
        row = expanded[row].parent
    return line[::-1]
