"""Models ready to run: loaded and proved, or read as an earlier start in this situation has proved them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sequoia.errors import FileError, ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.gguf_cache import DEFAULT_TARGET, gguf_name, known_folder, packaged_gguf
from sequoia.model.kept import Entry, Page
from sequoia.model.loaded import LoadedModel
from sequoia.model.offload.request import RESIDENT, OffloadRequest
from sequoia.model.placement import Numbers, check_memory, resolve_device, resolve_numbers, return_freed_memory
from sequoia.model.probe import probed, settled
from sequoia.model.situation import situation
from sequoia.model.tokenizing import class_name, read_tokenizer


def ready_model(
    source: Any = None,
    *,
    dtype: str | torch.dtype | Numbers = "auto",
    device: str | torch.device = "auto",
    notice: Callable[[str], None] | None = None,
    offload: OffloadRequest = RESIDENT,
    mapped: bool = True,
    on_whole: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """A model that follows trees exactly, in its fastest form.

    A model on this disk that runs in the lean decoder on a CPU is proved once in each situation, and read from its own
    files afterwards.

    Args:
        source, dtype, device, notice, offload: see `load_model`; a hollow model is the caller's to fill.
        mapped: whether weights may stay pages of their files, which count as memory while one of them is needed.
        on_whole: called with the model while its weights are still as they were loaded.

    Raises:
        UsageError, FileError, ModelError: see `load_model` and `probe`.
    """
    page = _page(source, dtype, device, offload) if mapped else None
    entry = page.find() if page is not None else None
    model = _read(page, entry, source, offload.context) if page is not None and entry is not None else None
    if model is not None:
        if on_whole is not None:
            on_whole(model)
        model.settle()
        return model
    model = _proved(source, dtype, device, notice, offload, mapped)
    if on_whole is not None:
        on_whole(model)
    try:
        return settled(model)
    except ModelError:
        page = _page(source, dtype, device, offload) if mapped else None  # which a GGUF file's first start has only now
        if page is not None:
            page.forget()
        raise


def _proved(
    source: Any,
    dtype: str | torch.dtype | Numbers,
    device: str | torch.device,
    notice: Callable[[str], None] | None,
    offload: OffloadRequest,
    mapped: bool,
) -> CausalLM:
    """A model that is loaded and probed, and from now on read as later starts read it, where it can be."""
    loaded = _load(source, dtype, device, notice, offload)
    if not mapped and loaded.load_again is not None:
        unmap(loaded)
    model = probed(loaded)
    page = _page(source, dtype, device, offload) if mapped and loaded.hollow is None else None
    entry = page.describe(model) if page is not None else None
    again = loaded.load_again
    if page is None or entry is None or again is None or not _keep(page, entry, loaded.tokenizer, notice):
        return model
    tokenizer, written = loaded.tokenizer, page.find()
    if written is None:
        return model
    del loaded, model, entry
    gc.collect()  # transformers' modules, before others take as much memory
    return_freed_memory()
    return page.model(written, tokenizer, again, offload.context)


def _page(
    source: Any, dtype: str | torch.dtype | Numbers, device: str | torch.device, offload: OffloadRequest
) -> Page | None:
    """Where such a model may be on record."""
    if source is not None and not isinstance(source, (str, Path)):
        return None
    place = resolve_device(device)
    found = _folder(source)
    if place.type != "cpu" or found is None:
        return None
    folder, name, known_as = found
    numbers = resolve_numbers(dtype, place)
    if offload.kind != "off" and (offload.must_stream or not offload.fits(folder, numbers, place)):
        return None
    try:
        return Page(folder, name, known_as, numbers, situation(folder, numbers))
    except OSError:  # gone in this moment
        return None


def _folder(source: str | Path | None) -> tuple[Path, str, str] | None:
    """Of a model on this disk in transformers' format: its folder, its name, and by what transformers finds it."""
    source = packaged_gguf() or DEFAULT_TARGET if source is None else source
    path = Path(source).expanduser()
    if path.is_dir():
        return path, path.resolve().name, str(path)
    if path.suffix == ".gguf" and path.is_file():
        folder = known_folder(path)
        return None if folder is None else (folder, gguf_name(path), str(folder))
    return _hub_folder(str(source))


def _hub_folder(name: str) -> tuple[Path, str, str] | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no name at all
        return None
    return (Path(file).parent, name.split("/")[-1], name) if isinstance(file, str) else None


def _read(page: Page, entry: Entry, source: Any, most_tokens: int | None) -> CausalLM | None:
    """The model on record; None where anything about it is not as it was."""
    check_memory(page.name, page.folder, page.numbers.dtype, torch.device("cpu"))

    def load_again() -> LoadedModel:
        return _load(source, page.numbers.dtype, "cpu", None, RESIDENT)

    try:
        tokenizer = read_tokenizer(page.known_as, entry.content["tokenizer"])
        return page.model(entry, tokenizer, load_again, most_tokens)
    except Exception:  # torch, tokenizers and transformers raise nearly any
        return None


def _keep(page: Page, entry: Entry, tokenizer: Any, notice: Callable[[str], None] | None) -> bool:
    """Whether it could be written."""
    entry.content["tokenizer"] = class_name(page.known_as, tokenizer)
    try:
        page.write(entry)
    except FileError as error:
        if notice is not None:
            notice(f"the next start will not be faster: {error}")
        return False
    return True


def _load(
    source: Any,
    dtype: str | torch.dtype | Numbers,
    device: str | torch.device,
    notice: Callable[[str], None] | None,
    offload: OffloadRequest,
) -> LoadedModel:
    from sequoia.model.loading import load_model  # and with it transformers' models

    return load_model(source, dtype=dtype, device=device, notice=notice, offload=offload)


@torch.no_grad()
def unmap(loaded: LoadedModel) -> None:
    """Copy weights that are pages of their file."""
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.clone()
