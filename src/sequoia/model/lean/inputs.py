"""What a pass takes from tables: the tokens' rows, and the angles by which positions turn queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with the sign of each half: [1, rows, head size] both."""


@dataclass(frozen=True)
class Embedding:
    """A row for each token, and for each position where positions are learned."""

    tokens: Tensor  # [vocab, size]
    positions: Tensor | None = None  # [context, size]

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[rows] both → [rows, size]"""
        rows = functional.embedding(tokens, self.tokens)
        return rows if self.positions is None else rows + functional.embedding(positions, self.positions)


@dataclass(frozen=True)
class Angles:
    """Rotary positions whose frequencies do not change with the text's length."""

    frequencies: Tensor  # in 32 bit, [head size / 2]
    scaling: float
    kinds: tuple[str, ...]  # of attention, which all turn alike

    def __call__(self, rows: Tensor, positions: Tensor) -> Mapping[str, Rotation]:
        """Angles of `positions` [rows] in the format of `rows`."""
        turns = positions[None, :, None].float() * self.frequencies
        both = torch.cat([turns, turns], dim=-1)
        cosines, sines = (part.mul_(self.scaling).to(rows.dtype) for part in (both.cos(), both.sin()))
        return dict.fromkeys(self.kinds, signed(cosines, sines))


def signed(cosines: Tensor, sines: Tensor) -> Rotation:
    """transformers' angles as a rotation."""
    first, second = sines.chunk(2, dim=-1)
    return cosines, torch.cat([-first, second], dim=-1)
