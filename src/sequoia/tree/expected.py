"""What a shape is worth under a profile: rates on edges, scores of nodes, tokens per round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sequoia.tree.profile import AcceptanceProfile

if TYPE_CHECKING:
    from sequoia.tree.shape import TreeShape


def edge_rates(shape: TreeShape, profile: AcceptanceProfile) -> NDArray[np.float64]:
    """Rate [size] of the edge above each node; 1 for the root, 0 for ranks that the profile does not have."""
    padded = np.pad(profile.table, ((0, 0), (0, 1)))
    rows = np.minimum(np.maximum(np.array(shape.depths) - 1, 0), len(padded) - 1)
    rates: NDArray[np.float64] = padded[rows, np.minimum(shape.ranks, profile.ranks)]
    rates[0] = 1.0
    return rates


def scores(shape: TreeShape, profile: AcceptanceProfile) -> NDArray[np.float64]:
    """Score f [size] of each node: the product of the rates on its path, 1 for the root.

    It is the probability that the node is accepted (Sequoia, arXiv 2402.12374, section 3.1).
    """
    values = edge_rates(shape, profile).tolist()
    for node, parent in enumerate(shape.parents[1:], start=1):
        values[node] *= values[parent]
    return np.array(values)


def expected_tokens(shape: TreeShape, profile: AcceptanceProfile) -> float:
    """Expected tokens per round, the residual or bonus token included: the sum of the scores.

    F(T) of Sequoia (arXiv 2402.12374, proposition 3.4).
    """
    return float(scores(shape, profile).sum())
