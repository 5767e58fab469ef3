"""Where a model's tensors lie in its safetensors files, read from the files' headers alone.

A file begins with the header's length in 8 bytes, little-endian, and the header as JSON; offsets in it count from the
header's end (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from sequoia.errors import FileError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's bytes in a file."""

    name: str
    file: Path
    start: int
    end: int
    shape: tuple[int, ...]
    format: str  # as the file names it: "BF16"

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it may be cast when it is loaded."""
        return self.format in _FLOATS

    @property
    def dtype(self) -> torch.dtype:
        """Raises:
        FileError: it holds no floating-point numbers, or not as many bytes as its shape needs.
        """
        if not self.is_float:
            raise FileError(f"{self.name} in {self.file} holds {self.format}, not 16-, 32- or 64-bit floats.")
        found, needed = self.end - self.start, self.bytes_as(_FLOATS[self.format])
        if found != needed:
            raise FileError(
                f"{self.name} in {self.file} has {found} bytes, and its shape {list(self.shape)} needs {needed}. "
                "Download or save the model again."
            )
        return _FLOATS[self.format]

    def bytes_as(self, dtype: torch.dtype) -> int:
        """Bytes in memory, cast to `dtype` if it may be."""
        return self.numbers * (dtype.itemsize if self.is_float else _BYTES.get(self.format, 1))


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """The tensors of a folder's safetensors files by name.

    Raises:
        FileError: there are none, one is missing, or a header is damaged or speaks of more than the file holds.
    """
    places: dict[str, TensorPlace] = {}
    for file in _files(folder):
        try:
            places |= _in_file(file)
        except OSError as error:
            raise FileError(f"cannot read {file}: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise FileError(f"{file} is damaged: {error}. Download or save the model again.") from error
    return places


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return sorted({folder / name for name in names})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{index} is damaged: {error}. Download or save the model again.") from error
    if not (folder / _SINGLE).is_file():
        raise FileError(f"{folder} holds no {_SINGLE}. Save the model as safetensors.")
    return [folder / _SINGLE]


def _in_file(file: Path) -> dict[str, TensorPlace]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > size:
            raise ValueError(f"its header is longer than the file's {size} bytes")
        header: Mapping[str, Any] = json.loads(stream.read(length))
    places = {name: _place(name, file, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    for place in places.values():
        if place.end > size:
            raise ValueError(f"{place.name} ends at byte {place.end}, and the file has {size}")
    return places


def _place(name: str, file: Path, base: int, entry: Mapping[str, Any]) -> TensorPlace:
    start, end = entry["data_offsets"]
    return TensorPlace(name, file, base + start, base + end, tuple(entry["shape"]), entry["dtype"])
