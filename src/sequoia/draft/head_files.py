"""Folders of heads: which folder is one, and what lies in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia.draft.head_config import HeadConfig
from sequoia.draft.head_layouts import flattened, is_head_config, renamed
from sequoia.draft.head_tensors import check_tensors, read_tensors, tensor_names

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """A folder's config; None where there is none that can be read."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def head_folder(source: object) -> Path | None:
    """The folder that `source` names, if it holds a head and no model of its own."""
    if not isinstance(source, (str, PathLike)) or not str(source):
        return None
    folder = Path(source).expanduser()
    config = read_config(folder)
    return folder if config is not None and (is_head_config(config) or _is_eagle(folder, config)) else None


def _is_eagle(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether it is of EAGLE or EAGLE-2, whose config is that of a model of one layer."""
    return config.get("num_hidden_layers") == 1 and "fc.weight" in tensor_names(folder)


@dataclass(frozen=True)
class HeadFile:
    """A head as it lies on disk, its tensors checked against its config and named as in the EAGLE-3 layout."""

    name: str
    config: HeadConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> HeadFile:
        """Raises:
        FileError: something is missing, does not fit the config, or is not computed here.
        """
        name = folder.resolve().name
        config = HeadConfig.read(flattened(read_config(folder) or {}, name), name)
        tensors = renamed(read_tensors(folder))
        check_tensors(tensors, config, name)
        return cls(name, config, tensors)

    def target_ids(self) -> Tensor:
        """[draft vocabulary] the target's ids of the head's own."""
        own = torch.arange(self.config.draft_vocab_size)
        return own + self.tensors["d2t"].long() if "d2t" in self.tensors else own
