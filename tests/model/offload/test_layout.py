"""Reads of a layer: every byte once, whole blocks, neighbours together, and everything where the matrices say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sequoia.model.offload.files import BLOCK
from sequoia.model.offload.layout import PIECE, LayerLayout, layer_layout
from sequoia.model.tensor_files import TensorPlace

FORMATS = {"BF16": torch.bfloat16, "F32": torch.float32}
ONE, TWO = Path("one"), Path("two")


def place(name: str, start: int, shape: tuple[int, int], number_format: str = "BF16", file: Path = ONE) -> TensorPlace:
    size = shape[0] * shape[1] * FORMATS[number_format].itemsize
    return TensorPlace(name, file, start, start + size, shape, number_format)


def filled(layout: LayerLayout, data: dict[Path, bytes], dtype: torch.dtype) -> torch.Tensor:
    """A slot as the reads would leave it."""
    slot = torch.zeros(layout.size, dtype=torch.uint8)
    for piece in layout.pieces:
        assert piece.start % BLOCK == piece.length % BLOCK == 0
        assert piece.needed <= piece.length <= PIECE + 2 * BLOCK
        read = torch.frombuffer(
            bytearray(data[piece.file][piece.start : piece.start + piece.length]), dtype=torch.uint8
        )
        if piece.target is not None:
            assert piece.target % BLOCK == 0
            slot[piece.target : piece.target + len(read)] = read
        elif (copy := piece.copy) is not None:
            numbers = read[copy.start : copy.start + copy.numbers * copy.dtype.itemsize].clone().view(copy.dtype)
            written = numbers.to(dtype).view(torch.uint8)
            slot[copy.target : copy.target + len(written)] = written
    return slot


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90_000)), min_size=1, max_size=6),
    st.integers(0, 9000),
    st.sampled_from(["BF16", "F32"]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_matrices_arrive(sizes: list[tuple[int, int]], start: int, number_format: str, dtype: torch.dtype) -> None:
    """Tensors of as many rows, and so many bytes after each; the first two are one matrix."""
    places = []
    for index, (rows, gap) in enumerate(sizes):
        places.append(place(f"t{index}", start, (rows, 24), number_format))
        start = places[-1].end + gap
    total = torch.randn(start // 2 + BLOCK, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    data = {ONE: bytes(total.view(torch.uint8).tolist())[:start]}
    groups = [places[:2], *([other] for other in places[2:])]
    layout = layer_layout(groups, dtype)
    slot = filled(layout, data, dtype)
    for group, matrix in zip(groups, layout.matrices, strict=True):
        parts = [
            torch.frombuffer(bytearray(data[ONE][each.start : each.end]), dtype=each.dtype).view(each.shape).to(dtype)
            for each in group
        ]
        assert torch.equal(matrix.view(slot).view(torch.uint8), torch.cat(parts).view(torch.uint8))


def test_neighbours_are_read_as_one_and_far_ones_are_not() -> None:
    near = layer_layout([[place("a", 100, (10, 10))], [place("b", 400, (10, 10))]], torch.bfloat16)
    assert [piece.names for piece in near.pieces] == ["a … b"]
    far = layer_layout([[place("a", 100, (10, 10))], [place("b", 400_000, (10, 10))]], torch.bfloat16)
    assert [piece.names for piece in far.pieces] == ["a", "b"]
    apart = layer_layout([[place("a", 100, (10, 10))], [place("b", 400, (10, 10), file=TWO)]], torch.bfloat16)
    assert [piece.file for piece in apart.pieces] == [ONE, TWO]


def test_large_tensors_are_read_in_pieces() -> None:
    layout = layer_layout([[place("a", 4096, (3000, 1000))]], torch.bfloat16)
    assert [piece.needed for piece in layout.pieces] == [PIECE, PIECE, 6_000_000 - 2 * PIECE]
    assert layout.read_bytes == 6_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reads_are_in_the_files_order(dtype: torch.dtype) -> None:
    groups = [[place("q", 9_000_000, (100, 100)), place("k", 5000, (100, 100))], [place("o", 5_000_000, (100, 100))]]
    layout = layer_layout(groups, dtype)
    assert [piece.names for piece in layout.pieces] == ["k", "o", "q"]
