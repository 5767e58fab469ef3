"""A hollow model filled within a budget, once everything else that takes memory is there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from sequoia.model.causal_lm import CausalLM
from sequoia.model.offload.attach import layer_layouts
from sequoia.model.offload.budget import Needs, plan_memory
from sequoia.model.offload.disk import STAGING, THREADS
from sequoia.model.offload.request import OffloadRequest
from sequoia.model.placement import free_bytes, resident_bytes, return_freed_memory

TREE_ROWS = 128  # that memory is planned for, at least
_AT_WORK = 64 << 20  # bytes that requests were seen to take beside what is counted: oneDNN's kernels, gaps, buffers
_DRAW_BYTES = 12  # for each node and candidate: distributions of the inner ones, what one level is drawn by, and gaps


@runtime_checkable
class Beside(Protocol):
    """A draft's model, for which something is kept of each token."""

    @property
    def slot_bytes(self) -> int:
        """Of what is kept of each token."""

    @property
    def candidates(self) -> int:
        """Tokens that it has a logit for."""

    def reserve(self, slots: int) -> None:
        """New caches have room for so many from now on."""


def used_memory(device: torch.device) -> int:
    """Bytes that this process has in fast memory, without what is only kept for later; on a GPU, all that is taken."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return_freed_memory()
    return resident_bytes()


def fill(model: CausalLM, drafts: Sequence[Beside], request: OffloadRequest, alone: int, tree_rows: int) -> None:
    """Divide the budget, read the layers that stay, and set the ring to work; `model.memory` says how.

    Args:
        model: hollow.
        drafts: the models that run beside it.
        alone: bytes that the process had in memory before these were loaded.
        tree_rows: of the largest tree.

    Raises:
        UsageError: the budget cannot work.
        FileError: a layer cannot be read.
    """
    used = used_memory(model.device)
    needs = _needs(model, drafts, alone, used, max(tree_rows, TREE_ROWS))
    budget = request.budget
    if budget is None:
        budget = used + (free_bytes(model.device) or 0)
    plan = plan_memory(needs, budget)
    for each in (model, *drafts):
        each.reserve(needs_context(model))
    model.stream(plan)


def needs_context(model: CausalLM) -> int:
    """Tokens that caches are planned for."""
    assert model.context_length is not None
    return model.context_length


def _needs(model: CausalLM, drafts: Sequence[Beside], alone: int, used: int, tree_rows: int) -> Needs:
    context, dtype = needs_context(model), model.loaded.dtype
    assert model.loaded.hollow is not None
    assert model.recipe is not None
    layouts = layer_layouts(model.recipe.layers, model.loaded.hollow, dtype)
    ends = sum(
        tensor.numel() * tensor.element_size() for tensor in model.loaded.model.parameters() if not tensor.is_meta
    )
    on_cpu = model.device.type == "cpu"
    logits = 2 * model.vocab_size * dtype.itemsize  # of a row: what was freed leaves gaps
    drawn = _DRAW_BYTES * sum(draft.candidates for draft in drafts)
    return Needs(
        libraries=(alone if drafts else used) - ends,
        ends=ends,
        draft=used - alone if drafts else 0,
        context=context,
        caches=context * sum(each.slot_bytes for each in (model, *drafts)),
        rows=_AT_WORK + tree_rows * (logits + drawn),
        row=model.row_bytes(context),
        layer=max(sum(matrix.bytes for matrix in layout.matrices) for layout in layouts),
        layers=len(layouts),
        read=max(layout.read_bytes if on_cpu else layout.size for layout in layouts),
        slot=max(layout.size for layout in layouts),
        buffers=THREADS * STAGING if on_cpu and any(piece.copy for each in layouts for piece in each.pieces) else 0,
    )
