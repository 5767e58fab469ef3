"""Heads at their targets: loaded from a folder, and held against the target they are for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sequoia.draft.head_config import HeadConfig
from sequoia.draft.head_draft import HeadDraft
from sequoia.draft.head_files import HeadFile, read_config
from sequoia.draft.head_layouts import MEDUSA
from sequoia.draft.head_model import HeadModel
from sequoia.draft.medusa_draft import MedusaDraft
from sequoia.draft.medusa_model import load_medusa
from sequoia.errors import ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.placement import Numbers, resolve_numbers


def load_any_head(folder: Path, target: CausalLM, dtype: str | torch.dtype | Numbers) -> HeadDraft | MedusaDraft:
    """What lies in a folder that `head_folder` has named: one head for all depths, or Medusa's.

    Raises:
        SequoiaError: as for `load_head`.
    """
    config = read_config(folder) or {}
    if MEDUSA not in config:
        return load_head(folder, target, dtype)
    model = load_medusa(folder, config, target, resolve_numbers(dtype, target.device))
    return MedusaDraft(model, target.loaded.token_count)


def load_head(folder: Path, target: CausalLM, dtype: str | torch.dtype | Numbers) -> HeadDraft:
    """The head in a folder, as a draft of `target`.

    Args:
        dtype: the head's number formats, as `load_model` takes them.

    Raises:
        UsageError: dtype is none.
        FileError: the folder holds no head that is whole.
        ModelError: the head is for another target.
    """
    numbers = resolve_numbers(dtype, target.device)
    file = HeadFile.read(folder)
    taps = _taps(file.config, target)
    _require_fit(file, taps, target)
    proposable = target.loaded.token_count
    support, rows = _support(file.target_ids(), proposable)
    tensors = _own_tensors(file, target, support, rows)
    model = HeadModel(file.name, file.config, tensors, taps, support.to(target.device), target, numbers)
    return HeadDraft(model, proposable)


def _taps(config: HeadConfig, target: CausalLM) -> tuple[int, ...]:
    """The features that the config names, or those that its kind takes of every target."""
    if config.fuses_embedding:
        return (target.layer_count + 1,)
    return config.feature_layers or (2, target.layer_count // 2, target.layer_count - 3)


def _own_tensors(file: HeadFile, target: CausalLM, support: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Output rows in the support's order, and an embedding only where it is not the target's."""
    tensors = dict(file.tensors)
    if file.config.tie_head:
        tensors["lm_head.weight"] = target.ends.head_weight()[support]
    elif "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][rows]
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and target.ends.embeds_as(embedding):
        del tensors["embed_tokens.weight"]
    return tensors


def _support(ids: Tensor, proposable: int) -> tuple[Tensor, Tensor]:
    """The target ids that may be proposed, increasing, and which of the head's own outputs they are."""
    support, rows = ids.sort()
    inside = support < proposable
    return support[inside], rows[inside]


def _require_fit(file: HeadFile, taps: tuple[int, ...], target: CausalLM) -> None:
    config, name = file.config, target.loaded.name
    if config.feature_size != target.hidden_size:
        raise ModelError(
            f"the head {file.name} is for targets of size {config.feature_size}, and {name} has {target.hidden_size}. "
            "Choose the head that was trained for this target."
        )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"the head {file.name} is for targets with {config.vocab_size} token ids, and {name} has "
            f"{target.vocab_size}. Choose the head that was trained for this target."
        )
    if not all(0 <= tap <= target.layer_count + 1 for tap in taps):
        raise ModelError(
            f"the head {file.name} reads features {', '.join(map(str, taps))}, and {name} has {target.layer_count} "
            "layers. Choose the head that was trained for this target."
        )
    ids = file.target_ids()
    if not (int(ids.min()) >= 0 and int(ids.max()) < target.vocab_size and len(torch.unique(ids)) == len(ids)):
        raise ModelError(f"the d2t of {file.name} names no {len(ids)} different token ids. Save the head again.")
