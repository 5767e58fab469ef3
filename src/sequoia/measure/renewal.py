"""Rounds simulated along texts: where roots fall, how far rounds come, and how many it takes. Pure NumPy.

Whether a round's walk goes on at a node, given the text, is a matter of that node alone, so the rounds of a request
are a renewal process along its text: from a root at s a round that accepts exactly d tokens puts the next root at
s + d + 1. Summed over all rounds that could be, nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sequoia.tree.shape import TreeShape

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TextRates:
    """Measured along one text, at the node that `depth` text tokens lead to from the root before token `start`.

    Where no round passes, rates are 0.
    """

    rates: NDArray[np.float32]
    """[starts, depths, ranks] probability that a child of this rank is accepted, given the text's next token."""
    marginal: NDArray[np.float32]
    """[starts, depths, ranks] the same before the next token is known."""
    prompt: int = 0
    """Number of the prompt: texts of one prompt are not independent of each other."""


@dataclass(frozen=True)
class Rounds:
    """What rounds of one shape do along all texts, on average over their draws."""

    roots: Floats  # [texts, starts] how often a round starts there
    visits: Floats  # [texts, depths] inner nodes that verification comes to
    accepted: Floats  # [texts, depths, ranks] of these, moved on to a child of this rank

    @property
    def counts(self) -> Floats:
        """[texts] rounds that each text takes."""
        counts: Floats = self.roots.sum(1)
        return counts


class Texts:
    """The rates of many texts side by side, shorter ones padded with zeros."""

    def __init__(self, texts: Sequence[TextRates]) -> None:
        self.lengths = np.array([len(text.rates) for text in texts])
        self.prompts = np.array([text.prompt for text in texts])
        self.given = _packed([text.rates for text in texts])  # [depths, ranks, texts, starts]
        self._marginal = [text.marginal for text in texts]

    @cached_property
    def marginal(self) -> Floats:
        """As `given`, before the next token is known."""
        return _packed(self._marginal)

    @property
    def depths(self) -> int:
        return len(self.given)

    @property
    def ranks(self) -> int:
        return len(self.given[0])

    @cached_property
    def totals(self) -> Floats:
        """[depths, texts, starts] probability that any child is accepted, given the text."""
        totals: Floats = self.given.sum(1)
        return totals

    def exists(self, depth: int) -> NDArray[np.bool_]:
        """[texts, starts] whether the text still goes on `depth` tokens after a start."""
        return np.arange(self.given.shape[3]) + depth < self.lengths[:, None]

    def at(self, depth: int) -> Floats:
        """[ranks, texts, starts] rates at a depth.

        Below the deepest measured, nodes at the same place of the text stand in that come from a later root.
        """
        if depth < self.depths:
            rates: Floats = self.given[depth]
            return rates
        later = depth - self.depths + 1
        shifted: Floats = np.zeros_like(self.given[-1])
        shifted[..., :-later] = self.given[-1][..., later:]
        return shifted

    def roots(self, passed: Sequence[Floats]) -> Floats:
        """[texts, starts] how often a round starts there.

        Args:
            passed: by depth from 1, [texts, starts] probability that a round accepts at least so many tokens.
        """
        at_least = np.stack([np.ones_like(self.given[0, 0]), *passed, np.zeros_like(self.given[0, 0])], axis=2)
        exactly = at_least[:, :, :-1] - at_least[:, :, 1:]  # [texts, starts, tokens accepted]
        texts, starts, reach = exactly.shape
        roots = np.zeros((texts, starts + reach + 1))
        roots[:, 0] = 1.0
        for start in range(starts):
            roots[:, start + 1 : start + 1 + reach] += roots[:, start, None] * exactly[:, start]
        return np.where(self.exists(0), roots[:, :starts], 0.0)

    def rounds(self, shape: TreeShape) -> Rounds:
        """All rounds of one shape."""
        reaches = list(self._reaches(shape))
        passed = [np.sum([edge.reach for edge in edges], axis=0) for edges in reaches]
        roots = self.roots(passed)
        visits = np.zeros((len(self.lengths), max(1, shape.depth)))
        accepted = np.zeros((*visits.shape, max(1, shape.max_children)))
        for depth, edges in enumerate(reaches):
            here = roots * self.exists(depth)
            for edge in edges:
                if edge.rank == 0:
                    visits[:, depth] += (here * edge.parent).sum(1)
                accepted[:, depth, edge.rank] += (here * edge.reach).sum(1)
        return Rounds(roots, visits, accepted)

    def _reaches(self, shape: TreeShape) -> Iterator[list[_Edge]]:
        """The edges of each level, with the probabilities to come to their ends."""
        reach = {0: np.ones_like(self.given[0, 0])}
        for depth, level in enumerate(shape.levels[1:]):
            rates = self.at(depth)
            edges = []
            for node in level:
                above, rank = reach[shape.parents[node]], shape.ranks[node]
                below = above * rates[rank] if rank < self.ranks else np.zeros_like(above)
                edges.append(_Edge(rank, above, below))
                reach[node] = below
            yield edges


@dataclass(frozen=True)
class _Edge:
    rank: int
    parent: Floats  # [texts, starts] probability that a round from there comes to the parent
    reach: Floats  # and to the child


def _packed(rates: Sequence[NDArray[np.float32]]) -> Floats:
    """[depths, ranks, texts, starts]"""
    _, depths, ranks = rates[0].shape
    packed = np.zeros((depths, ranks, len(rates), max(map(len, rates))))
    for index, own in enumerate(rates):
        packed[:, :, index, : len(own)] = own.transpose(1, 2, 0)
    return packed
