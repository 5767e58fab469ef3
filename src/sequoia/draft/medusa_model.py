"""Medusa's heads (Cai et al. 2024, https://arxiv.org/abs/2401.10774): one for each depth, all on the target's last row.

They know nothing of the path to a node, so all nodes of a depth have one distribution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia.draft.head_config import HeadName
from sequoia.draft.head_inlets import linear
from sequoia.draft.head_layouts import MEDUSA
from sequoia.draft.head_tensors import read_tensors
from sequoia.errors import FileError, ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.linear import Linear, can_pack
from sequoia.model.placement import Numbers

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")  # head, part of it, whether a block


@dataclass(frozen=True)
class MedusaHead:
    """Residual blocks, and an output layer where it has one of its own."""

    blocks: Sequence[Linear]
    output: Linear | None

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, size] → [rows, size], or [rows, vocab] with an output layer"""
        for block in self.blocks:
            rows = rows + block.activated(rows, "silu")
        return rows if self.output is None else self.output(rows)


class MedusaModel:
    """Medusa heads at their target.

    Args:
        heads: for the tokens after the root, in order.
        numbers: their own number formats.
    """

    def __init__(self, name: str, heads: Sequence[MedusaHead], target: CausalLM, numbers: Numbers) -> None:
        self.loaded = HeadName(name, numbers.name)
        self.taps = (target.layer_count + 1,)
        self.support = torch.arange(target.loaded.token_count, device=target.device)
        self._heads, self._target = heads, target
        self._dtype = torch.float32 if numbers.bits == 8 else numbers.dtype
        packed = can_pack(numbers.dtype, target.device)
        for part in (part for head in heads for part in (*head.blocks, head.output) if part is not None):
            if numbers.bits:
                part.quantise(release=True, bits=numbers.bits)
            else:
                part.settle(packed, release=True)

    @property
    def path(self) -> str:
        """Which code runs a pass, for people."""
        return f"{len(self._heads)} heads on the target's last feature, {self.loaded.weights}"

    @property
    def slot_bytes(self) -> int:
        """Of what is kept of each token: its feature, in the target's cache."""
        return len(self.taps) * self._target.hidden_size * self._target.loaded.dtype.itemsize

    @property
    def candidates(self) -> int:
        """Tokens that it has a logit for."""
        return len(self.support)

    def reserve(self, slots: int) -> None:
        """See `CausalLM.reserve`; there is no cache here."""

    @torch.inference_mode()
    def logits(self, feature: Tensor, depth: int) -> Tensor:
        """[1, size] last feature of the token before the root → [1, candidates] for the children of nodes at a depth.

        Deeper than there are heads it is the last one's, which was trained for a token nearer by.
        """
        head = self._heads[min(depth, len(self._heads) - 1)]
        found = head(feature.to(self._dtype))
        if head.output is None:
            found = self._target.ends.head(found.to(self._target.loaded.dtype))
        return found[:, : len(self.support)]


def load_medusa(folder: Path, config: Mapping[str, Any], target: CausalLM, numbers: Numbers) -> MedusaModel:
    """The heads in a folder.

    Raises:
        FileError: the folder does not hold what its config says.
        ModelError: they are for another target.
    """
    name = folder.resolve().name
    tensors = read_tensors(folder, WEIGHTS)
    parts = _parts(tensors, name)
    count = config[MEDUSA]
    if not isinstance(count, int) or not 1 <= count <= len(parts) or sorted(parts) != list(range(len(parts))):
        raise FileError(
            f"{name} needs {count!r} heads by its config, and holds {len(parts)}. Mend its config, or save it again."
        )
    _require_fit(tensors, name, target)
    weights = {key: value.to(target.device, numbers.dtype) for key, value in tensors.items()}
    heads = [_head(parts[index], weights) for index in range(len(parts))]
    return MedusaModel(name, heads, target, numbers)


@dataclass(frozen=True)
class _Names:
    """A head's parts by the start of their tensors' names."""

    blocks: dict[int, str]
    outputs: dict[int, str]


def _parts(tensors: Mapping[str, Tensor], name: str) -> dict[int, _Names]:
    """By head."""
    found: dict[int, _Names] = {}
    for key in tensors:
        match = _NAME.fullmatch(key)
        if match is None:
            raise FileError(f"{name} holds {key!r}, which is no part of a Medusa head. Save the heads again.")
        head = found.setdefault(int(match[1]), _Names({}, {}))
        (head.blocks if match[3] else head.outputs)[int(match[2])] = key.rpartition(".")[0]
    return found


def _require_fit(tensors: Mapping[str, Tensor], name: str, target: CausalLM) -> None:
    size, vocab = target.hidden_size, target.vocab_size
    for key, tensor in tensors.items():
        rows = size if ".linear." in key else vocab
        needed = (rows, size) if key.endswith("weight") else (rows,)
        if tuple(tensor.shape) != needed:
            raise ModelError(
                f"the heads {name} have {key} as {list(tensor.shape)}, and {target.loaded.name} needs {list(needed)}. "
                "Choose heads that were trained for this target."
            )


def _head(names: _Names, weights: Mapping[str, Tensor]) -> MedusaHead:
    blocks = [linear(weights, names.blocks[place]) for place in sorted(names.blocks)]
    output = next((linear(weights, start) for start in names.outputs.values()), None)
    return MedusaHead(blocks, output)
