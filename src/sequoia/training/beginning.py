"""What a head begins as: sizes and weights of the target's last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sequoia.draft.head_config import HeadConfig
from sequoia.errors import ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.decoder import Recipe, RMSNorm
from sequoia.model.lean.linear import Gated

_THETA = 10_000.0


def head_config(target: CausalLM, taps: tuple[int, ...], draft_vocab: int) -> HeadConfig:
    """A head as wide as one of the target's layers.

    Raises:
        ModelError: the target has no lean decoder.
    """
    recipe, heads = _recipe(target), _recipe(target).heads
    norm = recipe.norm
    rope = {"hidden_size": target.hidden_size, "num_attention_heads": heads.queries, "head_dim": heads.size}
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=recipe.layers[-1].down.dense().shape[1],
        heads=heads,
        eps=norm.eps,
        activation="silu",
        rope={"rope_theta": _theta(target), **rope},
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        feature_layers=taps,
        feature_norm=True,
        tie_head=True,
    )


def as_record(config: HeadConfig) -> dict[str, Any]:
    """As `HeadConfig.read` takes it."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads.queries,
        "num_key_value_heads": config.heads.keys,
        "head_dim": config.heads.size,
        "rms_norm_eps": config.eps,
        "hidden_act": config.activation,
        "rope_theta": config.rope["rope_theta"],
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "feature_layers": list(config.feature_layers or ()),
        "feature_norm": config.feature_norm,
        "tie_head": config.tie_head,
    }


def last_layer(target: CausalLM) -> Mapping[str, Tensor]:
    """Its weights, by the names that `HeadModule` has for them, as far as it has the same parts."""
    recipe = _recipe(target)
    layer, heads = recipe.layers[-1], recipe.heads
    sizes = [count * heads.size for count in (heads.queries, heads.keys, heads.keys)]
    queries, keys, values = torch.split(layer.qkv.dense().float(), sizes)
    found = {"q_proj": queries, "k_proj": keys, "v_proj": values, "o_proj": layer.out.dense().float()}
    if isinstance(layer.up, Gated):
        found |= {"gate_proj": layer.up.gate.dense().float(), "up_proj": layer.up.up.dense().float()}
        found["down_proj"] = layer.down.dense().float()
    norms = {"hidden_norm": layer.before_attention, "post_attention_layernorm": layer.before_mlp, "norm": recipe.norm}
    return found | {name: norm.weight for name, norm in norms.items() if isinstance(norm, RMSNorm)}


def _recipe(target: CausalLM) -> Recipe:
    if target.recipe is None:
        raise ModelError(
            f"{target.loaded.name} runs in {target.path}; heads are trained for models with a lean decoder. Choose one "
            "of their families."
        )
    return target.recipe


def _theta(target: CausalLM) -> float:
    """Of the target's rotary positions, where it has any."""
    config: Any = target.loaded.model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(theta or getattr(config, "rope_theta", None) or _THETA)
