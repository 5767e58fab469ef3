"""A tree shape with a token per node, and what it means in tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sequoia.model.language_model import Block
from sequoia.tree.shape import TreeShape


@dataclass(frozen=True)
class Level:
    """The inner nodes of one depth, and where their children go."""

    nodes: tuple[int, ...]
    counts: tuple[int, ...]  # children of each node
    children: Tensor  # [children] nodes, siblings together and in rank order
    sources: tuple[Tensor, Tensor]  # [children] each: which of `nodes` is the parent, and the child's rank
    parents: Tensor  # [nodes] which of the level before is the parent of each of `nodes`; empty for the root


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
        levels = shape.levels[:-1]
        self.levels = tuple(map(self._level, levels, [(), *levels]))
        self.inner = tuple(node for level in self.levels for node in level.nodes)
        self.row = {node: row for row, node in enumerate(self.inner)}
        inner = torch.tensor(self.inner, dtype=torch.long, device=device)
        self._inner_depths = self.depths[inner]
        self._inner_ancestors = self.ancestors[inner][:, inner]

    def _level(self, nodes: Sequence[int], above: Sequence[int]) -> Level:
        inner = self._inner(nodes)
        siblings = [self.shape.children(node) for node in inner]
        places = [(row, rank) for row, group in enumerate(siblings) for rank in range(len(group))]
        rows, ranks = torch.tensor(places, device=self.device).unbind(1)
        children = torch.tensor([child for group in siblings for child in group], device=self.device)
        place = {node: row for row, node in enumerate(self._inner(above))}
        parents = [place[self.shape.parents[node]] for node in inner] if above else []
        parent_rows = torch.tensor(parents, dtype=torch.long, device=self.device)
        return Level(inner, tuple(len(group) for group in siblings), children, (rows, ranks), parent_rows)

    def _inner(self, nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(node for node in nodes if self.shape.children(node))

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
        start = sum(len(level.nodes) for level in self.levels[:depth])
        end = start + len(self.levels[depth].nodes)
        return Block(position + self._inner_depths[:end], self._inner_ancestors[start:end, :end])

    def paths(self, nodes: Sequence[int], tokens: Tensor) -> list[list[int]]:
        """For each node the tokens on its path from the root's child down, itself included."""
        values = tokens.tolist()
        return [[values[ancestor] for ancestor in self.shape.paths[node]] for node in nodes]


@lru_cache(maxsize=64)
def layout_of(shape: TreeShape, device: torch.device) -> TreeLayout:
    return TreeLayout(shape, device)


@dataclass(frozen=True)
class TokenTree:
    """What a draft proposes: tokens, and the distributions that the children were drawn from."""

    layout: TreeLayout
    tokens: Tensor  # [size] token ids; the root's first
    support: Tensor  # [candidates] token ids, increasing: the only ones that the draft gives any probability
    support_probs: Tensor  # [rows, candidates]
    row: Mapping[int, int]  # of each node that the draft was asked to continue: in `support_probs` and in its cache
    proposable: int  # ids from here on are never proposed

    @classmethod
    def root_only(cls, layout: TreeLayout, root: int) -> TokenTree:
        """A tree that proposes nothing: the round decodes one token."""
        nothing = layout.depths[:0]
        probs = torch.zeros(0, 0, device=layout.device)
        return cls(layout, torch.tensor([root], device=layout.device), nothing, probs, {}, proposable=0)

    @property
    def shape(self) -> TreeShape:
        return self.layout.shape

    def draft_probs(self, nodes: Sequence[int], vocab_size: int) -> Tensor:
        """[nodes, vocab] distributions of the children of inner nodes, in 64 bit; zeros at leaves."""
        probs = self.support_draft_probs(nodes)
        if len(self.support) == vocab_size:
            return probs
        return probs.new_zeros(len(nodes), vocab_size).index_copy_(1, self.support, probs)

    def support_draft_probs(self, nodes: Sequence[int]) -> Tensor:
        """[nodes, candidates] the same over the support alone."""
        rows = [self.row.get(node, -1) for node in nodes]
        leaves = torch.tensor([[not self.shape.children(node)] for node in nodes], device=self.support_probs.device)
        return self.support_probs[rows].double().masked_fill_(leaves, 0.0)
