"""DynamicTree: no fixed shape, but the rule to grow one from what a draft says in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer, require_nodes
from sequoia.tree.shape import TreeShape

_WIDTH = 8


@dataclass(frozen=True)
class DynamicTree:
    """The tree of the nodes with the highest draft probability, the product along the path from the root.

    The rule of SpecExec (Svirschevski et al. 2024, arXiv 2406.02532), EAGLE-2 (Li et al. 2024, arXiv 2406.16858) and
    OPT-Tree (Wang et al. 2024, arXiv 2406.17276). Children are chosen, not drawn, so that only `sampler_match`
    verifies them.

    Args:
        size: nodes including the root, at most; nodes without any draft probability are left out.
        depth: edges from the root, at most.
        width: nodes of one level that the draft continues, at most.

    Raises:
        UsageError: a number is out of range.
    """

    size: int
    depth: int
    width: int = _WIDTH

    def __post_init__(self) -> None:
        require_integer("size", self.size, least=1)
        require_integer("depth", self.depth, least=1)
        require_integer("width", self.width, least=1)
        require_nodes("the tree", self.size)

    def limit(self, depth: int) -> DynamicTree:
        """This rule with at most `depth` edges from the root; with none it is a root alone."""
        require_integer("depth", depth, least=0)
        if depth >= self.depth:
            return self
        return DynamicTree(self.size, depth, self.width) if depth else DynamicTree(1, 1)


Tree = TreeShape | DynamicTree
"""What a round's token tree is grown by."""


@dataclass(frozen=True)
class Candidate:
    """A node that may become part of a dynamic tree."""

    score: float  # natural logarithm of the product of draft probabilities along its path
    parent: int  # place of its parent among the expanded nodes, the root being 0
    depth: int
    token: int


class BestFirst:
    """The best candidates so far, grown level by level.

    Expanding every candidate of a level that is among the best so far gives the best tree of all: a descendant's score
    is at most its ancestor's, so what has fallen out never comes back.
    """

    def __init__(self, rule: DynamicTree) -> None:
        self._rule = rule
        self._best: list[Candidate] = []  # best first; of equal scores the shallower and earlier
        self.expanded: list[Candidate] = [Candidate(0.0, -1, 0, -1)]

    @property
    def most_children(self) -> int:
        """Candidates that a level can add at most."""
        return self._rule.size - 1

    def add(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Take in the children of the nodes expanded last; returns the nodes to expand next, none at the end."""
        # Sorting is stable: a parent, taken in earlier, stays before a child of the same score.
        self._best = sorted([*self._best, *candidates], key=lambda node: -node.score)[: self.most_children]
        depth = self.expanded[-1].depth + 1
        if depth >= self._rule.depth:
            return ()
        frontier = [node for node in self._best if node.depth == depth][: self._rule.width]
        self.expanded += frontier
        return frontier

    def shape(self) -> tuple[TreeShape, list[Candidate], dict[int, int]]:
        """The tree numbered level by level, its nodes but the root, and the place of each expanded node of it."""
        place = {id(node): row for row, node in enumerate(self.expanded)}
        number, rows, parents = {0: 0}, {0: 0}, [-1]  # place among the expanded → node; node → place
        nodes = sorted(self._best, key=lambda node: node.depth)
        for index, node in enumerate(nodes, start=1):
            parents.append(number[node.parent])
            if (row := place.get(id(node))) is not None:
                number[row], rows[index] = index, row
        return TreeShape(parents), nodes, rows


def require_one_shape(tree: Tree) -> TreeShape:
    """Raises:
    UsageError: a dynamic tree has none.
    """
    if isinstance(tree, DynamicTree):
        raise UsageError("a dynamic tree has no shape of its own: it is planned anew in each round. Name another.")
    return tree
