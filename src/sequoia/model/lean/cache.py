"""Keys and values of all layers in one tensor, so that a pass takes its views of it once and not layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sequoia.model.features import Features

_STEP = 256  # slots added at a time


class LeanCache:
    """Slots of a `LeanDecoder`.

    Invariant: slots [0, length) are valid and contiguous; what lies behind `length` is forgotten, never cleared. A
    pass writes behind `length` and then calls `append`, so an interrupted one leaves the cache as it was.

    Args:
        layers, heads, head_size: of the keys and values.
        features: kept beside them, if any.
        capacity: slots there is room for from the start; with more it moves as it grows, and is there twice meanwhile.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        features: Features | None = None,
        capacity: int = 0,
    ) -> None:
        self.length = 0
        self.features = features
        # [layers, keys or values, 1, heads, capacity, head size]
        self._slots = torch.empty(layers, 2, 1, heads, capacity, head_size, dtype=dtype, device=device)

    def rows(self, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Views for a pass over `count` new rows, by layer.

        Returns:
            Keys and values up to and including the new rows, [1, heads, length + count, head size], then the new rows
            of both to be written, [heads, count, head size].
        """
        end = self.length + count
        if end > self._slots.shape[4]:
            self._grow(end)
        seen, new = self._slots[:, :, :, :, :end], self._slots[:, :, 0, :, self.length : end]
        return seen[:, 0].unbind(), seen[:, 1].unbind(), new[:, 0].unbind(), new[:, 1].unbind()

    def append(self, count: int) -> None:
        """Make the `count` slots written by the last pass part of the cache."""
        self.length += count

    @torch.inference_mode()
    def keep(self, start: int, slots: Sequence[int]) -> None:
        """Move `slots`, increasing ones in [start, length), to follow slot `start - 1`, and forget everything else
        from `start` on."""
        if list(slots) != list(range(start, start + len(slots))):
            index = torch.tensor(slots, device=self._slots.device)
            self._slots[:, :, :, :, start : start + len(slots)] = self._slots.index_select(4, index)
            if self.features is not None:
                self.features.move(start, slots)
        self.truncate(start + len(slots))

    def truncate(self, length: int) -> None:
        """Forget every slot from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length

    def _grow(self, slots: int) -> None:
        capacity = -(-slots // _STEP) * _STEP
        grown = self._slots.new_empty(*self._slots.shape[:4], capacity, self._slots.shape[5])
        grown[:, :, :, :, : self.length] = self._slots[:, :, :, :, : self.length]
        self._slots = grown

    def __repr__(self) -> str:
        return f"LeanCache(length={self.length}, layers={self._slots.shape[0]})"
