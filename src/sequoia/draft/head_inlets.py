"""How a head's layer takes in the target's features and the embedding of the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sequoia.draft.head_config import HeadConfig
from sequoia.model.lean.decoder import LayerRunner, RMSNorm
from sequoia.model.lean.int8 import Int8Rows
from sequoia.model.lean.linear import Linear

Weights = Mapping[str, Tensor]


class Inlet(Protocol):
    """The beginning of a pass. Rows come in the head's own format."""

    @property
    def linears(self) -> Sequence[Linear]: ...

    def fused(self, features: Tensor, runner: LayerRunner) -> Tensor:
        """[rows, taps, size] features of the target → [rows, size], in the place of the head's own outputs."""

    def taken(self, embedded: Tensor, features: Tensor, runner: LayerRunner) -> tuple[Tensor | Int8Rows, Tensor]:
        """What the layer's attention takes, and what its parts are added to. [rows, size] both given"""


class FeatureInlet:
    """EAGLE-3's: features of several layers are fused; attention takes embedding and feature, both normed.

    In heads trained here the normed embedding also joins the residual stream.
    """

    def __init__(self, weights: Weights, config: HeadConfig) -> None:
        self._fuse = linear(weights, "fc")
        self._embed = linear(weights, "fc_embed") if "fc_embed.weight" in weights else None
        ones = torch.ones(config.feature_size, device=weights["norm.weight"].device)
        self._feature_norm = RMSNorm(ones, config.eps) if config.feature_norm else None
        names = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
        # Embeddings and features one on top of the other: [2, rows, size]
        self._norms = RMSNorm(torch.stack([weights[name].float()[None] for name in names]), config.eps)
        self._residual_norm = config.residual_norm

    @property
    def linears(self) -> Sequence[Linear]:
        return [self._fuse] if self._embed is None else [self._fuse, self._embed]

    def fused(self, features: Tensor, runner: LayerRunner) -> Tensor:
        """See `Inlet.fused`."""
        rows = features if self._feature_norm is None else self._feature_norm(features)
        return self._fuse(rows.flatten(1), runner.kernels)

    def taken(self, embedded: Tensor, features: Tensor, runner: LayerRunner) -> tuple[Tensor | Int8Rows, Tensor]:
        """See `Inlet.taken`."""
        normed = self._norms(torch.stack([embedded, features]), runner.kernels)
        rows = normed.transpose(0, 1).flatten(1)
        hidden = normed[1] if self._residual_norm else features
        if self._embed is not None:
            hidden = self._embed.plus(normed[0], hidden, runner.kernels)
        return (Int8Rows(*runner.kernels.in_8_bit(rows)) if runner.is_int8 else rows), hidden


class EmbeddingInlet:
    """EAGLE's and EAGLE-2's: the embedding and the target's last feature are fused, and go in as they are."""

    def __init__(self, weights: Weights) -> None:
        self._fuse = linear(weights, "fc")

    @property
    def linears(self) -> Sequence[Linear]:
        return [self._fuse]

    def fused(self, features: Tensor, runner: LayerRunner) -> Tensor:
        """See `Inlet.fused`."""
        return features[:, 0]

    def taken(self, embedded: Tensor, features: Tensor, runner: LayerRunner) -> tuple[Tensor | Int8Rows, Tensor]:
        """See `Inlet.taken`."""
        rows = self._fuse(torch.cat([embedded, features], dim=1), runner.kernels)
        return rows, rows


def linear(weights: Weights, *names: str) -> Linear:
    """Of these names' weights and biases, side by side."""
    return Linear([_module(weights, name) for name in names])


def _module(weights: Weights, name: str) -> nn.Linear:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module
