"""A head: one decoder layer over the target's features and the embedding of the token that comes next.

EAGLE (Li et al. 2024, https://arxiv.org/abs/2401.15077) to EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840):
the row of token t takes the features of t, or what the head itself made of its parent, and the embedding of token
t + 1; what it makes of them says token t + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.draft.head_config import HeadConfig, HeadName
from sequoia.draft.head_inlets import EmbeddingInlet, FeatureInlet, Inlet, Weights, linear
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block
from sequoia.model.lean.cache import LeanCache
from sequoia.model.lean.compiled import compile_later
from sequoia.model.lean.decoder import Layer, LayerRunner, RMSNorm
from sequoia.model.lean.fused import Kernels
from sequoia.model.lean.linear import Gated, Linear, can_pack
from sequoia.model.placement import Numbers
from sequoia.model.rotary import RotaryTable


class HeadModel(LayerRunner):
    """A head at its target.

    Args:
        tensors: by the names of the EAGLE-3 layout. The target's embedding and output layer serve where there are none.
        taps: the features it reads.
        support: [candidates] target ids that its outputs stand for, increasing.
        numbers: its own number formats.
    """

    def __init__(
        self,
        name: str,
        config: HeadConfig,
        tensors: Weights,
        taps: tuple[int, ...],
        support: Tensor,
        target: CausalLM,
        numbers: Numbers,
    ) -> None:
        super().__init__(config.heads)
        self.loaded = HeadName(name, numbers.name)
        self.taps, self.support, self.device = taps, support, target.device
        self._target, self._numbers, self._size = target, numbers, config.hidden_size
        self._dtype = torch.float32 if numbers.bits == 8 else numbers.dtype  # of activations
        weights = {
            key: value.to(target.device, numbers.dtype) for key, value in tensors.items() if value.is_floating_point()
        }
        self._embedding = weights.pop("embed_tokens.weight", None)
        self._inlet: Inlet = EmbeddingInlet(weights) if config.fuses_embedding else FeatureInlet(weights, config)
        self._layer = _layer(weights, config)
        self._norm = _norm(weights, "norm", config.eps) if "norm.weight" in weights else None
        self._head = linear(weights, "lm_head") if "lm_head.weight" in weights else None
        self._rotary = RotaryTable(config.rope, self._dtype, target.device)
        self._compiling: Thread | None = None
        self._reserved = 0
        self._settle()

    @property
    def _linears(self) -> Sequence[Linear | Gated]:
        return [*self._inlet.linears, *self._layer.linears, *([] if self._head is None else [self._head])]

    def _settle(self) -> None:
        """Bring the weights into the form that passes run fastest on."""
        packed = can_pack(self._numbers.dtype, self.device)
        for part in self._linears:
            if self._numbers.bits:
                part.quantise(release=True, bits=self._numbers.bits)
            else:
                part.settle(packed, release=True)
        self.is_int8 = self._numbers.bits == 8

    @property
    def path(self) -> str:
        """Which code runs a pass, for people."""
        return f"one layer over the target's features, {self.loaded.weights}"

    def new_cache(self) -> LeanCache:
        return LeanCache(1, self.heads.keys, self.heads.size, self._numbers.dtype, self.device, capacity=self._reserved)

    @property
    def slot_bytes(self) -> int:
        """Of what is kept of each token: keys and values here, and the features in the target's cache."""
        heads, target = self.heads, self._target
        features = len(self.taps) * self._size * target.loaded.dtype.itemsize
        return 2 * heads.keys * heads.size * self._numbers.dtype.itemsize + features

    @property
    def candidates(self) -> int:
        """Tokens that it has a logit for."""
        return len(self.support)

    def reserve(self, slots: int) -> None:
        """See `CausalLM.reserve`."""
        self._reserved = slots

    @torch.inference_mode()
    def fused(self, features: Tensor) -> Tensor:
        """[rows, taps, size] of the target → [rows, size], as `forward` takes them."""
        return self._inlet.fused(features.to(self._dtype), self).to(self._dtype)

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
        taken, hidden = self._inlet.taken(self._embedded(tokens), features, self)
        rotation = self._rotary(block.positions[-count:], end)
        slots = [part[0] for part in cache.rows(count)]
        outputs = self.through(self._layer, taken, hidden, rotation, self._mask(block, end), slots)
        cache.append(count)
        return outputs

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, candidates] over the support."""
        rows = outputs if self._norm is None else self.normed(self._norm, outputs)
        if self._head is not None:
            return self._head(rows, self.kernels)
        return self._target.ends.head(outputs.to(self._target.loaded.dtype))[:, : len(self.support)]

    def compile(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Have the small operations of passes compiled in the background; see `CausalLM.compile`."""
        if self.device.type == "cpu":
            self._compiling = compile_later(self._trial, folder, partial(setattr, self, "kernels"), tell)

    def wait_until_compiled(self) -> None:
        """Return at once where nothing is being compiled."""
        if self._compiling is not None:
            self._compiling.join()

    @torch.inference_mode()
    def _trial(self, kernels: Kernels, rows: int) -> None:
        """A pass of as many rows with these kernels, of which nothing stays."""
        run = copy(self)
        run.kernels = kernels
        features = torch.ones(rows, len(self.taps), self._size, dtype=self._dtype, device=self.device)
        run.logits(run.forward(run.fused(features), torch.arange(rows, device=self.device), run.new_cache()))

    def _embedded(self, tokens: Tensor) -> Tensor:
        own = self._embedding
        rows = self._target.ends.embed(tokens) if own is None else functional.embedding(tokens, own)
        return rows.to(self._dtype)

    def _mask(self, block: Block, end: int) -> Tensor:
        """Additive, [1, 1, queries per key · rows, slots]"""
        rows, width = block.visible.shape
        dtype = self._numbers.dtype
        mask = torch.zeros(self.queries_per_key, rows, end, dtype=dtype, device=self.device)
        mask[:, :, end - width :].masked_fill_(~block.visible, torch.finfo(dtype).min)
        return mask.view(1, 1, -1, end)


def _norm(weights: Weights, name: str, eps: float) -> RMSNorm:
    return RMSNorm(weights[f"{name}.weight"].float(), eps)


def _layer(weights: Weights, config: HeadConfig) -> Layer:
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    before_mlp = _norm(weights, "midlayer.post_attention_layernorm", config.eps)
    return Layer(
        kind="full_attention",
        before_attention=before_mlp,  # in no pass: the inlet gives rows as attention takes them
        qkv=linear(weights, *(f"{attention}.{part}_proj" for part in "qkv")),
        qk_norm=_qk_norm(weights, config) if f"{attention}.q_norm.weight" in weights else None,
        scale=config.heads.size**-0.5,
        out=linear(weights, f"{attention}.o_proj"),
        after_attention=None,
        before_mlp=before_mlp,
        up=Gated(linear(weights, f"{mlp}.gate_proj"), linear(weights, f"{mlp}.up_proj")),
        activation=config.activation,
        down=linear(weights, f"{mlp}.down_proj"),
        after_mlp=None,
    )


def _qk_norm(weights: Weights, config: HeadConfig) -> RMSNorm:
    """The norms of queries and keys side by side, as the heads are."""
    counts = {"q": config.heads.queries, "k": config.heads.keys}
    norms = {part: weights[f"midlayer.self_attn.{part}_norm.weight"].float() for part in counts}
    return RMSNorm(torch.cat([norms[part].expand(count, 1, -1) for part, count in counts.items()]), config.eps)
