"""Rotary positions as a table: a pass takes its angles from it in two operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.model.lean.inputs import Angles, Rotation, signed
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
        self._angles = _unscaled(settings, device) or _scaled(settings, device)
        self._example = torch.empty(1, dtype=dtype, device=device)
        self._cosines = self._sines = self._example[:0]

    def __call__(self, positions: Tensor, end: int) -> Rotation:
        """Of [rows] positions below `end`."""
        if end > len(self._cosines):
            self._grow(max(end, 2 * len(self._cosines), _STEP))
        return self._cosines[positions][None], self._sines[positions][None]

    def _grow(self, count: int) -> None:
        cosines, sines = self._angles(self._example, torch.arange(count, device=self._example.device))
        self._cosines, self._sines = cosines[0], sines[0]


def _unscaled(settings: Mapping[str, Any], device: torch.device) -> Callable[[Tensor, Tensor], Rotation] | None:
    """The angles of plain settings, without transformers' models, which take seconds to import."""
    theta, size = settings.get("rope_theta"), settings.get("head_dim")
    if settings.keys() & {"rope_scaling", "rope_parameters"} or not isinstance(theta, (int, float)) or not size:
        return None
    speeds = 1.0 / theta ** (torch.arange(0, size, 2, device=device).float() / size)
    angles = Angles(speeds, 1.0, ("",))
    return lambda rows, positions: angles(rows, positions)[""]


def _scaled(settings: Mapping[str, Any], device: torch.device) -> Callable[[Tensor, Tensor], Rotation]:
    """The angles of any settings that a Llama can have."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        with quiet():
            module = LlamaRotaryEmbedding(LlamaConfig(**deepcopy(dict(settings)))).to(device)
    except Exception as error:
        raise ModelError(f"cannot make rotary positions of {dict(settings)} ({error}). Mend the config.") from error
    if module.rope_type in _MOVING:
        raise ModelError(
            f"{module.rope_type} rotary positions change with the length of the text. Choose another head."
        )
    return lambda rows, positions: signed(*module(rows, positions[None]))
