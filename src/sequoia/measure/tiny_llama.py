"""A Llama of a few hundred weights: the real engine's target and draft, small enough to sample thousands of times."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from sequoia.model.loading import LoadedModel, load_model

_HIDDEN, _INNER, _LAYERS = 16, 32, 2
_SPREAD = 0.5  # large enough that what was read before matters to what comes next


def tiny_llama(vocab_size: int, seed: int, *, blur: float = 0.0, device: str = "auto") -> LoadedModel:
    """A random model in fp32.

    Args:
        blur: share of other random weights mixed in, which makes a draft of the model of the same seed.
        device: "auto", "cpu", "cuda" or another that torch knows.
    """
    weights, others = _weights(vocab_size, seed), _weights(vocab_size, seed + 1)
    mixed = {name: torch.lerp(weight, others[name], blur) for name, weight in weights.items()}
    with TemporaryDirectory(prefix="sequoia-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(vocab_size)), encoding="utf-8")
        save_file(mixed, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return load_model(folder, dtype="fp32", device=device)


def _config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }


def _weights(vocab_size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return _SPREAD * torch.randn(*shape, generator=generator)

    weights = {
        "model.embed_tokens.weight": random(vocab_size, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": random(vocab_size, _HIDDEN),
    }
    for layer in range(_LAYERS):
        block = f"model.layers.{layer}"
        weights |= {
            f"{block}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{block}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{block}.self_attn.q_proj.weight": random(_HIDDEN, _HIDDEN),
            f"{block}.self_attn.k_proj.weight": random(_HIDDEN // 2, _HIDDEN),
            f"{block}.self_attn.v_proj.weight": random(_HIDDEN // 2, _HIDDEN),
            f"{block}.self_attn.o_proj.weight": random(_HIDDEN, _HIDDEN),
            f"{block}.mlp.gate_proj.weight": random(_INNER, _HIDDEN),
            f"{block}.mlp.up_proj.weight": random(_INNER, _HIDDEN),
            f"{block}.mlp.down_proj.weight": random(_HIDDEN, _INNER),
        }
    return weights
