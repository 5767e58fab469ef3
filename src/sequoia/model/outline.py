"""What is asked of a transformers model whose modules are not loaded, because a decoder of its own runs already."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


class Config(SimpleNamespace):
    """A text model's config as plain values."""

    def get_text_config(self) -> Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Outline:
    """A model's configs, number format and place."""

    config: Config
    generation_config: SimpleNamespace
    dtype: torch.dtype
    device: torch.device
