"""Shards of texts on disk."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from sequoia.errors import FileError
from sequoia.training.texts import Shard
from sequoia.tree.records import save_bytes


@dataclass(frozen=True)
class ShardFile:
    """One shard, of which parts are read when they are needed."""

    path: Path

    def save(self, shard: Shard) -> None:
        """FileError if it cannot be written."""
        tensors = {field.name: getattr(shard, field.name) for field in fields(Shard)}
        save_bytes(self.path, save(tensors))

    def read(self, start: int = 0, end: int | None = None) -> Shard:
        """Rows from `start` to `end`.

        Raises:
            FileError: the file is missing or damaged.
        """
        try:
            with safe_open(self.path, framework="pt") as stored:
                return Shard(**{field.name: stored.get_slice(field.name)[start:end] for field in fields(Shard)})
        except Exception as error:  # safetensors has an error of its own
            raise FileError(f"cannot read {self.path}: {error}. Delete it, and it is written again.") from error

    def token_counts(self, vocab_size: int) -> Tensor:
        """[vocab] how often each token occurs, those left out that all texts share."""
        shard = self.read()
        return torch.bincount(shard.tokens[~shard.leads].long(), minlength=vocab_size)
