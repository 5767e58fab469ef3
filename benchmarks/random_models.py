"""Random models of other families, of about 100 million parameters: what a pass costs, not what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

PREFIX = "random:"
_CONTEXT = 8192
_ROTARY = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": _CONTEXT,
    "tie_word_embeddings": True,
}
_GEMMA3 = _ROTARY | {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}
_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3Config", _ROTARY),
    "mistral": ("MistralConfig", _ROTARY | {"tie_word_embeddings": False, "sliding_window": None}),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "gpt2": ("GPT2Config", {"n_positions": _CONTEXT}),
    "phi": ("PhiConfig", _ROTARY | {"num_key_value_heads": 12}),  # no lean decoder
}
FAMILIES = ", ".join(_CONFIGS)


def save_random(family: str, folder: Path) -> str:
    """Write a model of the family, always the same, and return the name of its folder."""
    if family not in _CONFIGS:
        raise SystemExit(f"random models are there of {FAMILIES}, not of {family}.")
    name, settings = _CONFIGS[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**settings)
    made = folder / f"random-{family}"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made)
    return str(made)
