"""Rotary positions as a table: a pass takes its angles from it in two operations."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sequoia.errors import ModelError
from sequoia.model.lean.decoder import Rotation
from sequoia.model.quiet import quiet

_STEP = 1024  # positions added at a time, at least
_MOVING = ("dynamic", "longrope")  # kinds whose angles are others in a longer text


class RotaryTable:
    """Cosines and signed sines by position.

    Args:
        settings: of a Llama config: `rope_theta`, `rope_scaling` or `rope_parameters`, and the sizes of heads.

    Raises:
        ModelError: transformers cannot read them, or the angles change with the length of the text.
    """

    def __init__(self, settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        try:
            with quiet():
                self._module = LlamaRotaryEmbedding(LlamaConfig(**deepcopy(dict(settings)))).to(device)
        except Exception as error:
            raise ModelError(f"cannot make rotary positions of {dict(settings)} ({error}). Mend the config.") from error
        kind = self._module.rope_type
        if kind in _MOVING:
            raise ModelError(f"{kind} rotary positions change with the length of the text. Choose another head.")
        self._example = torch.empty(1, dtype=dtype, device=device)
        self._cosines = self._sines = self._example[:0]

    def __call__(self, positions: Tensor, end: int) -> Rotation:
        """Of [rows] positions below `end`."""
        if end > len(self._cosines):
            self._grow(max(end, 2 * len(self._cosines), _STEP))
        return self._cosines[positions][None], self._sines[positions][None]

    def _grow(self, count: int) -> None:
        positions = torch.arange(count, device=self._example.device)
        cosines, sines = self._module(self._example, positions[None])
        first, second = sines[0].chunk(2, dim=-1)
        self._cosines, self._sines = cosines[0], torch.cat([-first, second], dim=-1)
