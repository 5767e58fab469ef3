"""Any decoder-only transformers model behind one forward: tokens, positions, tree mask, cache → logits.

Models of families whose parts are known (`lean.recipes`) run in a leaner decoder of our own; all others in
transformers' modules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.model.kv_cache import KVCache
from sequoia.model.language_model import Block
from sequoia.model.lean.cache import LeanCache
from sequoia.model.lean.compiled import compile_later
from sequoia.model.lean.decoder import LeanDecoder
from sequoia.model.lean.linear import can_pack, pack_modules, quantise_modules
from sequoia.model.lean.recipes import recipe_of
from sequoia.model.loading import LoadedModel
from sequoia.model.placement import Numbers, resolve_numbers

_FULL, _SLIDING = "full_attention", "sliding_attention"


class CausalLM:
    """A loaded model as a `LanguageModel`.

    Args:
        lean: run a model of a known family in the lean decoder.

    Raises:
        ModelError: the model's cache or masks cannot follow a tree; the message says why.
    """

    def __init__(self, loaded: LoadedModel, lean: bool = True) -> None:
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
        recipe = recipe_of(loaded.model) if lean else None
        self._decoder = LeanDecoder(recipe, loaded.dtype, loaded.device) if recipe else None
        self._taken_apart = False
        self._compiling: Thread | None = None
        self.on_pass: list[Callable[[int], None]] = []
        """Called after each pass with its number of rows."""

    @property
    def window(self) -> int | None:
        """Width of sliding-window attention in tokens, the query's own included; None without any."""
        return self._config.sliding_window if _SLIDING in self._layer_types else None

    @property
    def is_lean(self) -> bool:
        """Whether the lean decoder runs, and not transformers' modules."""
        return self._decoder is not None

    @property
    def path(self) -> str:
        """Which code runs a pass, for people."""
        loaded = self.loaded
        packed = not loaded.bits and loaded.load_again is not None and can_pack(loaded.dtype, self.device)
        if self.is_lean:
            return f"lean decoder, {'packed ' if packed else ''}{loaded.weights}"
        form = loaded.weights if loaded.bits else "packed" if packed else "plain"
        return f"transformers' modules with {form} linear layers: no lean decoder for {self._config.model_type}"

    def settle(self) -> None:
        """Bring the weights into the form that passes run fastest on, once it is known that the model is right.

        A model loaded here is taken apart for it: its modules do not run any more. One that was given as an object is
        left whole.
        """
        release = self.loaded.load_again is not None
        packed = can_pack(self.loaded.dtype, self.device) and release
        self._taken_apart = release and (self.is_lean or packed or self.loaded.bits is not None)
        if self.loaded.bits:
            self._quantise(release, self.loaded.bits)
            return
        if self._decoder is not None:
            self._decoder.settle(packed, release)
        elif packed:
            pack_modules(self.loaded.model)

    def compile(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Have the small operations of passes compiled in the background, once settled; see `compile_later`."""
        if self._decoder is None or self.device.type != "cpu":
            tell(f"passes of {self.loaded.name} are not compiled: only lean decoders on a CPU are.")
            return
        decoder = self._decoder
        self._compiling = compile_later(decoder.trial, folder, partial(setattr, decoder, "kernels"), tell)

    @property
    def is_compiled(self) -> bool:
        """Whether it was asked to compile, be it finished or not."""
        return self._compiling is not None

    def wait_until_compiled(self) -> None:
        """Return at once where nothing is being compiled."""
        if self._compiling is not None:
            self._compiling.join()

    def _quantise(self, release: bool, bits: int) -> None:
        if self._decoder is not None:
            self._decoder.quantise(release, bits)
        else:
            quantise_modules(self.loaded.model, bits)

    def rounded(self, bits: int) -> CausalLM:
        """A second model: this one's weights in integers of 8 or 4 bits, made before this one is settled.

        Embedding, norms and head are shared. It can run once this one is settled.

        Raises:
            ModelError: this one does not run in the lean decoder.
            UsageError: integers of these many bits do not run on its device.
        """
        if self._decoder is None:
            raise ModelError(
                f"{self.loaded.name} ({self._config.model_type}) has no lean decoder, which a draft of its own rounded "
                'weights needs. Choose draft="ngram" or a smaller model.'
            )
        name = Numbers(self.loaded.dtype, bits).name
        resolve_numbers(name, self.device)
        twin = copy(self)
        twin.loaded = replace(self.loaded, name=f"self:{name}", numbers=Numbers(self.loaded.dtype, bits))
        twin.on_pass, twin._compiling = [], None
        twin._decoder = self._decoder.rounded(bits)
        return twin

    @property
    def whole_model(self) -> Any:
        """The transformers model in working order: a second copy where `settle` took the first one apart."""
        return self._second_copy if self._taken_apart else self.loaded.model

    @cached_property
    def _second_copy(self) -> Any:
        again = self.loaded.load_again
        return self.loaded.model if again is None else again().model

    def new_cache(self) -> KVCache | LeanCache:
        return KVCache() if self._decoder is None else self._decoder.new_cache()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        """See `LanguageModel.forward`."""
        block = block or Block.linear(cache.length, len(tokens), self.device)
        masks = self._masks(cache.length, len(tokens), block)
        if self._decoder is None:
            logits = self._modules_pass(tokens, cache, block, masks, last)
        else:
            logits = self._decoder.forward(tokens, block.positions[-len(tokens) :], masks, cache, last)
        for observer in self.on_pass:
            observer(len(tokens))
        return logits

    def _modules_pass(
        self, tokens: Tensor, cache: KVCache, block: Block, masks: Mapping[str, Tensor | None], last: int | None
    ) -> Tensor:
        """In transformers' own modules."""
        count = len(tokens)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if self.takes_positions:
            arguments["position_ids"] = block.positions[None, -count:]
        if last is not None and self._can_skip_logits:
            arguments["logits_to_keep"] = last
        output = self.loaded.model(
            input_ids=tokens[None],
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            return_dict=True,
            **arguments,
        )
        cache.append(count)
        logits: Tensor = output.logits[0]
        return logits if last is None else logits[-last:]

    def _masks(self, length: int, count: int, block: Block) -> Mapping[str, Tensor | None]:
        """Additive masks by kind of attention layer, as who runs the pass takes them; None where all is visible."""
        width = block.visible.shape[1]
        if width == 1 and self.window is None:
            return dict.fromkeys(self._layer_types)
        allowed = torch.ones(count, length + count, dtype=torch.bool, device=self.device)
        allowed[:, length + count - width :] = block.visible
        window = self.window
        if window is None:
            return {_FULL: self._additive(allowed)}
        prefix = torch.arange(length + count - width, device=self.device)
        slot_positions = torch.cat([prefix, block.positions])
        within = slot_positions[None] > block.positions[-count:, None] - window
        masks = {_FULL: allowed, _SLIDING: allowed & within}
        return {kind: self._additive(masks[kind]) for kind in self._layer_types}

    def _additive(self, allowed: Tensor) -> Tensor:
        dtype, groups = self.loaded.dtype, 1 if self._decoder is None else self._decoder.queries_per_key
        mask = torch.zeros(1, 1, groups, *allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min).flatten(2, 3)


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
