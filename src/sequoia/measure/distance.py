"""How far counts lie from the law they should follow, beside how far sampling noise alone would put them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia.measure.reference import Floats

Ints = NDArray[np.int64]

_NULL_DRAWS = 4000  # samples of the exact law that noise and its deviation are taken from
# A correct program fails for fewer than one seed in 1e5, over all of some hundred limits. In 3e5 to 1e6 simulations
# of each law used here, the distance came once in 1e5 to 6.5 standard deviations above its mean for the law with three
# outcomes (near half-normal) and to 4.7 … 6.1 for the others, and each further factor of 10 took 0.6 to 1.2. Means over
# many laws are close to normal, whose tail beyond 6 is 1e-9.
_CASE_DEVIATIONS = 8.0
_MEAN_DEVIATIONS = 6.0


@dataclass(frozen=True)
class Distance:
    """Total variation between counts and a law."""

    samples: int
    tv: float
    noise: float  # mean of the total variation of as many samples of the exact law
    deviation: float  # its standard deviation
    limit: float  # beyond this, chance is no explanation
    impossible: int  # samples of what the law gives probability 0

    @property
    def ok(self) -> bool:
        return self.tv <= self.limit and self.impossible == 0


def distance(law: Floats, counts: Ints, rng: np.random.Generator) -> Distance:
    """Between one law and the counts of its samples, both [vocab] * length."""
    mass, found = law.ravel() / law.sum(), counts.ravel()
    samples = int(found.sum())
    null = rng.multinomial(samples, mass, size=_NULL_DRAWS)
    tvs = np.abs(null - samples * mass).sum(axis=1) / (2 * max(samples, 1))
    return _limited(
        samples,
        float(np.abs(found - samples * mass).sum() / (2 * max(samples, 1))),
        float(tvs.mean()),
        float(tvs.std()),
        int(found[mass == 0].sum()),
        _CASE_DEVIATIONS,
    )


def mean_distance(distances: Iterable[Distance]) -> Distance:
    """Over independent laws, by samples: faults too small to show in one of them add up."""
    entries = list(distances)
    samples = sum(entry.samples for entry in entries)
    shares = [entry.samples / max(samples, 1) for entry in entries]
    return _limited(
        samples,
        sum(share * entry.tv for share, entry in zip(shares, entries, strict=True)),
        sum(share * entry.noise for share, entry in zip(shares, entries, strict=True)),
        math.hypot(*(share * entry.deviation for share, entry in zip(shares, entries, strict=True))),
        sum(entry.impossible for entry in entries),
        _MEAN_DEVIATIONS,
    )


def _limited(samples: int, tv: float, noise: float, deviation: float, impossible: int, deviations: float) -> Distance:
    # The last term is rounding's: a law of one outcome has no noise.
    return Distance(samples, tv, noise, deviation, noise + deviations * deviation + 1e-9, impossible)
