"""Torch files of plain data: growmaps as the reference writes them, and nothing that runs code."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from sequoia.errors import FileError
from sequoia.model.torch_files import load_data, to_bytes
from sequoia.tree.formats import growmap, read
from sequoia.tree.shape import TreeShape

SHAPE = TreeShape([-1, 0, 0, 1, 1, 3])


def test_growmaps_make_the_round_trip(tmp_path):
    file = tmp_path / "growmap.pt"
    for shape in (SHAPE, TreeShape.root_only(), TreeShape.kary(3, 4), TreeShape.chain(40), TreeShape.beam(5, 7)):
        file.write_bytes(to_bytes(growmap(shape)))
        assert read(load_data(file)) == shape.in_level_order()


def test_what_is_written_is_what_the_reference_writes(tmp_path):
    file = tmp_path / "growmap.pt"
    file.write_bytes(to_bytes(growmap(SHAPE)))
    record = torch.load(file, weights_only=True)
    assert list(record) == ["roots", "branches", "Successors", "mask", "depth", "size"]
    assert record["mask"].dtype == record["depth"].dtype == torch.int64
    assert record["mask"].shape == (6, 6)
    assert torch.equal(record["depth"], torch.tensor([0, 1, 1, 2, 2, 3]))
    assert record["Successors"] == [[1, 2], [3, 4], [], [5], [], []]
    assert type(record["size"]) is int


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_any_number_are_read(tmp_path, dtype, zipped):
    record = {key: torch.tensor(value) if isinstance(value, np.ndarray) else value for key, value in parts().items()}
    record["mask"] = record["mask"].to(dtype)
    record["roots"] = [torch.tensor(level) for level in record["roots"]]
    record["size"] = torch.tensor(record["size"])
    torch.save(record, tmp_path / "growmap.pt", _use_new_zipfile_serialization=zipped)
    assert read(load_data(tmp_path / "growmap.pt")) == SHAPE


def parts():
    return growmap(SHAPE)


def test_vectors_are_arrays(tmp_path):
    torch.save(torch.tensor([0, 0.5, 0.5], requires_grad=True), tmp_path / "vector.pt")
    assert load_data(tmp_path / "vector.pt").tolist() == [0, 0.5, 0.5]


class Trap:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_not_run(tmp_path, zipped):
    torch.save({"mask": Trap(tmp_path / "sprung")}, tmp_path / "trap.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(FileError, match=r"trap\.pt is no torch file of tensors, lists and numbers alone"):
        load_data(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def test_damaged_files_are_refused(tmp_path):
    whole = to_bytes(growmap(SHAPE))
    for damaged in (b"", b"{}", whole[: len(whole) // 2], whole[100:], whole[:10] + b"x" * 200):
        (tmp_path / "growmap.pt").write_bytes(damaged)
        with pytest.raises(FileError, match=r"growmap\.pt is no torch file"):
            load_data(tmp_path / "growmap.pt")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileError, match=r"cannot read .*none\.pt: No such file"):
        load_data(tmp_path / "none.pt")
    with pytest.raises(FileError, match="cannot read"):
        load_data(tmp_path)
