"""What a transformers model is made of, read from its modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sequoia.model.lean.decoder import Heads, Layer, LayerNorm, Recipe, RMSNorm
from sequoia.model.lean.inputs import Angles, Embedding, Rotation, signed
from sequoia.model.lean.linear import ACTIVATIONS, Gated, Linear, shares_head

_FULL = "full_attention"
_FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # others' angles depend on the text's length
_POSITIONS = (*range(64), 127, 500, 1000, 2047, 4095, 8191, 32767, 131071)  # that angles are compared at
_OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations", "transformers.pytorch_utils")


def recipe_of(model: Any) -> Recipe | None:
    """The recipe of a model of a family known here, as transformers made it; None for any other."""
    config = model.config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "final_logit_softcapping", None) is not None or not _is_plain(model):
        return None
    if model.dtype is torch.float64:  # the lean norms calculate in 32 bit
        return None
    try:
        recipe = family(model, config)
    except AttributeError:  # transformers' parts have other names in its other versions
        return None
    return recipe if all(layer.activation in ACTIVATIONS for layer in recipe.layers) else None


def _is_plain(model: Any) -> bool:
    """Whether nothing but torch's and transformers' own modules computes: no adapter, subclass or hook.

    What those add may be too small for the probe to see in 16 bit.
    """
    return all(
        type(module).__module__.startswith(_OWN)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in model.modules()
    )


def _llama(model: Any, config: Any) -> Recipe:
    """Llama and its kin: rotary positions, RMS norms, a gated feed-forward part."""
    decoder, attention = model.model, model.model.layers[0].self_attn
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
    kinds = _kinds(config)
    return Recipe(
        embed=_embedding(decoder.embed_tokens),
        rotations=_rotations(decoder.rotary_emb, kinds),
        heads=heads,
        layers=[_llama_layer(layer, heads, kind, config) for layer, kind in zip(decoder.layers, kinds, strict=True)],
        norm=_rms(decoder.norm),
        head=Linear([model.lm_head]),
        shares_head=shares_head(model),
    )


def _llama_layer(layer: Any, heads: Heads, kind: str, config: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # Gemma: norms before and after each part
    return Layer(
        kind=kind,
        before_attention=_rms(layer.input_layernorm),
        qkv=Linear([attention.q_proj, attention.k_proj, attention.v_proj]),
        qk_norm=_qk_norm(attention, heads) if hasattr(attention, "q_norm") else None,
        scale=attention.scaling,
        out=Linear([attention.o_proj]),
        after_attention=_rms(layer.post_attention_layernorm) if sandwich else None,
        before_mlp=_rms(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        up=Gated(Linear([mlp.gate_proj]), Linear([mlp.up_proj])),
        activation=getattr(config, "hidden_activation", None) or config.hidden_act,
        down=Linear([mlp.down_proj]),
        after_mlp=_rms(layer.post_feedforward_layernorm) if sandwich else None,
    )


def _gpt2(model: Any, config: Any) -> Recipe:
    """GPT-2: learned positions, layer norms, a plain feed-forward part."""
    decoder = model.transformer
    heads = Heads(config.num_attention_heads, config.num_attention_heads, decoder.h[0].attn.head_dim)
    return Recipe(
        embed=Embedding(decoder.wte.weight.data, decoder.wpe.weight.data),
        rotations=None,
        heads=heads,
        layers=[
            Layer(
                kind=_FULL,
                before_attention=_layer_norm(layer.ln_1),
                qkv=Linear([layer.attn.c_attn]),
                qk_norm=None,
                scale=layer.attn.scaling,
                out=Linear([layer.attn.c_proj]),
                after_attention=None,
                before_mlp=_layer_norm(layer.ln_2),
                up=Linear([layer.mlp.c_fc]),
                activation=config.activation_function,
                down=Linear([layer.mlp.c_proj]),
                after_mlp=None,
            )
            for layer in decoder.h
        ],
        norm=_layer_norm(decoder.ln_f),
        head=Linear([model.lm_head]),
        shares_head=shares_head(model),
    )


FAMILIES: dict[str, Callable[[Any, Any], Recipe]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma3_text": _llama,
    "gpt2": _gpt2,
}


def _kinds(config: Any) -> list[str]:
    """Each layer's kind of attention."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    sliding = getattr(config, "sliding_window", None)
    return ["sliding_attention" if sliding else _FULL] * config.num_hidden_layers


def _embedding(module: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A table where it is no more than that (Gemma's scales its rows)."""
    return Embedding(module.weight.data) if type(module) is nn.Embedding else lambda tokens, positions: module(tokens)


def _rotations(module: Any, kinds: list[str]) -> Callable[[Tensor, Tensor], Mapping[str, Rotation]]:
    """The model's own angles, those of each kind of attention where they differ."""
    by_kind = "layer_type" in inspect.signature(module.forward).parameters
    used = list(dict.fromkeys(kinds))

    def rotations(rows: Tensor, positions: Tensor) -> dict[str, Rotation]:
        if by_kind:
            return {kind: signed(*module(rows[None], positions[None], kind)) for kind in used}
        return dict.fromkeys(used, signed(*module(rows[None], positions[None])))

    if by_kind or getattr(module, "rope_type", None) not in _FIXED_ROTATIONS:
        return rotations
    angles = Angles(module.inv_freq.float(), float(module.attention_scaling), tuple(used))
    return angles if _agree(angles, rotations, used[0]) else rotations


def _agree(ours: Angles, theirs: Callable[[Tensor, Tensor], Mapping[str, Rotation]], kind: str) -> bool:
    """Whether they are the same to the last bit."""
    positions = torch.tensor(_POSITIONS, device=ours.frequencies.device)
    rows = torch.zeros(len(positions), 1, device=positions.device)
    return all(map(torch.equal, ours(rows, positions)[kind], theirs(rows, positions)[kind]))


def _rms(module: Any) -> RMSNorm:
    weight = module.weight.data.float()
    # Gemma stores what is added to 1.
    weight = weight + 1.0 if type(module).__name__.startswith("Gemma") else weight
    return RMSNorm(weight, module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _qk_norm(attention: Any, heads: Heads) -> RMSNorm:
    """The norms of queries and keys side by side, as the heads are."""
    queries, keys = _rms(attention.q_norm), _rms(attention.k_norm)
    weight = torch.cat([queries.weight.expand(heads.queries, 1, -1), keys.weight.expand(heads.keys, 1, -1)])
    return RMSNorm(weight, queries.eps)


def _layer_norm(module: Any) -> LayerNorm:
    return LayerNorm(module.weight.data, module.bias.data, module.eps)
