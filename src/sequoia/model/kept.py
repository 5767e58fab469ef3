"""Proved models on record: what a later start in an identical situation needs to run one, without transformers' modules
and without the proof.

A page holds no weights but the smallest ones, and the embedding where the model's files have it in another number
format, so that it can always stay pages of a file. The others it names in the model's own files, from which they are
read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sequoia.errors import FileError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.gguf_cache import cache_folder
from sequoia.model.lean.described import NotPlainError, Read, described, rebuilt
from sequoia.model.lean.inputs import Embedding
from sequoia.model.loaded import LoadedModel
from sequoia.model.outline import Config, Outline
from sequoia.model.placement import Numbers
from sequoia.model.tensor_files import TensorPlace, tensor_places

_PAGE = "sequoia"  # the metadata's key
_CAST = "cast: "  # begins the key of a tensor of the model's in another format than its files have


@dataclass(frozen=True)
class Entry:
    """A model as a page has it."""

    content: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Page:
    """Where the record of one model in one number format is."""

    folder: Path  # the model's own
    name: str
    known_as: str  # to transformers
    numbers: Numbers
    situation: Mapping[str, Any]  # see `situation`

    @property
    def path(self) -> Path:
        place = f"{self.folder.resolve()}\0{self.numbers.name}\0{self.numbers.dtype}"
        readable = re.sub(r"[^\w.-]", "_", self.name)
        return cache_folder("proved") / f"{readable}-{hashlib.sha256(place.encode()).hexdigest()[:12]}.safetensors"

    def find(self) -> Entry | None:
        """What is kept for this very situation."""
        try:
            with safe_open(self.path, "pt") as file:
                content = json.loads(file.metadata()[_PAGE])
                if content["situation"] != self.situation:
                    return None
                return Entry(content, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):  # none, or a damaged one: prove anew
            return None

    def describe(self, model: CausalLM) -> Entry | None:
        """The model as a page can hold it; None where it runs code or tensors that are not told in data.

        Args:
            model: probed, and not settled yet.
        """
        loaded, config = model.loaded, model.loaded.model.config
        if model.recipe is None or config.get_text_config() is not config or loaded.load_again is None:
            return None
        try:
            places = tensor_places(self.folder)
            recipe, tensors = described(model.recipe, loaded.model, _reader(places, self.numbers.dtype))
            tensors |= _cast_embedding(model, places)
            content = {
                "situation": self.situation,
                "config": config.to_dict(),
                "ends": getattr(loaded.model.generation_config, "eos_token_id", None),
                "recipe": recipe,
            }
            entry = Entry(json.loads(json.dumps(content)), tensors)
        except (NotPlainError, OSError, SafetensorError, TypeError, ValueError):
            return None
        outlined = CausalLM(replace(loaded, model=self._outline(entry)), recipe=model.recipe)
        return entry if _facts(outlined) == _facts(model) else None

    def forget(self) -> None:
        """Keep nothing."""
        with suppress(OSError):
            self.path.unlink()

    def write(self, entry: Entry) -> None:
        """Keep it, in place of an earlier one.

        Raises:
            FileError: the cache cannot be written.
        """
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder, prefix=".", suffix=".part", delete=False) as file:
                try:
                    save_file(entry.tensors, file.name, {_PAGE: json.dumps(entry.content)})
                    os.replace(file.name, self.path)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(file.name)
                    raise
        except (OSError, SafetensorError) as error:
            raise FileError(f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}.") from error

    def model(
        self, entry: Entry, tokenizer: Any, load_again: Callable[[], LoadedModel], most_tokens: int | None = None
    ) -> CausalLM:
        """The model, whole and not settled yet.

        Raises:
            KeyError, TypeError, ValueError, SafetensorError: the page is damaged.
        """
        cast = {key.removeprefix(_CAST): tensor for key, tensor in entry.tensors.items() if key.startswith(_CAST)}
        from_files = cache(_reader(tensor_places(self.folder), self.numbers.dtype))

        def read(name: str) -> Tensor:
            return cast[name] if name in cast else from_files(name)

        recipe = replace(rebuilt(entry.content["recipe"], entry.tensors, read), mapped=True)
        loaded = LoadedModel(
            self._outline(entry), tokenizer, self.name, load_again, self.numbers, most_tokens=most_tokens
        )
        return CausalLM(loaded, recipe=recipe)

    def _outline(self, entry: Entry) -> Any:
        """In a transformers model's place."""
        ends = SimpleNamespace(eos_token_id=entry.content["ends"])
        return Outline(Config(**entry.content["config"]), ends, self.numbers.dtype, torch.device("cpu"))


def _facts(model: CausalLM) -> tuple[object, ...]:
    """What is read from a model's configs."""
    loaded = model.loaded
    return model.vocab_size, model.context_length, model.layer_types, model.window, loaded.eos_ids, loaded.token_count


def _cast_embedding(model: CausalLM, places: Mapping[str, TensorPlace]) -> dict[str, Tensor]:
    """The embedding, where the files have it in another format than the model."""
    assert model.recipe is not None
    assert isinstance(model.recipe.embed, Embedding)
    table = model.recipe.embed.tokens
    parameters = model.loaded.model.named_parameters()
    name = next(name for name, parameter in parameters if parameter.data_ptr() == table.data_ptr())
    return {} if places[name].dtype == table.dtype else {_CAST + name: table}


def _reader(places: Mapping[str, TensorPlace], dtype: torch.dtype) -> Read:
    """Reads tensors of a folder's files; those that have the format already stay mapped to the file."""
    files: dict[Path, Any] = {file: safe_open(file, "pt") for file in {place.file for place in places.values()}}
    return lambda name: files[places[name].file].get_tensor(name).to(dtype)
