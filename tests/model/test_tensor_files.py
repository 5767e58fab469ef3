"""Headers of safetensors files: where tensors lie, and what is said of damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sequoia.errors import FileError
from sequoia.model.tensor_files import tensor_places


def write(folder: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def test_places_are_where_the_bytes_are(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.arange(4, dtype=torch.int32),
        "c": torch.ones(2).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    places = tensor_places(tmp_path)
    assert set(places) == set(tensors)
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, tensor in tensors.items():
        place = places[name]
        found = torch.frombuffer(bytearray(data[place.start : place.end]), dtype=tensor.dtype).view(place.shape)
        assert torch.equal(found, tensor)
    assert (places["a"].dtype, places["c"].dtype) == (torch.float32, torch.bfloat16)
    assert (places["a"].bytes_as(torch.bfloat16), places["b"].bytes_as(torch.bfloat16)) == (12, 16)


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: place.file.name for name, place in tensor_places(tmp_path).items()} == index["weight_map"]
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileError, match=r"cannot read .*two\.safetensors: No such file"):
        tensor_places(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(FileError, match=r"index\.json is damaged"):
        tensor_places(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds no model\.safetensors\. Save the model as safetensors"):
        tensor_places(tmp_path)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10**12) + b"{}")
    with pytest.raises(FileError, match="its header is longer than the file's 10 bytes"):
        tensor_places(tmp_path)


def test_a_file_that_ends_before_its_tensors(tmp_path: Path) -> None:
    write(tmp_path, {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234")
    with pytest.raises(FileError, match=r"is damaged: w ends at byte \d+, and the file has \d+"):
        tensor_places(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"w in .* has 8 bytes, and its shape \[3\] needs 12"),
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "w in .* holds I64, not 16-, 32- or 64-bit floats"),
    ],
)
def test_tensors_that_cannot_be_read_as_floats(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    places = tensor_places(write(tmp_path, {"w": entry}, bytes(8)))
    with pytest.raises(FileError, match=message):
        _ = places["w"].dtype
