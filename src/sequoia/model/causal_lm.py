"""Any decoder-only transformers model behind one forward: tokens, positions, tree mask, cache → logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.model.kv_cache import KVCache
from sequoia.model.language_model import Block
from sequoia.model.loading import LoadedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"


class CausalLM:
    """A loaded model as a `LanguageModel`.

    Raises:
        ModelError: the model's cache or masks cannot follow a tree; the message says why.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length
        self.device = loaded.device
        self._window, self._layer_types = _attention_layout(loaded)
        arguments = inspect.signature(loaded.model.forward).parameters
        # transformers 5 renames `past_key_values` to `cache` on the way
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in arguments
        self._takes_positions = "position_ids" in arguments

    @property
    def window(self) -> int | None:
        """Width of sliding-window attention in tokens, the query's own included; None without any."""
        return self._window

    def new_cache(self) -> KVCache:
        return KVCache()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, block: Block | None = None, last_only: bool = False) -> Tensor:
        """See `LanguageModel.forward`."""
        count = len(tokens)
        block = block or Block.linear(cache.length, count, self.device)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if self._takes_positions:
            arguments["position_ids"] = block.positions[None, -count:]
        if last_only and self._can_skip_logits:
            arguments["logits_to_keep"] = 1
        output = self.loaded.model(
            input_ids=tokens[None],
            attention_mask=self._masks(cache.length, count, block),
            use_cache=True,
            return_dict=True,
            **arguments,
        )
        cache.append(count)
        logits: Tensor = output.logits[0]
        return logits[-1:] if last_only else logits

    def _masks(self, length: int, count: int, block: Block) -> Tensor | dict[str, Tensor]:
        """Additive masks [1, 1, n, slots]: one tensor, or one for each kind of layer where a model mixes them."""
        width = block.visible.shape[1]
        allowed = torch.ones(count, length + count, dtype=torch.bool, device=self.device)
        allowed[:, length + count - width :] = block.visible
        if self._window is None:
            return self._additive(allowed)
        prefix = torch.arange(length + count - width, device=self.device)
        slot_positions = torch.cat([prefix, block.positions])
        within = slot_positions[None] > block.positions[-count:, None] - self._window
        masks = {_FULL: allowed, _SLIDING: allowed & within}
        if len(self._layer_types) == 1:
            return self._additive(masks[self._layer_types[0]])
        return {kind: self._additive(mask) for kind, mask in masks.items()}

    def _additive(self, allowed: Tensor) -> Tensor:
        dtype = self.loaded.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]


def _attention_layout(loaded: LoadedModel) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window, if any, and the kinds of attention layer in the model."""
    model, config = loaded.model, loaded.model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{loaded.name} is an encoder-decoder model; Sequoia needs a decoder-only one.")
    if getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{loaded.name} keeps a recurrent state, which cannot be rolled back when a drafted token is rejected. "
            "Choose a model with attention layers only."
        )
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise ModelError(
            f"{loaded.name} uses {attention} attention, which takes no tree mask. Load it with "
            'attn_implementation="sdpa".'
        )
    window = getattr(config, "sliding_window", None)
    layer_types = tuple(sorted(set(getattr(config, "layer_types", None) or [_SLIDING if window else _FULL])))
    unknown = [kind for kind in layer_types if kind not in (_FULL, _SLIDING)]
    if unknown:
        raise ModelError(
            f"{loaded.name} has {unknown[0]} layers, whose state cannot follow a token tree. "
            "Choose a model with full or sliding-window attention layers only."
        )
    return (window if _SLIDING in layer_types else None), layer_types
