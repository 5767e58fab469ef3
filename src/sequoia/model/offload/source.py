"""A model's weights in their files, by the names that its parameters have in transformers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from sequoia.errors import FileError
from sequoia.model.offload.files import Read, WeightFile, read_tensor
from sequoia.model.tensor_files import TensorPlace, tensor_places


class WeightSource:
    """The open files of a model's folder.

    Args:
        prefix: of the parameters' names, which files of a model without its head leave out.
        read: see `WeightFile`.

    Raises:
        FileError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, prefix: str, read: Read = os.preadv) -> None:
        self.folder, self._prefix = folder, f"{prefix}."
        self._places = tensor_places(folder)
        paths = sorted({place.file for place in self._places.values()})
        self._files = {path: WeightFile(path, read) for path in paths}

    @property
    def files(self) -> list[WeightFile]:
        return list(self._files.values())

    def place(self, name: str) -> TensorPlace | None:
        """Where a parameter lies; None where the files lack it."""
        return self._places.get(name) or self._places.get(name.removeprefix(self._prefix))

    def places(self, names: Iterable[str]) -> list[TensorPlace]:
        """The same of several.

        Raises:
            FileError: one is missing.
        """
        found = {name: self.place(name) for name in names}
        missing = [name for name, place in found.items() if place is None]
        if missing:
            raise FileError(
                f"the weights in {self.folder} lack {len(missing)} tensors of the model, first {missing[0]!r}. "
                "Download or save the model again."
            )
        return [place for place in found.values() if place is not None]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter, read for keeps.

        Raises:
            FileError: it is missing, or cannot be read.
        """
        (place,) = self.places([name])
        return read_tensor(self._files[place.file], place, dtype)

    def close(self) -> None:
        """Nothing can be read any more."""
        for file in self._files.values():
            file.close()
