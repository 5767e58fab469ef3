"""Any decoder-only transformers model behind one forward: tokens, positions, tree mask, cache → logits.

Models of families whose parts are known (`lean.recipes`) run in a leaner decoder of our own; all others in
transformers' modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.model.ends import Ends
from sequoia.model.features import Features, listening
from sequoia.model.language_model import PASS_ROWS, Block
from sequoia.model.lean.cache import LeanCache
from sequoia.model.lean.compiled import compile_later
from sequoia.model.lean.decoder import LeanDecoder, Recipe
from sequoia.model.lean.linear import can_pack, pack_modules, quantise_modules
from sequoia.model.lean.recipes import recipe_of
from sequoia.model.lean.side_by_side import SideBySide
from sequoia.model.limits import FULL, SLIDING, exact_context, layer_types
from sequoia.model.loaded import LoadedModel
from sequoia.model.offload.attach import attach
from sequoia.model.offload.budget import MemoryPlan
from sequoia.model.offload.disk import DiskLink
from sequoia.model.offload.gpu import CopyLink
from sequoia.model.offload.hollow import not_streamable
from sequoia.model.offload.request import show_bytes
from sequoia.model.placement import Numbers, resolve_numbers, return_freed_memory

if TYPE_CHECKING:
    from sequoia.model.kv_cache import KVCache


class CausalLM:
    """A loaded model as a `LanguageModel`.

    Args:
        lean: run a model of a known family in the lean decoder.
        recipe: its parts, where they are known before.

    Raises:
        ModelError: the model's cache or masks cannot follow a tree; the message says why.
    """

    def __init__(self, loaded: LoadedModel, lean: bool = True, recipe: Recipe | None = None) -> None:
        self.loaded = loaded
        self.vocab_size = loaded.vocab_size
        self.context_length = exact_context(loaded)
        self.device = loaded.device
        self._config = loaded.model.config.get_text_config()
        self.layer_types = layer_types(loaded)
        recipe = recipe_of(loaded.model) if lean and recipe is None else recipe
        if recipe is None and loaded.hollow is not None:
            raise not_streamable(loaded.name, self._config.model_type)
        self._decoder = LeanDecoder(recipe, loaded.dtype, loaded.device) if recipe else None
        self.ends = Ends(loaded.model, recipe)
        """What comes before its layers and after them."""
        self._taken_apart = False
        self._compiling: Thread | None = None
        self.link: DiskLink | CopyLink | None = None
        """What brings streamed layers; None where there are none."""
        self.memory: MemoryPlan | None = None
        """How it is divided; None where that was not planned."""
        self.pass_rows = PASS_ROWS
        """See `LanguageModel.pass_rows`."""
        self._reserved = 0
        self.on_pass: list[Callable[[int], None]] = []
        """Called after each pass with its number of rows."""

    @property
    def window(self) -> int | None:
        """Width of sliding-window attention in tokens, the query's own included; None without any."""
        return self._config.sliding_window if SLIDING in self.layer_types else None

    @property
    def is_lean(self) -> bool:
        """Whether the lean decoder runs, and not transformers' modules."""
        return self._decoder is not None

    @property
    def takes_positions(self) -> bool:
        """Whether transformers' modules can be told where a token stands."""
        return "position_ids" in self._arguments

    @cached_property
    def _arguments(self) -> Collection[str]:
        """Of the modules' forward."""
        return inspect.signature(self.loaded.model.forward).parameters.keys()

    @property
    def recipe(self) -> Recipe | None:
        """What the lean decoder runs."""
        return self._decoder.recipe if self._decoder else None

    @property
    def path(self) -> str:
        """Which code runs a pass, for people."""
        loaded = self.loaded
        packed = not loaded.bits and loaded.load_again is not None and can_pack(loaded.dtype, self.device)
        if self.memory is not None:
            return f"lean decoder, {loaded.weights}, {self.memory.streamed} of {self.memory.layers} layers streamed"
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

    def stream(self, memory: MemoryPlan) -> None:
        """Bring the layers of a hollow model to work: some for keeps, the others through a ring in each pass.

        Raises:
            FileError: a layer cannot be read.
        """
        assert self._decoder is not None
        assert self.loaded.hollow is not None
        self.memory, self.pass_rows = memory, memory.prompt_rows
        self.link = attach(self._decoder, self.loaded.hollow, self.loaded.dtype, memory.resident_layers, memory.slots)
        self._taken_apart = True

    @property
    def offload(self) -> str:
        """Where weights are streamed from and within which budget; "off" where all are in memory."""
        if self.memory is None:
            return "off"
        return f"{'disk' if self.device.type == 'cpu' else 'host'} within {show_bytes(self.memory.budget)}"

    @property
    def candidates(self) -> int:
        """Tokens that it has a logit for."""
        return self.vocab_size

    def reserve(self, slots: int) -> None:
        """New caches have room for so many from now on, and do not move as they grow."""
        self._reserved = slots

    @property
    def slot_bytes(self) -> int:
        """Of a cache, for each token."""
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * int(config.num_hidden_layers * heads * size) * self.loaded.dtype.itemsize

    def row_bytes(self, context: int) -> int:
        """What each row of a pass needs besides its logits, at a full context: masks, and the widest activations."""
        config, width = self._config, self.loaded.dtype.itemsize
        groups = 1 if self._decoder is None else self._decoder.queries_per_key
        masks = context * len(self.layer_types) * (groups * width + 2)
        hidden = int(config.hidden_size)
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        widest = 4 * int(inner) if self._decoder is None else self._decoder.widest(int(inner))
        return masks + widest * width + 6 * hidden * (width + 4)

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
        twin.loaded = replace(self.loaded, name=f"self:{name}", numbers=Numbers(self.loaded.dtype, bits), hollow=None)
        twin.on_pass, twin._compiling = [], None
        hollow, layers = self.loaded.hollow, self._decoder.recipe.layers
        twin._decoder = self._decoder.rounded(bits, layers if hollow is None else hollow.filled(layers))
        return twin

    @property
    def whole_model(self) -> Any:
        """The transformers model in working order: a second copy where `settle` took the first one apart."""
        return self._second_copy if self._taken_apart else self.loaded.model

    @cached_property
    def _second_copy(self) -> Any:
        again = self.loaded.load_again
        return self.loaded.model if again is None else again().model

    @property
    def layer_count(self) -> int:
        """Decoder layers."""
        return int(self._config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Of the residual stream, and so of a feature."""
        return int(self._config.hidden_size)

    def new_cache(self, taps: Sequence[int] = ()) -> KVCache | LeanCache:
        """An empty cache.

        Args:
            taps: features that it is to keep of each token; see `Features`.
        """
        if self.memory is not None:
            return_freed_memory()  # of other requests, which the budget does not count twice
        features = Features(taps, self.hidden_size, self.loaded.dtype, self.device) if taps else None
        if self._decoder is not None:
            return self._decoder.new_cache(features, self._reserved)
        from sequoia.model.kv_cache import KVCache  # and with it transformers' models

        return KVCache(features)

    def side_by_side(self, texts: int, taps: Sequence[int]) -> SideBySide:
        """As many texts at once, a token of each per pass.

        Args:
            taps: features that a pass hands out; see `Features`.

        Raises:
            ModelError: the model runs in transformers' modules, or is quantised.
        """
        if self._decoder is None or self._decoder.is_int8:
            raise ModelError(
                f"{self.loaded.name} runs in {self.path}; many texts at once need the lean decoder in 16 or 32 bit. "
                "Choose a model of a family that it knows, and no int8."
            )
        features = Features(taps, self.hidden_size, self.loaded.dtype, self.device)
        return SideBySide(self._decoder, texts, self.window, features)

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
        # transformers 5 renames `past_key_values` to `cache` on the way
        arguments: dict[str, Any] = {"cache" if "cache" in self._arguments else "past_key_values": cache}
        if self.takes_positions:
            arguments["position_ids"] = block.positions[None, -count:]
        if last is not None and "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = last
        features = cache.features
        with nullcontext() if features is None else listening(self.loaded.model, features, cache.length):
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
            return dict.fromkeys(self.layer_types)
        allowed = torch.ones(count, length + count, dtype=torch.bool, device=self.device)
        allowed[:, length + count - width :] = block.visible
        window = self.window
        if window is None:
            return {FULL: self._additive(allowed)}
        prefix = torch.arange(length + count - width, device=self.device)
        slot_positions = torch.cat([prefix, block.positions])
        within = slot_positions[None] > block.positions[-count:, None] - window
        masks = {FULL: allowed, SLIDING: allowed & within}
        return {kind: self._additive(masks[kind]) for kind in self.layer_types}

    def _additive(self, allowed: Tensor) -> Tensor:
        dtype, groups = self.loaded.dtype, 1 if self._decoder is None else self._decoder.queries_per_key
        mask = torch.zeros(1, 1, groups, *allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min).flatten(2, 3)
