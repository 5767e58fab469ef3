"""Keys and values in preallocated slots.

Invariant: slots [0, length) are valid and contiguous; what lies behind `length` is forgotten, never cleared.
A forward writes behind `length` and then calls `append`, so an interrupted forward leaves the cache as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from sequoia.model.features import Features

_STEP = 256  # slots added at a time


class KVCache(Cache):
    """The cache handed to transformers' modules: each layer's `update` returns views of our slots, not copies.

    Args:
        features: kept beside keys and values, if any.
    """

    def __init__(self, features: Features | None = None) -> None:
        super().__init__(layers=[])
        self.length = 0
        self.features = features
        self._keys: list[Tensor] = []  # per layer [1, heads, capacity, head size]
        self._values: list[Tensor] = []

    def append(self, count: int) -> None:
        """Make the `count` slots written by the last forward part of the cache."""
        self.length += count

    @torch.inference_mode()
    def keep(self, start: int, slots: Sequence[int]) -> None:
        """Move `slots` to follow slot `start - 1` and forget everything else from `start` on.

        Args:
            start: first slot that may change.
            slots: increasing slots in [start, length) to keep, in order.
        """
        if list(slots) != list(range(start, start + len(slots))):
            index = torch.tensor(slots)
            for buffer in (*self._keys, *self._values):
                index = index.to(buffer.device)  # layers may lie on several devices
                buffer[:, :, start : start + len(slots)] = buffer.index_select(2, index)
            if self.features is not None:
                self.features.move(start, slots)
        self.truncate(start + len(slots))

    def truncate(self, length: int) -> None:
        """Forget every slot from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows behind `length`; called by transformers' attention modules."""
        while len(self._keys) <= layer_idx:
            self._keys.append(key_states[:, :, :0])
            self._values.append(value_states[:, :, :0])
        keys = self._keys[layer_idx] = self._written(self._keys[layer_idx], key_states)
        values = self._values[layer_idx] = self._written(self._values[layer_idx], value_states)
        end = self.length + key_states.shape[2]
        return keys[:, :, :end], values[:, :, :end]

    def _written(self, buffer: Tensor, rows: Tensor) -> Tensor:
        end = self.length + rows.shape[2]
        if end > buffer.shape[2]:
            capacity = -(-end // _STEP) * _STEP
            grown = rows.new_empty(*rows.shape[:2], capacity, rows.shape[3])
            grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = grown
        buffer[:, :, self.length : end] = rows
        return buffer

    # What transformers' modules ask of a cache besides `update`.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, layers={len(self._keys)})"
