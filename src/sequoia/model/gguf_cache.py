"""GGUF files converted once to safetensors in the user's cache, so that a later start is fast."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import transformers.modeling_gguf_pytorch_utils as gguf_reader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from sequoia.errors import FileError, ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

# Part of the cache key: raise it when the conversion below changes what it writes.
_CONVERSION = 1
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_ABANDONED_SECONDS = 3600

# These vocabularies learned their merges with every digit on its own (llama.cpp, llama-vocab.cpp, the pre-tokenizers
# that split on a single \p{N} before GPT-2's pattern). transformers builds them without it: "a  1" gets other ids.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def cache_folder(kind: str = "models") -> Path:
    """Where converted models and other things that take long to make are kept: $XDG_CACHE_HOME or ~/.cache, then
    sequoia/models and so on."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sequoia" / kind


def gguf_name(file: Path) -> str:
    """The model's name: the file's, without the quantisation at its end."""
    return re.sub(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", "", file.stem, flags=re.IGNORECASE)


def converted_folder(file: Path, notice: Callable[[str], None] | None = None) -> Path:
    """The folder of the GGUF file's model in transformers' own format; converts it if this is the first time.

    A conversion appears under its final name whole or not at all, also when two run at once or one is interrupted.

    Raises:
        FileError: the file is damaged, or the cache cannot be written.
        ModelError: transformers cannot read this kind of model from GGUF.
    """
    final = cache_folder() / f"{gguf_name(file)}-{_key(file)}"
    if _is_complete(final):
        return final
    if notice is not None:
        notice(f"converting {gguf_name(file)}, once")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        with _temporary_sibling(final) as folder:
            _convert(file, folder)
            _publish(folder, final)
    except OSError as error:
        raise FileError(
            f"cannot write the converted {gguf_name(file)} to {final.parent}: {error.strerror or error}. "
            "Free some space there, or set XDG_CACHE_HOME to another folder."
        ) from error
    return final


def _key(file: Path) -> str:
    """Identifies the content from its size and samples spread over it: any other training changes every tensor."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_CONVERSION} {size}".encode())
    with file.open("rb") as stream:
        for sample in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


@contextmanager
def _temporary_sibling(final: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, final: Path) -> None:
    if final.exists() and not _is_complete(final):
        shutil.rmtree(final, ignore_errors=True)
    folder.chmod(0o755)
    try:
        folder.rename(final)
    except OSError:
        # Another process was first; its conversion is as good.
        if not _is_complete(final):
            raise


def _remove_abandoned(parent: Path) -> None:
    """A killed process cannot tidy up: drop temporary folders nobody has touched for an hour."""
    for folder in parent.glob(".*.*"):
        try:
            abandoned = time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS
        except OSError:
            continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)


def _convert(file: Path, folder: Path) -> None:
    try:
        model, tokenizer = _read_gguf(file)
    except ImportError as error:
        raise ModelError(f"reading {file.name} needs two more packages: `pip install gguf accelerate`.") from error
    except Exception as error:
        raise _unreadable(file, error) from error
    # fp32 on disk: Q4 and Q8 values (a 16-bit scale times an integer) are exact in it and not in bf16, and for
    # 135M parameters the cast while loading costs 0.2 s.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_gguf(file: Path) -> tuple[Any, Any]:
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "local_files_only": True,
    }
    # Releases that can compute on packed weights must be told not to; earlier ones always unpack.
    unpack: dict[str, Any] = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if _can_stay_packed() else {}
    )
    causal_lm: Any = AutoModelForCausalLM
    with _without_legacy_bar():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = causal_lm.from_pretrained(**source, **unpack, dtype=torch.float32)
    _split_digits(tokenizer, file)
    return model, tokenizer


def _can_stay_packed() -> bool:
    return hasattr(transformers, "GgufConfig")


@contextmanager
def _without_legacy_bar() -> Iterator[None]:
    """The GGUF reader draws a bar of its own, which no setting of transformers reaches."""
    reader: Any = gguf_reader
    bar = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar


def _split_digits(tokenizer: Any, file: Path) -> None:
    if _pre_tokenizer_name(file) in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _pre_tokenizer_name(file: Path) -> str | None:
    from gguf import GGUFReader

    reader: GGUFReader = GGUFReader(file)
    field = reader.fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _unreadable(file: Path, error: Exception) -> FileError | ModelError:
    with file.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if not is_gguf:
        return FileError(f"{file} is no GGUF file: it does not begin with 'GGUF'. Download it again.")
    return ModelError(
        f"cannot read {file.name}: {reason}. The file may be cut short, or of a kind transformers "
        f"{transformers.__version__} cannot read; a folder with config.json and *.safetensors works too."
    )
