"""How a layer's matrices lie in a slot of the ring, and the reads that bring them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sequoia.model.offload.files import BLOCK
from sequoia.model.tensor_files import TensorPlace

PIECE = 1 << 21
"""Bytes of a file read at once, at most: enough for the disk's full rate, and few enough to have several in flight."""

_GAP = 1 << 16  # bytes between two tensors that are rather read over than around
_ALIGNMENT = 64  # bytes, of matrices that are written anew


@dataclass(frozen=True)
class Copy:
    """Numbers of a piece on their way to the slot."""

    start: int  # bytes, in the piece
    dtype: torch.dtype
    target: int  # bytes, in the slot
    numbers: int


@dataclass(frozen=True)
class Piece:
    """One read."""

    file: Path
    start: int  # a multiple of BLOCK
    needed: int  # bytes; the file may end behind them
    target: int | None  # where in the slot the bytes go as they are; None where `copy` says it
    copy: Copy | None
    names: str  # of the tensors in it

    @property
    def length(self) -> int:
        """Bytes that are read: whole blocks."""
        return _whole(self.needed)


@dataclass(frozen=True)
class Matrix:
    """Where a matrix lies in the slot."""

    start: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, slot: Tensor) -> Tensor:
        """The matrix itself, in a slot's bytes."""
        return slot[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """One layer's way from its files to a slot."""

    matrices: tuple[Matrix, ...]
    pieces: tuple[Piece, ...]  # in the order of the files
    size: int  # bytes of the slot

    @property
    def read_bytes(self) -> int:
        """Of the files, for each pass."""
        return sum(piece.needed for piece in self.pieces)


def layer_layout(groups: Sequence[Sequence[TensorPlace]], dtype: torch.dtype) -> LayerLayout:
    """Matrices made of one tensor each are read to where they are used. Those that are several, one below the other, or
    whose numbers are not `dtype`, take their way through a thread's own buffer.

    Args:
        groups: the tensors of each matrix, all with as many columns.

    Raises:
        FileError: a tensor holds no floats.
    """
    straight = [group[0] for group in groups if len(group) == 1 and _is_ready(group[0], dtype)]
    found, pieces, base = _read_in_place(straight, dtype)
    for group in groups:
        if group[0] not in found:
            found[group[0]] = Matrix(base, _stacked(group), dtype)
            for place in group:
                pieces += _copied(place, dtype, base)
                base += place.numbers * dtype.itemsize
            base = -(-base // _ALIGNMENT) * _ALIGNMENT
    pieces.sort(key=lambda piece: (piece.file, piece.start))
    return LayerLayout(tuple(found[group[0]] for group in groups), tuple(pieces), _whole(base))


def _is_ready(place: TensorPlace, dtype: torch.dtype) -> bool:
    """Whether the numbers may be used where the file's blocks put them."""
    return place.dtype == dtype and place.start % dtype.itemsize == 0


def _stacked(group: Sequence[TensorPlace]) -> tuple[int, ...]:
    return sum(place.shape[0] for place in group), *group[0].shape[1:]


def _read_in_place(
    places: Iterable[TensorPlace], dtype: torch.dtype
) -> tuple[dict[TensorPlace, Matrix], list[Piece], int]:
    """Where each lies, the reads, and where the slot goes on."""
    found: dict[TensorPlace, Matrix] = {}
    pieces: list[Piece] = []
    base = 0
    for run in _runs(places):
        start, end = run[0].start // BLOCK * BLOCK, run[-1].end
        found |= {place: Matrix(base + place.start - start, place.shape, dtype) for place in run}
        for first in range(start, end, PIECE):
            last = min(first + PIECE, end)
            names = [place.name for place in run if place.start < last and place.end > first] or [run[0].name]
            named = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
            pieces.append(Piece(run[0].file, first, last - first, base + first - start, None, named))
        base += _whole(end - start)
    return found, pieces, base


def _runs(places: Iterable[TensorPlace]) -> Iterator[list[TensorPlace]]:
    """Tensors of one file that lie so close that they are read as one."""
    for _, group in groupby(sorted(places, key=lambda place: (place.file, place.start)), key=lambda place: place.file):
        run: list[TensorPlace] = []
        for place in group:
            if run and place.start - run[-1].end > _GAP:
                yield run
                run = []
            run.append(place)
        yield run


def _copied(place: TensorPlace, dtype: torch.dtype, base: int) -> Iterator[Piece]:
    """Reads of a tensor that is written anew from byte `base` of the slot on."""
    width = place.dtype.itemsize
    most = PIECE // width
    for first in range(0, place.numbers, most):
        count = min(most, place.numbers - first)
        begin = place.start + first * width
        start = begin // BLOCK * BLOCK
        copy = Copy(begin - start, place.dtype, base + first * dtype.itemsize, count)
        yield Piece(place.file, start, begin + count * width - start, None, copy, place.name)


def _whole(count: int) -> int:
    return -(-count // BLOCK) * BLOCK
