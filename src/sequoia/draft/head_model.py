"""A head: one decoder layer over the target's features and the embedding of the token that comes next.

EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840): the row of token t takes the fused features of t, or what
the head itself made of its parent, and the embedding of token t + 1; what it makes of them says token t + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor, nn

from sequoia.draft.head_config import HeadConfig
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block
from sequoia.model.lean.cache import LeanCache
from sequoia.model.lean.compiled import compile_later
from sequoia.model.lean.decoder import Layer, LeanDecoder, Recipe, RMSNorm
from sequoia.model.lean.fused import Kernels
from sequoia.model.lean.int8 import Int8Rows
from sequoia.model.lean.linear import Gated, Linear, can_pack
from sequoia.model.placement import Numbers
from sequoia.model.rotary import RotaryTable

_KIND = "full_attention"


@dataclass(frozen=True)
class HeadName:
    """What plans and people call a head."""

    name: str
    weights: str  # number format, as `--weights` names it


class HeadModel:
    """A head at its target.

    Args:
        tensors: by the names of the EAGLE-3 layout.
        taps: the features it reads.
        support: [candidates] target ids that its outputs stand for, increasing.
        numbers: its own number formats.
    """

    def __init__(
        self,
        name: str,
        config: HeadConfig,
        tensors: Mapping[str, Tensor],
        taps: tuple[int, ...],
        support: Tensor,
        target: CausalLM,
        numbers: Numbers,
    ) -> None:
        self.loaded = HeadName(name, numbers.name)
        self.taps, self.support, self.device = taps, support, target.device
        self._target, self._config, self._numbers = target, config, numbers
        self._dtype = torch.float32 if numbers.int8 else numbers.dtype  # of activations
        weights = {
            key: value.to(target.device, numbers.dtype) for key, value in tensors.items() if value.is_floating_point()
        }
        self._fuse = _linear(weights, "fc")
        self._embed = _linear(weights, "fc_embed") if "fc_embed.weight" in weights else None
        self._feature_norm = RMSNorm(torch.ones(config.hidden_size, device=target.device), config.eps)
        self._inputs = _stacked_norm(weights, config.eps)
        self._rotary = RotaryTable(config.rope, self._dtype, target.device)
        self._layer = _layer(weights, config)
        norm = _norm(weights, "norm", config.eps)
        recipe = Recipe(
            lambda tokens, positions: target.embed(tokens),
            rotations=None,
            heads=config.heads,
            layers=[self._layer],
            norm=norm,
            head=_linear(weights, "lm_head"),
            shares_head=False,
        )
        self._decoder = LeanDecoder(recipe, numbers.dtype, target.device)
        self._compiling: Thread | None = None
        self._reserved = 0
        self._settle()

    def _settle(self) -> None:
        packed = can_pack(self._numbers.dtype, self.device)
        for linear in filter(None, (self._fuse, self._embed)):
            if self._numbers.int8:
                linear.quantise(release=True)
            else:
                linear.settle(packed, release=True)
        if self._numbers.int8:
            self._decoder.quantise(release=True)
        else:
            self._decoder.settle(packed, release=True)

    @property
    def path(self) -> str:
        """Which code runs a pass, for people."""
        return f"one layer over the target's features, {self.loaded.weights}"

    def new_cache(self) -> LeanCache:
        return self._decoder.new_cache(capacity=self._reserved)

    @property
    def slot_bytes(self) -> int:
        """Of what is kept of each token: keys and values here, and the features in the target's cache."""
        heads, target = self._config.heads, self._target
        features = len(self.taps) * self._config.hidden_size * target.loaded.dtype.itemsize
        return 2 * heads.keys * heads.size * self._numbers.dtype.itemsize + features

    def reserve(self, slots: int) -> None:
        """See `CausalLM.reserve`."""
        self._reserved = slots

    @torch.inference_mode()
    def fused(self, features: Tensor) -> Tensor:
        """[rows, taps, size] of the target → [rows, size], as `forward` takes them."""
        rows = features.to(self._dtype)
        rows = self._feature_norm(rows) if self._config.feature_norm else rows
        return self._fuse(rows.flatten(1)).to(self._dtype)

    @torch.inference_mode()
    def forward(self, features: Tensor, tokens: Tensor, cache: LeanCache, block: Block | None = None) -> Tensor:
        """Append rows to the cache.

        Args:
            features: [rows, size] fused features of tokens, or outputs of their parents' rows.
            tokens: [rows] ids of the tokens that come next.
            cache: slots of rows, each at the position of its token.
            block: how the newest slots see each other; None goes on linearly.

        Returns:
            [rows, size] outputs.
        """
        count, end = len(tokens), cache.length + len(tokens)
        block = block or Block.linear(cache.length, count, self.device)
        taken, hidden = self._taken(self._target.embed(tokens), features)
        rotation = self._rotary(block.positions[-count:], end)
        slots = [part[0] for part in cache.rows(count)]
        outputs = self._decoder.through(self._layer, taken, hidden, rotation, self._mask(block, end), slots)
        cache.append(count)
        return outputs

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, candidates] over the support."""
        return self._decoder.logits(outputs)

    def compile(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Have the small operations of passes compiled in the background; see `CausalLM.compile`."""
        if self.device.type == "cpu":
            take = partial(setattr, self._decoder, "kernels")
            self._compiling = compile_later(self._trial, folder, take, tell)

    def wait_until_compiled(self) -> None:
        """Return at once where nothing is being compiled."""
        if self._compiling is not None:
            self._compiling.join()

    @torch.inference_mode()
    def _trial(self, kernels: Kernels, rows: int) -> None:
        """A pass of as many rows with these kernels, of which nothing stays."""
        run = copy(self)
        run._decoder = copy(self._decoder)
        run._decoder.kernels = kernels
        features = torch.ones(rows, self._config.hidden_size, dtype=self._dtype, device=self.device)
        run.logits(run.forward(features, torch.arange(rows, device=self.device), run.new_cache()))

    def _taken(self, embedded: Tensor, features: Tensor) -> tuple[Tensor | Int8Rows, Tensor]:
        """What the layer's attention takes, [rows, 2 · size], and what its parts are added to, [rows, size]."""
        normed = self._inputs(torch.stack([embedded.to(self._dtype), features]), self._decoder.kernels)
        rows = normed.transpose(0, 1).flatten(1)
        hidden = normed[1] if self._config.residual_norm else features
        if self._embed is not None:
            hidden = self._embed.plus(normed[0].contiguous(), hidden, self._decoder.kernels)
        return (Int8Rows(*self._decoder.kernels.in_8_bit(rows)) if self._decoder.is_int8 else rows), hidden

    def _mask(self, block: Block, end: int) -> Tensor:
        """Additive, [1, 1, queries per key · rows, slots]"""
        rows, width = block.visible.shape
        dtype = self._numbers.dtype
        mask = torch.zeros(self._decoder.queries_per_key, rows, end, dtype=dtype, device=self.device)
        mask[:, :, end - width :].masked_fill_(~block.visible, torch.finfo(dtype).min)
        return mask.view(1, 1, -1, end)


def _linear(weights: Mapping[str, Tensor], *names: str) -> Linear:
    return Linear([_module(weights, name) for name in names])


def _module(weights: Mapping[str, Tensor], name: str) -> nn.Linear:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def _norm(weights: Mapping[str, Tensor], name: str, eps: float) -> RMSNorm:
    return RMSNorm(weights[f"{name}.weight"].float(), eps)


def _stacked_norm(weights: Mapping[str, Tensor], eps: float) -> RMSNorm:
    """Of embeddings and features, one on top of the other: [2, rows, size]."""
    names = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
    return RMSNorm(torch.stack([weights[name].float()[None] for name in names]), eps)


def _layer(weights: Mapping[str, Tensor], config: HeadConfig) -> Layer:
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    return Layer(
        kind=_KIND,
        before_attention=_norm(weights, "midlayer.hidden_norm", config.eps),
        qkv=_linear(weights, *(f"{attention}.{part}_proj" for part in "qkv")),
        qk_norm=None,
        scale=config.heads.size**-0.5,
        out=_linear(weights, f"{attention}.o_proj"),
        after_attention=None,
        before_mlp=_norm(weights, "midlayer.post_attention_layernorm", config.eps),
        up=Gated(_linear(weights, f"{mlp}.gate_proj"), _linear(weights, f"{mlp}.up_proj")),
        activation=config.activation,
        down=_linear(weights, f"{mlp}.down_proj"),
        after_mlp=None,
    )
