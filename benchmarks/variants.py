"""Ways to run a pass over new rows: ours, transformers' and llama.cpp's, all behind the same few verbs."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import gguf
import torch
from limits import FORMATS, Limits
from torch import Tensor
from transformers import DynamicCache

import sequoia
from sequoia.errors import SequoiaError, UsageError
from sequoia.measure.bench.llama import require_sound
from sequoia.model.gguf_cache import cache_folder, packaged_gguf
from sequoia.model.language_model import read_ahead
from sequoia.model.lean.int4 import GROUP
from sequoia.model.loading import LoadedModel, load_model
from sequoia.model.ready import ready_model
from sequoia.speculate.token_tree import layout_of

EAGER = "eager"
TREE_DEPTH = 8
_PIECE = 512  # rows of a pass that reads the context


@dataclass(frozen=True)
class Size:
    """What a pass has to read and to multiply with."""

    form: str  # of the weights, one of `FORMATS` or int4
    weights: int  # all but an embedding that only looks rows up
    weight_bytes: int
    slot_bytes: int  # of one number of the cache

    @classmethod
    def of(cls, loaded: LoadedModel) -> Size:
        """Of a model whose modules are whole."""
        model = loaded.model
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        count = sum(weight.numel() for weight in model.parameters())
        count -= 0 if head is embedding else embedding.numel()
        if loaded.bits == 4:  # and a scale and a zero for each group; the head is whole
            whole = loaded.dtype.itemsize
            size = int((count - head.numel()) * (1 / 2 + 2 * whole / GROUP)) + head.numel() * whole
        else:
            size = count * FORMATS[loaded.weights].itemsize
        return cls(loaded.weights, count, size, loaded.dtype.itemsize)

    def least_seconds(self, rows: int, cache_numbers: int, limits: Limits) -> float:
        """No pass is faster: weights and cache are read once, and each row is multiplied with each weight."""
        read = (self.weight_bytes + cache_numbers * self.slot_bytes) / limits.read_rate(self.weight_bytes)
        return max(read, 2 * self.weights * rows / limits.matrix_rate(self.form))


class Variant(Protocol):
    size: Size

    def fill(self, tokens: Tensor) -> None:
        """Start anew with this context, [tokens]."""

    def run(self, tokens: Tensor) -> object:
        """One pass over new rows, to all their logits."""

    def undo(self, rows: int) -> None:
        """Forget the last pass's rows."""


class Ours:
    """The rows are the nodes of a tree."""

    def __init__(self, target: str | None, device: str, form: str, compiled: bool = False) -> None:
        self.size = Size.of(load_model(target, dtype=form, device=device))
        self._model = ready_model(target, dtype=form, device=device)  # as every command runs it
        if compiled:
            self._model.compile(cache_folder("kernels"), lambda text: print(text, file=sys.stderr))
            self._model.wait_until_compiled()

    def fill(self, tokens: Tensor) -> None:
        self._cache = self._model.new_cache()
        rest = read_ahead(self._model, tokens.tolist(), self._cache)
        self._model.forward(rest, self._cache, last=1)

    def run(self, tokens: Tensor) -> Tensor:
        layout = layout_of(tree_of(len(tokens)), self._model.device)
        return self._model.forward(tokens, self._cache, layout.block(self._cache.length))

    def undo(self, rows: int) -> None:
        self._cache.truncate(self._cache.length - rows)


@lru_cache
def tree_of(size: int) -> sequoia.TreeShape:
    """The tree that the n-gram draft's rates ask for."""
    if size == 1:
        return sequoia.TreeShape.root_only()
    return sequoia.optimal_shape(sequoia.AcceptanceProfile.shipped("ngram"), size, TREE_DEPTH)


class Modules:
    """transformers' own forward and cache, called as `generate` calls them. The rows follow each other."""

    def __init__(self, target: str | None, device: str, compiled: bool = False) -> None:
        self.loaded = load_model(target, device=device)
        self.size = Size.of(self.loaded)
        parameters = inspect.signature(self.loaded.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._model: Any = torch.compile(self.loaded.model) if compiled else self.loaded.model

    def fill(self, tokens: Tensor) -> None:
        self._cache, self._length = DynamicCache(config=self.loaded.model.config), 0
        for piece in tokens.split(_PIECE):
            self._forward(self.loaded.model, piece)
        self._cache.activate_past_recording()  # else sliding windows could not be rolled back

    def run(self, tokens: Tensor) -> Tensor:
        return self._forward(self._model, tokens)

    @torch.inference_mode()
    def _forward(self, model: Any, tokens: Tensor) -> Tensor:
        self._length += len(tokens)
        mask = torch.ones(1, self._length, dtype=torch.long, device=tokens.device)
        cache = {self._cache_argument: self._cache}
        return model(input_ids=tokens[None], attention_mask=mask, use_cache=True, **cache).logits

    def undo(self, rows: int) -> None:
        self._cache.crop(-rows)
        self._length -= rows

    @property
    def cache_numbers(self) -> int:
        """Numbers in keys and values of the context."""
        return sum(layer.keys.numel() + layer.values.numel() for layer in self._cache.layers)


class LlamaCpp:
    """llama.cpp on the GGUF file that the target comes from, quantised as it is. The rows follow each other."""

    def __init__(self, target: str | None, device: str, most_tokens: int) -> None:
        file = packaged_gguf() if target is None else Path(target)
        if file is None or file.suffix != ".gguf":
            raise UsageError("the target is no GGUF file")
        library = importlib.import_module("llama_cpp")
        require_sound("llama.cpp", file)
        threads = torch.get_num_threads()
        self._llama = library.Llama(
            model_path=str(file),
            n_ctx=most_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1 if device.startswith("cuda") else 0,
            logits_all=True,
            verbose=False,
        )
        tensors = gguf.GGUFReader(file).tensors
        has_head = any(tensor.name == "output.weight" for tensor in tensors)
        read = [tensor for tensor in tensors if not (has_head and tensor.name == "token_embd.weight")]
        count, size = (sum(int(getattr(tensor, name)) for tensor in read) for name in ("n_elements", "n_bytes"))
        self.size = Size("int8", count, size, slot_bytes=2)

    def fill(self, tokens: Tensor) -> None:
        self._llama.reset()
        self._llama.eval(tokens.tolist())

    def run(self, tokens: Tensor) -> None:
        self._llama.eval(tokens.tolist())

    def undo(self, rows: int) -> None:
        self._llama.n_tokens -= rows


def variants(
    target: str | None, device: str, forms: Sequence[str], compiled_ours: bool, compiled: bool, most_tokens: int
) -> tuple[dict[str, Variant], dict[str, str]]:
    """Those that can be made here, `EAGER` first, and why the others cannot, both by name."""
    makers: dict[str, Callable[..., Variant]] = {EAGER: Modules}
    makers |= {f"ours {form}": partial(Ours, form=form) for form in forms}
    makers |= {f"ours {form} compiled": partial(Ours, form=form, compiled=True) for form in forms if compiled_ours}
    makers |= {"compiled": partial(Modules, compiled=True)} if compiled else {}
    makers |= {"llama.cpp": partial(LlamaCpp, most_tokens=most_tokens)}
    made: dict[str, Variant] = {}
    reasons: dict[str, str] = {}
    for name, make in makers.items():
        try:
            made[name] = make(target, device)
        except (SequoiaError, ImportError, OSError) as error:  # OSError where llama.cpp's library cannot be loaded
            if name == EAGER:
                raise
            reasons[name] = str(error)
    return made, reasons
