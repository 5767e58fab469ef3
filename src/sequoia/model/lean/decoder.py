"""A decoder's pass in as few operations as torch has for it, over weights and parts taken from transformers' modules.

What the parts are is read from the modules (`recipes`), and what they compute is held against theirs before a weight
is moved, so transformers stays the one source of truth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.model.features import Features
from sequoia.model.lean import fused
from sequoia.model.lean.cache import LeanCache
from sequoia.model.lean.fused import PLAIN, Kernels
from sequoia.model.lean.inputs import Rotation
from sequoia.model.lean.int8 import Int8Rows, quantised
from sequoia.model.lean.linear import PIECE, Gated, Linear, can_pack
from sequoia.model.placement import return_freed_memory


@dataclass(frozen=True)
class RMSNorm:
    """rows / √(mean square + eps) · weight, as rows · (weight · √size) / hypot(norm, √(size · eps)): few operations."""

    weight: Tensor  # in 32 bit; [size], or [heads, 1, size]
    eps: float
    _weight: Tensor = field(init=False, repr=False)
    _least: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = self.weight.shape[-1]
        object.__setattr__(self, "_weight", self.weight * math.sqrt(size))
        object.__setattr__(self, "_least", torch.tensor(math.sqrt(size * self.eps), device=self.weight.device))

    def __call__(self, rows: Tensor, kernels: Kernels = PLAIN) -> Tensor:
        return kernels.normed(rows, self._weight, self._least)

    def quantised(self, rows: Tensor, kernels: Kernels = PLAIN) -> Int8Rows:
        """self(rows) in 8 bit, without a division of each number."""
        return Int8Rows(*kernels.normed_in_8_bit(rows, self._weight, self._least))


@dataclass(frozen=True)
class LayerNorm:
    """(rows − mean) / standard deviation · weight + bias"""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, rows: Tensor, kernels: Kernels = PLAIN) -> Tensor:
        return functional.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)

    def quantised(self, rows: Tensor, kernels: Kernels = PLAIN) -> Int8Rows:
        """self(rows) in 8 bit, all of it in 32 bit."""
        weight, bias = self.weight.float(), self.bias.float()
        return quantised(functional.layer_norm(rows.float(), weight.shape, weight, bias, self.eps))


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True)
class Layer:
    """One decoder layer; norms after a part come before its sum."""

    kind: str  # of attention: "full_attention" or "sliding_attention"
    before_attention: Norm
    qkv: Linear
    qk_norm: RMSNorm | None
    scale: float
    out: Linear
    after_attention: Norm | None
    before_mlp: Norm
    up: Linear | Gated
    activation: str
    down: Linear
    after_mlp: Norm | None

    @property
    def linears(self) -> Sequence[Linear | Gated]:
        return self.qkv, self.out, self.up, self.down

    def rounded(self, bits: int) -> Layer:
        """Another one, of these weights in integers of 8 or 4 bits; norms are shared. See `Linear.rounded`."""
        qkv, out, down = (linear.rounded(bits) for linear in (self.qkv, self.out, self.down))
        return replace(self, qkv=qkv, out=out, up=self.up.rounded(bits), down=down)


@dataclass(frozen=True)
class Heads:
    """How a layer's queries, keys and values lie side by side."""

    queries: int
    keys: int  # and as many values
    size: int


@dataclass(frozen=True)
class Recipe:
    """A whole decoder."""

    embed: Callable[[Tensor, Tensor], Tensor]  # (tokens [rows], positions [rows]) → [rows, size]
    rotations: Callable[[Tensor, Tensor], Mapping[str, Rotation]] | None  # (rows, positions) → by kind of attention
    heads: Heads
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    shares_head: bool  # whether the head's weight is the embedding's, which is needed as it is
    mapped: bool = False  # whether the embedding is pages of a file, beside which a packed head can lie in memory

    @property
    def packs_head(self) -> bool:
        """Whether a packed head takes no memory that was not taken before."""
        return self.mapped or not self.shares_head


class LayerRunner:
    """Runs decoder layers, one call for each.

    Args:
        heads: of all layers.
    """

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.is_int8 = False
        self.kernels = PLAIN
        """Who runs the small operations, from the next pass on."""

    @property
    def queries_per_key(self) -> int:
        return self.heads.queries // self.heads.keys

    def through(
        self,
        layer: Layer,
        taken: Tensor | Int8Rows,
        hidden: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        slots: Sequence[Tensor],
    ) -> Tensor:
        """One layer: rows that its attention takes, and those that its parts are added to. [rows, size]"""
        kernels = self.kernels
        attended = self._attention(layer, taken, rotation, mask, slots, kernels)
        hidden = _added(layer.out, attended, hidden, layer.after_attention, kernels)
        expanded = layer.up.activated(self.normed(layer.before_mlp, hidden), layer.activation, kernels)
        return _added(layer.down, expanded, hidden, layer.after_mlp, kernels)

    def normed(self, norm: Norm, rows: Tensor) -> Tensor | Int8Rows:
        """As linear layers take it."""
        return norm.quantised(rows, self.kernels) if self.is_int8 else norm(rows, self.kernels)

    def _attention(
        self,
        layer: Layer,
        taken: Tensor | Int8Rows,
        rotation: Rotation | None,
        mask: Tensor | None,
        slots: Sequence[Tensor],
        kernels: Kernels,
    ) -> Tensor | Int8Rows:
        """[rows, query heads · head size]"""
        heads = self.heads
        keys, values, new_keys, new_values = slots
        parts = layer.qkv(taken, kernels)
        if layer.qk_norm is not None:
            parts = self._qk_normed(layer.qk_norm, parts, kernels)
        if rotation is None:
            queries = fused.split(parts, new_keys, new_values, heads.queries)
        else:
            queries = kernels.rotated(parts, *rotation, new_keys, new_values, heads.queries)
        by_head = self._attended(queries, keys, values, mask, layer.scale)
        if self.is_int8:
            return Int8Rows(*kernels.heads_in_8_bit(by_head))
        return by_head.transpose(0, 1).flatten(1)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Of [query heads, rows, head size], the same."""
        # The queries that share a key are rows of one head, so that keys and values need not be repeated.
        heads = self.heads
        grouped = queries.reshape(1, heads.keys, -1, heads.size)
        attended = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
        return attended.view(heads.queries, -1, heads.size)

    def _qk_normed(self, norm: RMSNorm, parts: Tensor, kernels: Kernels) -> Tensor:
        """Queries and keys normed, head by head; values as they are. [rows, heads · head size]"""
        heads, both = self.heads, self.heads.queries + self.heads.keys
        split = parts.view(len(parts), -1, heads.size)
        return torch.cat([norm(split[:, :both].transpose(0, 1)).transpose(0, 1), split[:, both:]], dim=1).flatten(1)


class LeanDecoder(LayerRunner):
    """Runs a recipe."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(recipe.heads)
        self.recipe = recipe
        self._dtype, self._device = dtype, device
        self.layers: Callable[[], AbstractContextManager[Iterable[Layer]]] = lambda: nullcontext(recipe.layers)
        """The recipe's layers for one pass; each needs its weights only until the next is asked for."""

    def widest(self, inner: int) -> int:
        """Numbers between two products that a row of a pass over many has at a time, of an MLP `inner` wide."""
        gated = all(isinstance(layer.up, Gated) for layer in self.recipe.layers)
        return min(4 * inner, inner + 3 * PIECE) if gated and self._device.type == "cpu" else 4 * inner

    def new_cache(self, features: Features | None = None, capacity: int = 0) -> LeanCache:
        """See `LeanCache`."""
        heads, layers = self.recipe.heads, len(self.recipe.layers)
        return LeanCache(layers, heads.keys, heads.size, self._dtype, self._device, features, capacity)

    @torch.inference_mode()
    def trial(self, kernels: Kernels, rows: int) -> None:
        """A pass of as many rows with these kernels, of which nothing stays."""
        run, tokens = copy(self), torch.arange(rows, device=self._device)
        run.kernels = kernels
        run.forward(tokens, tokens, defaultdict(lambda: None), self.new_cache())

    def settle(self, packed: bool, release: bool) -> None:
        """See `Linear.settle`; one after another, so that no more than one exists twice."""
        for layer in self.recipe.layers:
            for linear in layer.linears:
                linear.settle(packed, release)
            return_freed_memory()
        self.recipe.head.settle(packed and self.recipe.packs_head, release)

    def quantise(self, release: bool, bits: int = 8) -> None:
        """See `Linear.quantise`; norms, embeddings and positions stay as they are, and of 4 bits the head too."""
        for layer in self.recipe.layers:
            for linear in layer.linears:
                linear.quantise(release, bits)
            return_freed_memory()
        self.is_int8 = bits == 8
        if self.is_int8:
            self.recipe.head.quantise(release)
        else:
            packed = release and can_pack(self._dtype, self._device)
            self.recipe.head.settle(packed and self.recipe.packs_head, release)

    def rounded(self, bits: int, layers: Iterable[Layer]) -> LeanDecoder:
        """Another decoder, of these weights in integers of 8 or 4 bits, before they are settled.

        Args:
            layers: the recipe's, each with its weights.

        Embedding, norms and head are shared, so that the head is there once this one's is settled.
        """
        rounded = [layer.rounded(bits) for layer in layers]
        twin = copy(self)
        twin.recipe = replace(self.recipe, layers=rounded)
        twin.is_int8 = bits == 8
        twin.layers = lambda: nullcontext(rounded)
        return twin

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor | None],
        cache: LeanCache,
        last: int | None = None,
    ) -> Tensor:
        """Append rows to the cache and return the logits of the last ones.

        Args:
            tokens, positions: [rows].
            masks: by kind of attention; additive, [1, 1, `queries_per_key` · rows, slots], None where every slot is
                visible.
            last: how many rows' logits are needed; None needs all.

        Returns:
            Logits; in 32 bit from quantised weights.
        """
        recipe, count = self.recipe, len(tokens)
        hidden = recipe.embed(tokens, positions)
        hidden = hidden.float() if self.is_int8 else hidden  # as quantised products are
        rotations = recipe.rotations(hidden, positions) if recipe.rotations else {}
        features = cache.features
        with self.layers() as layers:
            for depth, (layer, *slots) in enumerate(zip(layers, *cache.rows(count), strict=True)):
                if features is not None:
                    features.write(depth, cache.length, hidden)
                taken = self.normed(layer.before_attention, hidden)
                hidden = self.through(layer, taken, hidden, rotations.get(layer.kind), masks[layer.kind], slots)
        if features is not None:
            self._write_last(features, cache.length, hidden)
        cache.append(count)
        return self.logits(hidden if last is None else hidden[-last:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Of rows that have been through all layers."""
        norm, head = self.recipe.norm, self.recipe.head
        if self.is_int8 and not head.is_int8:  # one that is shared
            return head(norm(hidden, self.kernels).to(self._dtype), self.kernels)
        return head(self.normed(norm, hidden), self.kernels)

    def _write_last(self, features: Features, start: int, hidden: Tensor) -> None:
        layers = len(self.recipe.layers)
        features.write(layers, start, hidden)
        if layers + 1 in features.taps:
            features.write(layers + 1, start, self.recipe.norm(hidden))


def _added(linear: Linear, rows: Tensor | Int8Rows, hidden: Tensor, after: Norm | None, kernels: Kernels) -> Tensor:
    if after is None:
        return linear.plus(rows, hidden, kernels)
    return after(linear(rows, kernels), kernels) + hidden
