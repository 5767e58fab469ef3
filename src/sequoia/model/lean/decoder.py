"""A decoder's pass in as few operations as torch has for it, over weights and parts taken from transformers' modules.

What the parts are is read from the modules (`recipes`), and what they compute is held against theirs before a weight
is moved, so transformers stays the one source of truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.model.lean.cache import LeanCache
from sequoia.model.lean.int8 import Int8Rows, quantised
from sequoia.model.lean.linear import Gated, Linear


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

    def __call__(self, rows: Tensor) -> Tensor:
        weighted, norm = self._parts(rows)
        return weighted.div_(norm).to(rows.dtype)

    def quantised(self, rows: Tensor) -> Int8Rows:
        """self(rows) in 8 bit, without a division of each number."""
        return quantised(*self._parts(rows))

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators, of rows' shape, and denominators, one a row."""
        wide = rows.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._least)
        return torch.mul(wide, self._weight), norm


@dataclass(frozen=True)
class LayerNorm:
    """(rows − mean) / standard deviation · weight + bias"""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)

    def quantised(self, rows: Tensor) -> Int8Rows:
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


@dataclass(frozen=True)
class Heads:
    """How a layer's queries, keys and values lie side by side."""

    queries: int
    keys: int  # and as many values
    size: int


Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with the sign of each half: [1, rows, head size] both."""


@dataclass(frozen=True)
class Recipe:
    """A whole decoder."""

    embed: Callable[[Tensor, Tensor], Tensor]  # (tokens [rows], positions [rows]) → [rows, size]
    rotations: Callable[[Tensor, Tensor], Mapping[str, Rotation]] | None  # (rows, positions) → by kind of attention
    heads: Heads
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    pack_head: bool  # a packed head is a second copy where it shares its weight with the embedding


class LeanDecoder:
    """Runs a recipe."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
        self.recipe = recipe
        self._dtype, self._device = dtype, device
        self._is_int8 = False

    @property
    def queries_per_key(self) -> int:
        return self.recipe.heads.queries // self.recipe.heads.keys

    def new_cache(self) -> LeanCache:
        heads = self.recipe.heads
        return LeanCache(len(self.recipe.layers), heads.keys, heads.size, self._dtype, self._device)

    def settle(self, packed: bool, release: bool) -> None:
        """See `Linear.settle`; one after another, so that no more than one exists twice."""
        for layer in self.recipe.layers:
            for linear in layer.linears:
                linear.settle(packed, release)
        self.recipe.head.settle(packed and self.recipe.pack_head, release)

    def quantise(self, release: bool) -> None:
        """See `Linear.quantise`; norms, embeddings and positions stay as they are."""
        for layer in self.recipe.layers:
            for linear in layer.linears:
                linear.quantise(release)
        self.recipe.head.quantise(release)
        self._is_int8 = True

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
        hidden = hidden.float() if self._is_int8 else hidden  # as quantised products are
        rotations = recipe.rotations(hidden, positions) if recipe.rotations else {}
        for layer, *slots in zip(recipe.layers, *cache.rows(count), strict=True):
            attended = self._attention(layer, hidden, rotations.get(layer.kind), masks[layer.kind], slots)
            hidden = _added(layer.out, attended, hidden, layer.after_attention)
            expanded = layer.up.activated(self._normed(layer.before_mlp, hidden), layer.activation)
            hidden = _added(layer.down, expanded, hidden, layer.after_mlp)
        cache.append(count)
        return recipe.head(self._normed(recipe.norm, hidden if last is None else hidden[-last:]))

    def _normed(self, norm: Norm, rows: Tensor) -> Tensor | Int8Rows:
        """As linear layers take it."""
        return norm.quantised(rows) if self._is_int8 else norm(rows)

    def _attention(
        self, layer: Layer, hidden: Tensor, rotation: Rotation | None, mask: Tensor | None, slots: Sequence[Tensor]
    ) -> Tensor:
        """[rows, query heads · head size]"""
        heads, count = self.recipe.heads, len(hidden)
        both = heads.queries + heads.keys
        keys, values, new_keys, new_values = slots
        parts = layer.qkv(self._normed(layer.before_attention, hidden)).view(count, -1, heads.size).transpose(0, 1)
        qk = parts[:both]
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        if rotation is not None:
            qk = torch.addcmul(qk * rotation[0], qk.roll(heads.size // 2, -1), rotation[1])
        new_keys.copy_(qk[heads.queries :])
        new_values.copy_(parts[both:])
        # The queries that share a key are rows of one head, so that keys and values need not be repeated.
        queries = qk[: heads.queries].to(keys.dtype).reshape(1, heads.keys, -1, heads.size)
        attended = functional.scaled_dot_product_attention(queries, keys, values, mask, scale=layer.scale)
        return attended.view(heads.queries, count, heads.size).transpose(0, 1).reshape(count, -1)


def _added(linear: Linear, rows: Tensor, hidden: Tensor, after: Norm | None) -> Tensor:
    return linear.plus(rows, hidden) if after is None else after(linear(rows)) + hidden
