"""AdaptiveProfile: an acceptance profile that follows what rounds accept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer
from sequoia.tree.expected import scores
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

FloatArray = NDArray[np.float64]


class AdaptiveProfile:
    """A prior profile and decaying counts of what was accepted since.

    For each depth and rank it keeps the share of trials that were accepted, a trial being a child that is offered and
    whose elder siblings were rejected. Rates follow from these shares, row by row, and so never sum to more than 1. A
    rank that is never offered keeps the prior's share: its rate scales with what the earlier ranks leave.

    Counts deeper than the prior has rows go to its last row, and ranks that it does not have are not counted.

    Args:
        prior: what to start from.
        prior_trials: how many trials the prior is worth, at each depth and rank.
        half_life: rounds after which a count weighs half.

    Raises:
        UsageError: a number is not above 0.
    """

    def __init__(self, prior: AcceptanceProfile, *, prior_trials: float = 64.0, half_life: float = 1000.0) -> None:
        for name, value in (("prior_trials", prior_trials), ("half_life", half_life)):
            if not 0 < value < np.inf:
                raise UsageError(f"{name} must be a number above 0, not {value!r}.")
        self._prior, self._prior_trials, self._half_life = prior, prior_trials, half_life
        self._prior_shares = _shares(prior.table)
        self._trials = np.zeros_like(prior.table)  # [rows, ranks]
        self._accepted = np.zeros_like(prior.table)
        self._rounds = 0.0

    def observe(self, shape: TreeShape, path: Sequence[int]) -> None:
        """Take in one round exactly: the tree's shape, and its accepted nodes from the root's child down."""
        self._decay(1)
        for node, child in zip((0, *path), (*path, None), strict=True):
            offered = min(len(shape.children(node)), self._prior.ranks)
            rank = shape.ranks[child] if child is not None else offered
            row = self._row(shape.depths[node])
            self._trials[row, : min(rank + 1, offered)] += 1
            if rank < offered:
                self._accepted[row, rank] += 1

    def add(self, visits: Sequence[int], accepted: Sequence[Sequence[int]], shape: TreeShape | None = None) -> None:
        """Take in the counts of some rounds: inner nodes visited by depth, and of these accepted by depth and rank.

        Args:
            shape: the tree of these rounds. Not all nodes of one depth have equally many children, and with the shape
                it is reckoned how many visits offered a rank. Without, all are taken to have offered the ranks of
                `accepted`, so that rates of later ranks come out low.

        Raises:
            UsageError: lists of different length, a negative count, more accepted than visited, or a depth that the
                shape does not have.
        """
        if shape is not None and len(visits) > shape.depth:
            raise UsageError(
                f"visits has {len(visits)} depths, but no node deeper than {shape.depth - 1} has children."
            )
        if len(visits) != len(accepted):
            raise UsageError(f"visits has {len(visits)} depths but accepted has {len(accepted)}. Give both for each.")
        rows = [_checked(depth, *counts) for depth, counts in enumerate(zip(visits, accepted, strict=True))]
        self._decay(visits[0] if len(visits) else 0)
        offering = [] if shape is None else self._offering(shape)
        for depth, counts in enumerate(rows):
            taken = self._padded(counts)
            offered = self._padded([1.0] * len(counts)) if shape is None else offering[depth]
            reached = (visits[depth] - np.cumsum(taken) + taken) * offered
            self._trials[self._row(depth)] += np.maximum(reached, taken)
            self._accepted[self._row(depth)] += taken

    @property
    def profile(self) -> AcceptanceProfile:
        """The rates as they stand now."""
        shares = (self._prior_trials * self._prior_shares + self._accepted) / (self._prior_trials + self._trials)
        left = np.cumprod(1 - shares, axis=1)
        rates = shares * np.concatenate([np.ones((len(shares), 1)), left[:, :-1]], axis=1)
        return AcceptanceProfile(
            rates, {"adapted_from": dict(self._prior.provenance), "rounds": round(self._rounds, 1)}
        )

    def _offering(self, shape: TreeShape) -> list[FloatArray]:
        """By depth, for each rank [ranks] the share of visits to inner nodes that have a child of that rank."""
        weights, shares = scores(shape, self.profile), []
        for level in shape.levels[:-1]:
            children = np.array([len(shape.children(node)) for node in level])
            visited = np.maximum(weights[list(level)], 1e-12) * (children > 0)
            has = children[:, None] > np.arange(self._prior.ranks)
            shares.append(visited @ has / visited.sum())
        return shares

    def _padded(self, values: Sequence[float]) -> FloatArray:
        """By rank [ranks]."""
        known = values[: self._prior.ranks]
        return np.pad(np.array(known, dtype=np.float64), (0, self._prior.ranks - len(known)))

    def _row(self, depth: int) -> int:
        return min(depth, len(self._trials) - 1)

    def _decay(self, rounds: int) -> None:
        keep = 0.5 ** (rounds / self._half_life)
        self._trials *= keep
        self._accepted *= keep
        self._rounds = self._rounds * keep + rounds


def _shares(rates: FloatArray) -> FloatArray:
    """[rows, ranks] of each rate the share in what the earlier ranks leave; 0 where they leave nothing."""
    left = 1 - np.cumsum(rates, axis=1) + rates
    return np.clip(np.divide(rates, left, out=np.zeros_like(rates), where=left > 1e-12), 0.0, 1.0)


def _checked(depth: int, visits: int, accepted: Sequence[int]) -> list[int]:
    total = require_integer(f"visits[{depth}]", visits, least=0)
    counts = [require_integer(f"accepted[{depth}][{rank}]", count, least=0) for rank, count in enumerate(accepted)]
    if sum(counts) > total:
        raise UsageError(f"accepted[{depth}] sums to {sum(counts)}, more than its {total} visits.")
    return counts
