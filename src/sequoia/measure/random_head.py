"""A head of random weights for a target: it agrees with it by chance alone, and costs what a trained one costs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sequoia.model.causal_lm import CausalLM


def save_random_head(
    folder: Path, target: CausalLM, *, draft_vocab_size: int, seed: int = 0, spread: float = 0.5
) -> Path:
    """Write one, with heads and feed-forward part as the target's, as `sequoia.load(draft=folder)` takes it.

    Args:
        spread: of its outputs' logits; of other weights, as large as keeps a row's size.
    """
    config = target.loaded.model.config.get_text_config()
    size, inner = target.hidden_size, int(config.intermediate_size)
    queries, keys = int(config.num_attention_heads), int(config.num_key_value_heads)
    head = int(getattr(config, "head_dim", None) or size // queries)
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    ids = torch.randperm(target.loaded.token_count, generator=generator)[:draft_vocab_size].sort().values
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    tensors = {
        "fc.weight": random(size, 3 * size),
        "fc_embed.weight": random(size, size),
        f"{attention}.q_proj.weight": random(queries * head, 2 * size),
        f"{attention}.k_proj.weight": random(keys * head, 2 * size),
        f"{attention}.v_proj.weight": random(keys * head, 2 * size),
        f"{attention}.o_proj.weight": random(size, queries * head),
        f"{mlp}.gate_proj.weight": random(inner, size),
        f"{mlp}.up_proj.weight": random(inner, size),
        f"{mlp}.down_proj.weight": random(size, inner),
        "lm_head.weight": spread * random(draft_vocab_size, size) * size**0.5,
        "d2t": ids - torch.arange(draft_vocab_size),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{norm}.weight"] = 1 + 0.1 * random(1, size)[0]
    tensors["norm.weight"] = 1 + 0.1 * random(1, size)[0]
    settings = {
        "hidden_size": size,
        "intermediate_size": inner,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": head,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "feature_layers": [min(1, target.layer_count), target.layer_count // 2, target.layer_count],
        "feature_norm": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
