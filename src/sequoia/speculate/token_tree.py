"""A tree shape with a token per node, and how it is grown level by level from a draft's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sequoia.model.language_model import Block
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Candidates, Draws, draw_children
from sequoia.tree.shape import TreeShape


class TreeLayout:
    """What a shape means in tensors, computed once and used every round.

    Inner nodes (those with children) are numbered in level order; that number is their row in `draft_probs` and,
    counted from the root's slot, their slot in a draft's cache.
    """

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.depths = torch.tensor(shape.depths, device=device)  # [size]
        self.ancestors = torch.from_numpy(shape.ancestors.copy()).to(device)  # [size, size] bool, self included
        self.levels = tuple(tuple(node for node in level if shape.children(node)) for level in shape.levels[:-1])
        self.inner = tuple(node for level in self.levels for node in level)
        self.row = {node: row for row, node in enumerate(self.inner)}
        inner = torch.tensor(self.inner, dtype=torch.long, device=device)
        self._inner_depths = self.depths[inner]
        self._inner_ancestors = self.ancestors[inner][:, inner]

    def block(self, position: int, pending: int = 0) -> Block:
        """The rows of the target's pass: `pending` tokens that lead up to the root at `position`, then all nodes."""
        if pending == 0:
            return Block(position + self.depths, self.ancestors)
        lead = Block.linear(position - pending, pending, self.device)
        visible = torch.ones(pending + self.shape.size, pending + self.shape.size, dtype=torch.bool, device=self.device)
        visible[:pending] = False
        visible[:pending, :pending] = lead.visible
        visible[pending:, pending:] = self.ancestors
        return Block(torch.cat([lead.positions, position + self.depths]), visible)

    def level_block(self, depth: int, position: int) -> Block:
        """The inner nodes at `depth` as new rows of a draft that holds all inner nodes above them."""
        start = sum(len(level) for level in self.levels[:depth])
        end = start + len(self.levels[depth])
        return Block(position + self._inner_depths[:end], self._inner_ancestors[start:end, :end])


@lru_cache(maxsize=64)
def layout_of(shape: TreeShape, device: torch.device) -> TreeLayout:
    return TreeLayout(shape, device)


@dataclass(frozen=True)
class TokenTree:
    """What a draft proposes: tokens, and the distributions that the children were drawn from."""

    layout: TreeLayout
    tokens: Tensor  # [size] token ids; the root's first
    support: Tensor  # [candidates] token ids, increasing: the only ones that the draft gives any probability
    support_probs: Tensor  # [inner nodes, candidates]
    proposable: int  # ids from here on are never proposed

    @classmethod
    def root_only(cls, layout: TreeLayout, root: int) -> TokenTree:
        """A tree that proposes nothing: the round decodes one token."""
        nothing = layout.depths[:0]
        return cls(layout, torch.tensor([root], device=layout.device), nothing, nothing[:, None], proposable=0)

    @property
    def shape(self) -> TreeShape:
        return self.layout.shape

    def draft_probs(self, nodes: Sequence[int], vocab_size: int) -> Tensor:
        """[nodes, vocab] distributions of the children of inner nodes, in 64 bit; zeros at leaves."""
        rows = [self.layout.row.get(node, -1) for node in nodes]
        probs = self.support_probs[rows] if self.layout.inner else self.support_probs.new_zeros(len(rows), 0)
        probs = probs.double()
        probs[[row < 0 for row in rows]] = 0.0
        if len(self.support) == vocab_size:
            return probs
        return probs.new_zeros(len(rows), vocab_size).index_copy_(1, self.support, probs)


@dataclass(frozen=True)
class Growth:
    """How this round's tree is to be grown; a draft only supplies the logits."""

    layout: TreeLayout
    processors: Processors
    draws: Draws
    proposable: int
    generator: torch.Generator

    def run(self, root: int, support: Tensor, level_logits: Callable[[int, Tensor], Tensor]) -> TokenTree:
        """Draw the children level by level.

        Args:
            root: the last emitted token.
            support: [candidates] increasing token ids below `proposable`; all others have no draft probability.
            level_logits: (depth, tokens [size]) → [nodes, candidates] logits at `layout.levels[depth]`.
        """
        tokens = torch.full((self.layout.shape.size,), root, dtype=torch.long, device=self.layout.device)
        levels = []
        for depth, nodes in enumerate(self.layout.levels):
            paths = self._paths(nodes, tokens)
            scores = self.processors.scores(level_logits(depth, tokens), paths, support, model="draft")
            probs = self.processors.probs(scores)
            self._place_children(nodes, tokens, Candidates(support, scores, probs, self.proposable))
            levels.append(probs)
        return TokenTree(self.layout, tokens, support, torch.cat(levels), self.proposable)

    def _paths(self, nodes: tuple[int, ...], tokens: Tensor) -> list[list[int]]:
        values = tokens.tolist() if self.processors.read_paths else [0] * len(tokens)
        return [[values[node] for node in self.layout.shape.paths[inner]] for inner in nodes]

    def _place_children(self, nodes: tuple[int, ...], tokens: Tensor, candidates: Candidates) -> None:
        children = [self.layout.shape.children(node) for node in nodes]
        drawn = draw_children(self.draws, candidates, [len(siblings) for siblings in children], self.generator)
        rows = [row for row, siblings in enumerate(children) for _ in siblings]
        ranks = [rank for siblings in children for rank in range(len(siblings))]
        tokens[[child for siblings in children for child in siblings]] = drawn[rows, ranks]
