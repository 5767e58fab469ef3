"""The head as it is trained: a differentiable twin of `draft.head_model`, with the same tensors.

Sources: Li et al. 2025, EAGLE-3 (arXiv:2503.01840), for the features of several layers and for feeding the head its
own outputs in training. Here the embedding also joins the residual stream (`fc_embed`): where keys have few heads,
attention's values are a narrow way for the token that was just read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sequoia.draft.head_config import HeadConfig

_SPREAD = 0.02  # of weights that begin at random


class HeadModule(nn.Module):
    """One decoder layer over the embedding of the next token and a feature.

    Passes are [texts, tokens, size]. Weights are in 32 bit; autocast chooses what they multiply in.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.feature_layers
        self.config, size, heads = config, config.hidden_size, config.heads
        self.fc = _linear(len(config.feature_layers) * size, size)
        self.fc_embed = _linear(size, size)
        self.q_proj = _linear(2 * size, heads.queries * heads.size)
        self.k_proj = _linear(2 * size, heads.keys * heads.size)
        self.v_proj = _linear(2 * size, heads.keys * heads.size)
        self.o_proj = _linear(heads.queries * heads.size, size)
        self.gate_proj = _linear(size, config.intermediate_size)
        self.up_proj = _linear(size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, size)
        self.input_layernorm = nn.Parameter(torch.ones(size))
        self.hidden_norm = nn.Parameter(torch.ones(size))
        self.post_attention_layernorm = nn.Parameter(torch.ones(size))
        self.norm = nn.Parameter(torch.ones(size))

    def fused(self, features: Tensor) -> Tensor:
        """[…, taps, size] of the target → […, size]"""
        return self._float(self.fc(self.normed(features).flatten(-2)))

    def step(self, feature: Tensor, embedded: Tensor, positions: Tensor, seen: Seen) -> Tensor:
        """One more token of every chain.

        Args:
            feature: [texts, tokens, size] the target's, fused, or what the last step returned.
            embedded: [texts, tokens, size] of the tokens that come next.
            positions: [texts, tokens].
            seen: keys and values of the steps before; takes this one's.

        Returns:
            [texts, tokens, size]: the head's own feature of the tokens that come next.
        """
        token = self.normed(embedded, self.input_layernorm)
        both = torch.cat([token, self.normed(feature, self.hidden_norm)], dim=-1)
        size = self.config.heads.size
        parts = (project(both).unflatten(-1, (-1, size)).transpose(1, 2) for project in self._projections())
        queries, keys, values = parts
        turn = _Turn(positions, size, float(self.config.rope["rope_theta"]))
        attended = seen.attend(turn(queries), turn(keys), values).transpose(1, 2).flatten(2)
        hidden = feature + self._float(self.fc_embed(token)) + self._float(self.o_proj(attended))
        taken = self.normed(hidden, self.post_attention_layernorm)
        return hidden + self._float(self.down_proj(functional.silu(self.gate_proj(taken)) * self.up_proj(taken)))

    def outputs(self, feature: Tensor) -> Tensor:
        """What the output rows take. […, size]"""
        return self.normed(feature, self.norm)

    def normed(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        return functional.rms_norm(rows.float(), rows.shape[-1:], weight, self.config.eps)

    def _projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q_proj, self.k_proj, self.v_proj

    @staticmethod
    def _float(rows: Any) -> Tensor:
        wide: Tensor = rows.float()
        return wide

    def tensors(self) -> dict[str, Tensor]:
        """By the names of the EAGLE-3 layout."""
        return {_file_name(name): value.detach() for name, value in self.named_parameters()}

    @torch.no_grad()
    def begin(self, layer: Mapping[str, Tensor], seed: int) -> None:
        """The values that training starts from: those of the target's last layer over its last feature.

        Args:
            layer: weights by this module's names, on the feature's side where a projection takes the embedding too.
                Others, and those of another shape, begin at random.
        """
        generator, size = torch.Generator().manual_seed(seed), self.config.hidden_size
        for name, value in self.named_parameters():
            if value.dim() == 2:
                value.normal_(0, _SPREAD, generator=generator)
            given = layer.get(name.removesuffix(".weight"))
            if given is not None and given.shape[0] == value.shape[0]:
                value[..., -given.shape[-1] :] = given
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)


class Seen:
    """Keys and values that chains see: of first steps up to their own, and their own of later steps.

    Args:
        visible: [texts, tokens, tokens] bool, True where a chain that begins at one token sees another.
    """

    def __init__(self, visible: Tensor) -> None:
        self._hidden = ~visible[:, None, None]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[texts, heads, tokens, head size] of each → [texts, query heads, tokens, head size]"""
        self._keys.append(keys)
        self._values.append(values)
        # [texts, key heads, queries that share one, tokens, size]
        texts, _, tokens, size = keys.shape
        shared = queries.reshape(texts, keys.shape[1], -1, tokens, size) * size**-0.5
        first = torch.matmul(shared, self._keys[0][:, :, None].transpose(-1, -2))
        first = first.masked_fill_(self._hidden, torch.finfo(first.dtype).min)
        own = [(shared * each[:, :, None]).sum(-1, keepdim=True).to(first.dtype) for each in self._keys[1:]]
        weights = torch.cat([first, *own], dim=-1).softmax(-1, first.dtype)
        attended = torch.matmul(weights[..., :tokens], self._values[0][:, :, None].to(first.dtype))
        for index, each in enumerate(self._values[1:], start=tokens):
            attended = attended + weights[..., index, None] * each[:, :, None]
        return attended.flatten(1, 2)


class _Turn:
    """Rotary positions: [texts, heads, tokens, size] rows at [texts, tokens] positions."""

    def __init__(self, positions: Tensor, size: int, theta: float) -> None:
        speeds = theta ** (-torch.arange(0, size, 2, device=positions.device).float() / size)
        angles = (positions[:, None, :, None] * speeds).repeat(1, 1, 1, 2)
        self._cosines, self._sines = angles.cos(), angles.sin()

    def __call__(self, rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * self._cosines + torch.cat([-second, first], dim=-1) * self._sines


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _file_name(name: str) -> str:
    base = name.removesuffix(".weight")
    room = {"q": "self_attn.", "k": "self_attn.", "v": "self_attn.", "o": "self_attn."}
    if base in ("fc", "fc_embed", "norm"):
        return f"{base}.weight"
    if base in ("gate_proj", "up_proj", "down_proj"):
        return f"midlayer.mlp.{base}.weight"
    return f"midlayer.{room[base[0]] if base.endswith('_proj') else ''}{base}.weight"
