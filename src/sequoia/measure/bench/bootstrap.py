"""Statistics with bootstrap intervals, over prompts that may have been run several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
_SEED = 0
_TAILS = (0.025, 0.975)

Floats = NDArray[np.float64]
Statistic = Callable[..., Floats]
"""One or more arrays [samples, prompts, repeats], NaN where nothing was measured, to [samples]."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval over prompts; a single prompt gives none."""

    value: float
    low: float | None = None
    high: float | None = None


def estimate(statistic: Statistic, *grids: Floats) -> Estimate | None:
    """The statistic with its interval; prompts are drawn with all their repeats, the same ones for each grid."""
    measured = ~np.any([np.isnan(grid).all(axis=1) for grid in grids], axis=0)
    kept = [grid[measured] for grid in grids]
    count = int(measured.sum())
    if count == 0:
        return None
    value = float(statistic(*(grid[None] for grid in kept))[0])
    if count == 1:
        return Estimate(value)
    rows = _resampled_rows(count)
    low, high = np.quantile(statistic(*(grid[rows] for grid in kept)), _TAILS)
    return Estimate(value, float(low), float(high))


@lru_cache(maxsize=64)
def _resampled_rows(count: int) -> NDArray[np.intp]:
    """[resamples, count]. Equal for equal counts, so that methods on the same prompts are resampled together."""
    return np.random.default_rng(_SEED).integers(count, size=(RESAMPLES, count), dtype=np.intp)


def median(grid: Floats) -> Floats:
    """Each sample has at least one value. NumPy's nanmedian takes a hundred times as long."""
    ordered = np.sort(grid.reshape(len(grid), -1), axis=1)  # NaN comes last
    counts = (~np.isnan(ordered)).sum(axis=1, keepdims=True)
    middle = np.concatenate([(counts - 1) // 2, counts // 2], axis=1)
    found: Floats = np.take_along_axis(ordered, middle, axis=1).mean(axis=1)
    return found


def ratio_of_medians(above: Floats, below: Floats) -> Floats:
    return median(above) / median(below)


def ratio_of_sums(above: Floats, below: Floats) -> Floats:
    ratio: Floats = np.nansum(above, axis=(1, 2)) / np.nansum(below, axis=(1, 2))
    return ratio
