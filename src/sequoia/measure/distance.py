"""How far counts lie from the law they should follow, beside how far sampling noise alone would put them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia.measure.reference import Floats

Ints = NDArray[np.int64]

_NULL_DRAWS = 4000  # samples of the exact law that noise and limit are taken from
# A correct program passes all of some hundred limits but once in more than 1e5 seeds. In 1e6 simulated samples of each
# of the laws used here the distance came to 6.4 standard deviations above its mean once in 1e5 where three
# outcomes share nearly all mass (near half-normal) and to 5.5 elsewhere, each further factor of 10 costing 0.7 to 1.0.
# Sums over many cases are close to normal, whose tail beyond 6 is 1e-9.
_CASE_DEVIATIONS = 8.0
_POOL_DEVIATIONS = 6.0


@dataclass(frozen=True)
class Distance:
    """Total variation between counts and a law."""

    samples: int
    tv: float
    noise: float  # mean of the total variation of as many samples of the exact law
    limit: float  # beyond this, chance is no explanation
    impossible: int  # samples of what the law gives probability 0

    @property
    def ok(self) -> bool:
        return self.tv <= self.limit and self.impossible == 0


class Tally:
    """Counts of several laws' samples, joined after renaming each token by its rank under the target.

    Renaming makes a fault add up over laws that favour different tokens; a small one shows in the sum long before it
    shows in one law.

    Args:
        cells: outcomes of each law.
    """

    def __init__(self, cells: int) -> None:
        self._counts: Ints = np.zeros(cells, dtype=np.int64)
        self._expected = np.zeros(cells)
        self._null: Ints = np.zeros((_NULL_DRAWS, cells), dtype=np.int64)
        self._impossible = 0

    def add(self, law: Floats, counts: Ints, rng: np.random.Generator) -> Distance:
        """Add one law's counts, both [vocab] * length, and compare them by themselves."""
        order = _by_rank(law)
        mass, found = law.ravel()[order], counts.ravel()[order]
        samples = int(found.sum())
        null = rng.multinomial(samples, mass / mass.sum(), size=_NULL_DRAWS)
        impossible = int(found[mass == 0].sum())
        self._counts += found
        self._expected += samples * mass
        self._null += null
        self._impossible += impossible
        return _distance(found, samples * mass, null, impossible, _CASE_DEVIATIONS)

    def merge(self, other: Tally) -> None:
        """Add everything that `other` holds."""
        self._counts += other._counts
        self._expected += other._expected
        self._null += other._null
        self._impossible += other._impossible

    def distance(self) -> Distance:
        """Of all counts together."""
        return _distance(self._counts, self._expected, self._null, self._impossible, _POOL_DEVIATIONS)


def count_outcomes(samples: Sequence[Sequence[int]], shape: tuple[int, ...]) -> Ints:
    """How often each sequence of tokens came, [vocab] * length."""
    flat = np.ravel_multi_index(tuple(np.array(samples, dtype=np.int64).T), shape)
    return np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape)


def _distance(counts: Ints, expected: Floats, null: Ints, impossible: int, deviations: float) -> Distance:
    samples = max(int(counts.sum()), 1)
    tv = float(np.abs(counts - expected).sum() / (2 * samples))
    nulls = np.abs(null - expected).sum(axis=1) / (2 * samples)
    noise = float(nulls.mean())
    # The last term is rounding's: a law of one outcome has no noise.
    return Distance(int(counts.sum()), tv, noise, noise + deviations * float(nulls.std()) + 1e-9, impossible)


def _by_rank(law: Floats) -> Ints:
    """Flat indices of the outcomes, ordered by the first token's rank, then by the second's after it, and so on."""
    order: Ints = np.arange(law.size).reshape(law.shape)
    for axis in range(law.ndim):
        mass = law.sum(axis=tuple(range(axis + 1, law.ndim)), keepdims=True)
        ranks = np.argsort(-mass, axis=axis, kind="stable")
        law, order = np.take_along_axis(law, ranks, axis), np.take_along_axis(order, ranks, axis)
    return order.ravel()
