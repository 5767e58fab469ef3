"""Tiny random models of the families that the lean decoder knows, with weights that make every part matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block
from sequoia.model.lean.decoder import Recipe
from sequoia.model.lean.int4 import GROUP, rounded
from sequoia.model.lean.linear import Gated, Linear
from sequoia.model.loading import LoadedModel, load_model
from sequoia.tree.shape import TreeShape

VOCAB, WINDOW = 96, 4
_SLIDING_FULL = ["sliding_attention", "full_attention"]
_ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}

BASES: dict[str, tuple[str, Mapping[str, Any]]] = {  # family → (class without "ForCausalLM" or "LMHeadModel", settings)
    "llama": ("Llama", _ROTARY),
    "mistral": ("Mistral", _ROTARY | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _ROTARY),
    "qwen3": ("Qwen3", _ROTARY | {"head_dim": 8}),
    "gemma3_text": (
        "Gemma3",
        _ROTARY | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _SLIDING_FULL, "query_pre_attn_scalar": 16},
    ),
    "gpt2": ("GPT2", _GPT2),
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **settings}}


_TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}

VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {  # name → (family, changes)
    "llama": ("llama", {}),
    "llama, keys for every query": ("llama", {"num_key_value_heads": 4}),
    "llama, keys for all queries": ("llama", {"num_key_value_heads": 1}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama, narrow heads": ("llama", {"head_dim": 4}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, large eps": ("llama", {"rms_norm_eps": 0.5}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, relu": ("llama", {"hidden_act": "relu"}),
    "llama, rope llama3": (
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama, rope linear": ("llama", _rope("linear", factor=3.0)),
    "llama, rope yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama, rope dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2, mixed layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, mixed layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING_FULL},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3, two rope bases": ("gemma3_text", {"rope_parameters": _TWO_BASES}),
    "gemma3, untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "gemma3, attention bias": ("gemma3_text", {"attention_bias": True}),
    "gpt2": ("gpt2", {}),
    "gpt2, scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}),
    "gpt2, no scale": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, gelu": ("gpt2", {"activation_function": "gelu"}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
}


def tiny(family: str, changes: Mapping[str, Any] | None = None) -> Any:
    """A model whose every weight, bias and norm differs from its neighbours by enough to be missed."""
    kind, settings = BASES[family]
    config = getattr(transformers, f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config")(**settings | (changes or {}))
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_((0.8 if "wpe" in name else 0.3) * spread)
            elif "bias" in name:
                weight.copy_(0.3 * spread)
            else:
                weight.add_(0.3 * spread)  # norms begin at 1, or at 0 where 1 is added to them
    return model.eval()


def variant(name: str) -> Any:
    family, changes = VARIANTS[name]
    return tiny(family, changes)


def loaded_here(model: Any, dtype: str = "fp32") -> LoadedModel:
    """As if loaded from a folder: `settle` may take it apart."""
    loaded = load_model(model, dtype=dtype, device="cpu")

    def never() -> LoadedModel:
        raise AssertionError("nobody asked for a whole model")

    return replace(loaded, load_again=never)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


BUSHY = TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11, 12, 9, 9))  # not in level order, depth 5
DEEPEST = 14


def block(shape: TreeShape, start: int) -> Block:
    return Block(start + torch.tensor(shape.depths), torch.from_numpy(shape.ancestors.copy()))


@torch.inference_mode()
def linear(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """[texts, vocab] a transformers model's logits after each text, from one pass without a cache."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])  # later tokens are not seen
    logits: Tensor = model(input_ids=padded, use_cache=False).logits
    return logits[range(len(texts)), [len(text) - 1 for text in texts]]


class TreeRun:
    """A prefix, a tree after it, its deepest path kept, and a few more tokens."""

    def __init__(self, length: int) -> None:
        self.prefix, self.nodes, self.after = ids(length), ids(BUSHY.size, seed=1), ids(4, seed=2)
        paths = [[self.nodes[0], *(self.nodes[node] for node in path)] for path in BUSHY.paths]
        kept = [*self.prefix, *paths[DEEPEST]]
        self.texts = [
            *([*self.prefix[:end]] for end in range(1, length + 1)),
            *([*self.prefix, *path] for path in paths),
            *([*kept, *self.after[:end]] for end in range(1, 5)),
        ]
        """What stands before and at each row of `logits`."""

    def logits(self, model: CausalLM) -> Tensor:
        """[rows, vocab]"""
        cache, start = model.new_cache(), len(self.prefix)
        before = model.forward(torch.tensor(self.prefix), cache)
        tree = model.forward(torch.tensor(self.nodes), cache, block(BUSHY, start))
        cache.keep(start, [start + node for node in (0, *BUSHY.paths[DEEPEST])])
        one, rest = torch.tensor(self.after).split([1, 3])
        return torch.cat([before, tree, model.forward(one, cache), model.forward(rest, cache)])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.2g}"


def restored(weight: Tensor) -> Tensor:
    """What a matrix of any size is in 4 bits. [out, in]"""
    inputs = weight.shape[1]
    return rounded(functional.pad(weight, (0, -inputs % GROUP))).restored()[:, :inputs]


def layer_linears(recipe: Recipe) -> list[Linear]:
    """Of all decoder layers, each alone."""
    parts = [part for layer in recipe.layers for part in layer.linears]
    return [linear for part in parts for linear in ([part.gate, part.up] if isinstance(part, Gated) else [part])]
