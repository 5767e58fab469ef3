"""What was measured along texts, and what follows from it: profiles, tokens per round of any shape, the power law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sequoia.measure.renewal import Floats, TextRates, Texts
from sequoia.tree.checks import full_tree_size
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

_ASSUMED_SIZE = 16  # of the tree whose rounds say where roots fall, until a shape is known
_ASSUMPTIONS = 2  # times that it is planned anew from the profile that follows
_LEAST_VISITS = 1e-9


class PowerLaw(NamedTuple):
    """r_k ≈ c · k^(−exponent), as Sequoia supposes of rejection (Chen et al. 2024, theorem 3.6)."""

    exponent: float
    fit: float  # r² of the line through log r_k over log k


class Tokens(NamedTuple):
    """Tokens per round with one standard error."""

    mean: float
    error: float


@dataclass(frozen=True)
class Samples:
    """Rates along texts of the target.

    Standard errors are those of another choice of prompts: all texts of a prompt are left out together.
    """

    texts: tuple[TextRates, ...]
    provenance: Mapping[str, Any]

    def tokens_per_round(self, shape: TreeShape) -> Tokens:
        """Tokens emitted per round when requests as long as the texts are answered with this shape.

        Each text is walked by all rounds that it could be made in, with their probabilities. Where a text ends the last
        round ends too, so that short requests have fewer tokens per round than long ones.
        """
        return Tokens(*_ratio(self._packed.lengths, self._packed.rounds(shape).counts, self._packed.prompts))

    def profile(self, shape: TreeShape | None = None) -> AcceptanceProfile:
        """Rates by depth and rank, each node weighted by how often rounds come to it.

        Args:
            shape: whose rounds say where roots fall; by default the best of 16 nodes for the profile itself.
        """
        above, below = self._sums(self._roots(shape))
        rates = _rows(above.sum(0), below.sum(0))
        errors = np.minimum(self._errors(above, below)[: len(rates)], 1.0)
        facts = {"errors": errors.tolist(), "visits": below.sum(0)[: len(rates)].round(1).tolist()}
        return AcceptanceProfile(rates.tolist(), {**self.provenance, **facts})

    def errors(self, shape: TreeShape | None = None) -> Floats:
        """[depths, ranks] one standard error of each rate of `profile(shape)`."""
        return np.array(self.profile(shape).provenance["errors"])

    def counts(self, shape: TreeShape) -> tuple[Floats, Floats]:
        """What `Stats` would count, per round: visits [depths] and accepted [depths, ranks]."""
        rounds = self._packed.rounds(shape)
        total = rounds.counts.sum()
        return rounds.visits.sum(0) / total, rounds.accepted.sum(0) / total

    @property
    def rejection_curve(self) -> Floats:
        """[ranks] r_k, the probability that the first k children of a root are all rejected, from k = 1."""
        curve: Floats = 1 - np.cumsum(self.profile().row(0))
        return curve.clip(min=0)

    @property
    def power_law(self) -> PowerLaw:
        """Fitted to the rejection curve, as far as it is above 0."""
        return fitted_power_law(self.rejection_curve)

    @cached_property
    def _packed(self) -> Texts:
        return Texts(self.texts)

    def _roots(self, shape: TreeShape | None) -> Floats:
        """[texts, starts] how often a round starts there."""
        texts = self._packed
        if shape is not None:
            return texts.rounds(shape).roots
        roots = texts.exists(0).astype(np.float64)
        for _ in range(_ASSUMPTIONS):
            above, below = self._sums(roots)
            profile = AcceptanceProfile(_rows(above.sum(0), below.sum(0)).tolist())
            size = min(_ASSUMED_SIZE, full_tree_size(profile.ranks, texts.depths, _ASSUMED_SIZE))
            roots = texts.rounds(optimal_shape(profile, size, texts.depths)).roots
        return roots

    def _sums(self, roots: Floats) -> tuple[Floats, Floats]:
        """By text and depth: weighted rates [texts, depths, ranks], and the weights [texts, depths] alone.

        A node weighs what the rounds are that start at its root and accept any child of all nodes on the way.
        """
        texts, weight = self._packed, roots
        above = np.zeros((len(self.texts), texts.depths, texts.ranks))
        below = np.zeros((len(self.texts), texts.depths))
        for depth in range(texts.depths):
            weight = weight * texts.exists(depth)
            above[:, depth] = np.einsum("rts,ts->tr", texts.marginal[depth], weight)
            below[:, depth] = weight.sum(1)
            weight = weight * texts.totals[depth]
        return above, below

    def _errors(self, above: Floats, below: Floats) -> Floats:
        return np.array(
            [
                [
                    _ratio(above[:, depth, rank], below[:, depth], self._packed.prompts)[1]
                    for rank in range(above.shape[2])
                ]
                for depth in range(above.shape[1])
            ]
        )


def fitted_power_law(curve: Sequence[float] | Floats) -> PowerLaw:
    """Least squares on logarithms; NaN where fewer than two values are above 0."""
    values = np.asarray(curve, dtype=np.float64)
    known = np.flatnonzero(values > 0)
    if len(known) < 2:
        return PowerLaw(float("nan"), float("nan"))
    x, y = np.log(known + 1.0), np.log(values[known])
    slope, start = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    missed = float(((y - start - slope * x) ** 2).sum())
    return PowerLaw(-float(slope), 1 - missed / spread if spread > 0 else float("nan"))


def _rows(above: Floats, below: Floats) -> Floats:
    """[depths, ranks] rates of the depths that rounds come to."""
    depths = max(1, int((np.cumprod(below > _LEAST_VISITS)).sum()))
    rates: Floats = (above[:depths] / np.maximum(below[:depths, None], _LEAST_VISITS)).clip(0, 1)
    rates /= np.maximum(1, rates.sum(1, keepdims=True))  # 32-bit rates may add up to a last bit more
    return rates


def _ratio(above: NDArray[Any], below: NDArray[Any], groups: NDArray[Any]) -> tuple[float, float]:
    """Σ above / Σ below with its standard error by jackknife over groups, or over members where there is one group."""
    _, index = np.unique(groups, return_inverse=True)
    if index.max(initial=0) == 0:
        index = np.arange(len(groups))
    top, bottom = np.bincount(index, above), np.bincount(index, below)
    count, total = len(top), bottom.sum()
    if total <= _LEAST_VISITS:
        return 0.0, 0.0
    mean = float(top.sum() / total)
    rest = total - bottom
    if count == 1 or rest.min() <= _LEAST_VISITS:
        return mean, float("inf")
    without = (top.sum() - top) / rest
    return mean, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
