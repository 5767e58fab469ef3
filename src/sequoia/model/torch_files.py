"""Plain data in torch files, read without running what a file says."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia.errors import FileError


def load_data(path: str | os.PathLike[str]) -> Any:
    """The dictionaries, lists, numbers and texts in a torch file; tensors as NumPy arrays, those without axes as
    numbers.

    Raises:
        FileError: the file is missing, damaged, or holds something else, which could run code when it is loaded.
    """
    return _from_torch(_load(path))


def _load(path: str | os.PathLike[str], mmap: bool = False) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}.") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes torch and pickle raise nearly anything
        raise FileError(
            f"{path} is no torch file of tensors, lists and numbers alone, or is damaged. Write it again."
        ) from error


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a torch file that holds nothing but tensors by name; where possible each is read as it is used.

    Raises:
        FileError: as for `load_data`, or it holds something besides.
    """
    found = _load(path, mmap=zipfile.is_zipfile(path))
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FileError(f"{path} is no torch file of tensors by name. Save the model again.")
    return {str(name): value for name, value in found.items()}


def to_bytes(data: Any) -> bytes:
    """The torch file that `load_data` reads back: NumPy arrays become tensors of the same kind of number."""
    buffer = io.BytesIO()
    torch.save(_to_torch(data), buffer)
    return buffer.getvalue()


def _from_torch(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # NumPy lacks some of torch's short floats.
        wide = value.float() if value.is_floating_point() and value.dtype != torch.float64 else value
        return wide.item() if wide.ndim == 0 else wide.detach().numpy()
    if isinstance(value, Mapping):
        return {key: _from_torch(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_from_torch(entry) for entry in value]
    return value


def _to_torch(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: _to_torch(entry) for key, entry in value.items()}
    return [_to_torch(entry) for entry in value] if isinstance(value, list) else value
