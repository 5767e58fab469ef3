"""Tiny heads, and what they compute written out plainly: one text, no cache, 64 bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sequoia.draft.head_draft import HeadDraft
from sequoia.draft.heads import load_head
from sequoia.measure.random_head import save_random_head
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.model.placement import Numbers

VOCAB, DRAFT_VOCAB = 48, 20
FP32 = Numbers(torch.float32)


def tiny_target(lean: bool = True, seed: int = 3) -> CausalLM:
    return CausalLM(tiny_llama(VOCAB, seed, device="cpu"), lean=lean)


def tiny_head(folder: Path, target: CausalLM, numbers: Numbers = FP32, seed: int = 0) -> HeadDraft:
    return load_head(
        save_random_head(folder, target, draft_vocab_size=DRAFT_VOCAB, seed=seed, spread=3.0), target, numbers
    )


def true_features(target: CausalLM, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """[tokens, taps, size] by transformers' own account of its hidden states, the last of which is normed."""
    model: Any = target.loaded.model
    with torch.inference_mode():
        output = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        states = [state[0] for state in output.hidden_states]
        last = _layers_output(model, tokens)
    rows = [*states[:-1], last, states[-1]]
    return torch.stack([rows[tap] for tap in taps], dim=1)


def _layers_output(model: Any, tokens: Sequence[int]) -> Tensor:
    """What goes into the final norm."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    model(torch.tensor([list(tokens)]), use_cache=False)
    hook.remove()
    return seen[0]


class PlainHead:
    """A head row by row.

    Args:
        folder: of a head in our own layout; or give its config and tensors, named as there.
    """

    def __init__(
        self,
        folder: Path | None,
        target: CausalLM,
        config: dict[str, Any] | None = None,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        self.config = config or json.loads((folder / "config.json").read_text())
        tensors = tensors or load_file(folder / "model.safetensors")
        self.weights = {name: value.double() for name, value in tensors.items()}
        own = target.loaded.model.get_input_embeddings().weight  # type: ignore[operator]
        self.embedding = self.weights.get("embed_tokens.weight", own.double())
        self.is_eagle_3 = "midlayer.hidden_norm.weight" in tensors
        self.head = self.weights.get("lm_head.weight", target.loaded.model.lm_head.weight.double())

    def fused(self, features: Tensor) -> Tensor:
        rows = features.double()
        if self.config.get("feature_norm"):
            rows = rows / (rows.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return self._product(rows.flatten(1), "fc") if self.is_eagle_3 else rows[:, 0]

    def logits(self, features: Tensor, tokens: Sequence[int], guesses: int = 0) -> Tensor:
        """[draft vocabulary] logits at the last of `tokens`.

        Args:
            features: [tokens - 1 - guesses, taps, size] the target's, of the tokens before.
            guesses: so many of the last tokens are the head's own: their rows take its outputs.
        """
        given, keys, values = self.fused(features), list[Tensor](), list[Tensor]()
        output = given[0]
        for place in range(len(tokens) - 1):
            feature = given[place] if place < len(given) else output
            output = self._row(feature, tokens[place + 1], place, keys, values)
        assert len(tokens) - 1 == len(given) + guesses
        return self.head @ (self._norm(output, "norm") if self.is_eagle_3 else output)

    def _row(self, feature: Tensor, token: int, place: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        config, part = self.config, "midlayer.self_attn."
        size, shared = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
        if self.is_eagle_3:
            embedded = self._norm(self.embedding[token], "midlayer.input_layernorm")
            normed = self._norm(feature, "midlayer.hidden_norm")
            taken, residual = torch.cat([embedded, normed]), normed if config.get("norm_before_residual") else feature
            if "fc_embed.weight" in self.weights:
                residual = residual + self._product(embedded, "fc_embed")
        else:
            taken = residual = self._product(torch.cat([self.embedding[token], feature]), "fc")
        queries, key, value = (self._product(taken, f"{part}{name}_proj").view(-1, size) for name in ("q", "k", "v"))
        if f"{part}q_norm.weight" in self.weights:
            queries, key = self._norm(queries, f"{part}q_norm"), self._norm(key, f"{part}k_norm")
        queries = self._turned(queries, place)
        keys.append(self._turned(key, place))
        values.append(value)
        attended = []
        for head, query in enumerate(queries):
            seen = torch.stack([past[head // shared] for past in keys])
            attended.append((seen @ query / size**0.5).softmax(0) @ torch.stack([v[head // shared] for v in values]))
        hidden = residual + self._product(torch.cat(attended), f"{part}o_proj")
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._product(normed, "midlayer.mlp.gate_proj"))
        return hidden + self._product(gate * self._product(normed, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")

    def _product(self, rows: Tensor, name: str) -> Tensor:
        return rows @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()).double())

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return rows / scale * self.weights[f"{name}.weight"]

    def _turned(self, heads: Tensor, place: int) -> Tensor:
        half = heads.shape[-1] // 2
        angles = place * self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = heads[:, :half], heads[:, half:]
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=1)
