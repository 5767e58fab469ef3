"""Any decoder-only transformers model behind one forward: tokens, positions, tree mask, cache → logits."""

from __future__ import annotations

import inspect
import math
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
        self.context_length = _exact_context(loaded)
        self.device = loaded.device
        self._config = loaded.model.config.get_text_config()
        self._layer_types = _layer_types(loaded)
        arguments = inspect.signature(loaded.model.forward).parameters
        # transformers 5 renames `past_key_values` to `cache` on the way
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in arguments
        self.takes_positions = "position_ids" in arguments

    @property
    def window(self) -> int | None:
        """Width of sliding-window attention in tokens, the query's own included; None without any."""
        return self._config.sliding_window if _SLIDING in self._layer_types else None

    def new_cache(self) -> KVCache:
        return KVCache()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, block: Block | None = None, last: int | None = None) -> Tensor:
        """See `LanguageModel.forward`."""
        count = len(tokens)
        block = block or Block.linear(cache.length, count, self.device)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if self.takes_positions:
            arguments["position_ids"] = block.positions[None, -count:]
        if last is not None and self._can_skip_logits:
            arguments["logits_to_keep"] = last
        output = self.loaded.model(
            input_ids=tokens[None],
            attention_mask=self._masks(cache.length, count, block),
            use_cache=True,
            return_dict=True,
            **arguments,
        )
        cache.append(count)
        logits: Tensor = output.logits[0]
        return logits if last is None else logits[-last:]

    def _masks(self, length: int, count: int, block: Block) -> Tensor | dict[str, Tensor] | None:
        """Additive masks [1, 1, n, slots]: one tensor, or one for each kind of layer where a model mixes them."""
        width = block.visible.shape[1]
        if width == 1 and self.window is None:
            return None  # a single row sees every slot
        allowed = torch.ones(count, length + count, dtype=torch.bool, device=self.device)
        allowed[:, length + count - width :] = block.visible
        window = self.window
        if window is None:
            return self._additive(allowed)
        prefix = torch.arange(length + count - width, device=self.device)
        slot_positions = torch.cat([prefix, block.positions])
        within = slot_positions[None] > block.positions[-count:, None] - window
        masks = {_FULL: allowed, _SLIDING: allowed & within}
        if len(self._layer_types) == 1:
            return self._additive(masks[self._layer_types[0]])
        return {kind: self._additive(mask) for kind, mask in masks.items()}

    def _additive(self, allowed: Tensor) -> Tensor:
        dtype = self.loaded.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]


def _layer_types(loaded: LoadedModel) -> tuple[str, ...]:
    """The kinds of attention layer in the model; anything a tree mask cannot serve is refused."""
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
    _refuse_foreign_windows(loaded)
    window = getattr(config, "sliding_window", None)
    layer_types = tuple(sorted(set(getattr(config, "layer_types", None) or [_SLIDING if window else _FULL])))
    unknown = [kind for kind in layer_types if kind not in (_FULL, _SLIDING)]
    if unknown:
        raise ModelError(
            f"{loaded.name} has {unknown[0]} layers, whose state cannot follow a token tree. "
            "Choose a model with full or sliding-window attention layers only."
        )
    if _SLIDING in layer_types and not isinstance(window, int):
        raise ModelError(
            f"{loaded.name} has sliding-window layers, but its config's sliding_window is {window!r}, not a number of "
            "tokens. Choose another model."
        )
    return layer_types


def _refuse_foreign_windows(loaded: LoadedModel) -> None:
    """A window that models apply by themselves (GPT-Neo's local layers) counts slots, and a tree's are no positions."""
    context = loaded.context_length or math.inf
    for name, width in loaded.model.config.get_text_config().to_dict().items():
        if name.endswith("window_size") and isinstance(width, int) and 0 < width < context:
            raise ModelError(
                f"{loaded.name} limits attention by a {name} of {width} of its own, which cannot follow a token tree. "
                "Choose a model with full or sliding-window attention layers only."
            )


def _exact_context(loaded: LoadedModel) -> int | None:
    """Positions up to which a cached key stays valid.

    LongRoPE turns every key by other angles once a text outgrows the length the model was first trained on.
    """
    scaling = getattr(loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    ends = [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]
    limits = ends if loaded.context_length is None else [*ends, loaded.context_length]
    return min(limits, default=None)
