"""Plain data in torch files, read without running what a file says."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sequoia.errors import FileError


def load_data(path: str | os.PathLike[str]) -> Any:
    """The dictionaries, lists, numbers and texts in a torch file; tensors as NumPy arrays, those without axes as
    numbers.

    Raises:
        FileError: the file is missing, damaged, or holds something else, which could run code when it is loaded.
    """
    try:
        return _from_torch(torch.load(path, map_location="cpu", weights_only=True))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}.") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes torch and pickle raise nearly anything
        raise FileError(
            f"{path} is no torch file of tensors, lists and numbers alone, or is damaged. Write it again."
        ) from error


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
