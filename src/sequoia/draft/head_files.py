"""Folders of heads: which folder is one, and what lies in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sequoia.draft.head_config import HeadConfig
from sequoia.errors import FileError

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """A folder's config; None where there is none that can be read."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def head_folder(source: object) -> Path | None:
    """The folder that `source` names, if its config says that it is a head and no model of its own."""
    if not isinstance(source, (str, PathLike)) or not str(source):
        return None
    folder = Path(source).expanduser()
    config = read_config(folder)
    return folder if config is not None and ("feature_layers" in config or "draft_vocab_size" in config) else None


@dataclass(frozen=True)
class HeadFile:
    """A head as it lies on disk, its tensors checked against its config and named as in the EAGLE-3 layout."""

    name: str
    config: HeadConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> HeadFile:
        """Raises:
        FileError: something is missing, or does not fit the config.
        """
        name = folder.resolve().name
        config = HeadConfig.read(read_config(folder) or {}, name)
        tensors = _read_tensors(folder / WEIGHTS)
        _check(tensors, _shapes(config, tensors), name)
        return cls(name, config, tensors)

    def target_ids(self) -> Tensor:
        """[draft vocabulary] the target's ids of the head's own."""
        own = torch.arange(self.config.draft_vocab_size)
        return own + self.tensors["d2t"].long() if "d2t" in self.tensors else own


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118, not a mapping
    except FileNotFoundError as error:
        raise FileError(f"{file.parent} holds no {file.name}. Save the head again.") from error
    except Exception as error:  # safetensors has an error of its own for a damaged file
        raise FileError(f"{file} is damaged: {error}. Save the head again.") from error


def _shapes(config: HeadConfig, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """What must be there, and biases, which may be."""
    size, inner, heads = config.hidden_size, config.intermediate_size, config.heads
    queries, keys = heads.queries * heads.size, heads.keys * heads.size
    taps = len(config.feature_layers or (0, 0, 0))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, taps * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
    }
    if "fc_embed.weight" in tensors:  # of heads trained here: the embedding joins the residual stream
        shapes["fc_embed.weight"] = (size, size)
    if not config.tie_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, size)
    if config.draft_vocab_size < config.vocab_size or "d2t" in tensors:
        shapes["d2t"] = (config.draft_vocab_size,)
    if "t2d" in tensors:
        shapes["t2d"] = (config.vocab_size,)
    biases = {key.removesuffix("weight") + "bias": shape[:1] for key, shape in shapes.items() if len(shape) == 2}
    return shapes | {key: shape for key, shape in biases.items() if key in tensors}


def _check(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], name: str) -> None:
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise FileError(f"{name} lacks {len(missing)} tensors of a head, first {missing[0]!r}. Save the head again.")
    if extra:
        raise FileError(
            f"{name} holds {len(extra)} tensors that no head of its config has, first {extra[0]!r}. Mend its config."
        )
    for key, shape in shapes.items():
        if tuple(tensors[key].shape) != shape:
            raise FileError(
                f"{name} needs {key} to be {list(shape)} by its config, and it is {list(tensors[key].shape)}. Mend its "
                "config, or save the head again."
            )
