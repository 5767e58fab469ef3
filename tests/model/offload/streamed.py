"""Helpers: tiny models in files, loaded hollow and streamed, or whole and resident with plain weights."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from sequoia.draft.ngram_draft import NgramDraft
from sequoia.engine import Engine
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import load_hollow, load_model
from sequoia.model.offload.attach import attach
from sequoia.model.offload.files import Read
from sequoia.model.probe import proved
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.shape import TreeShape

TREE = TreeShape((-1, 0, 0, 1, 1, 2, 3, 3, 6))


def saved(model: Any, folder: Path, dtype: torch.dtype, shard: str = "12KB") -> Path:
    """As safetensors in several files."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def streamed(
    folder: Path, dtype: torch.dtype, resident: Collection[int] = (), slots: int = 2, read: Read = os.preadv
) -> CausalLM:
    model = proved(load_hollow(folder, folder.name, dtype, torch.device("cpu"), read))
    assert model._decoder is not None
    assert model.loaded.hollow is not None
    model.link = attach(model._decoder, model.loaded.hollow, dtype, resident, slots)
    return model


def resident(folder: Path, dtype: torch.dtype) -> CausalLM:
    """As an object, so that its weights stay plain."""
    return proved(load_model(load_model(folder, dtype=dtype, device="cpu").model))


def engine(model: CausalLM, tree: TreeShape = TREE) -> Engine:
    return Engine(model, NgramDraft(model.loaded.token_count), tree, VERIFIERS["sequoia"])
