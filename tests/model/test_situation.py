"""What a proof rests on changes with what it rests on, and is plain data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from sequoia.model import situation as module
from sequoia.model.placement import Numbers
from sequoia.model.situation import situation

_NUMBERS = Numbers(torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "inner").mkdir()
    return tmp_path


def test_it_is_plain_data_and_stays_the_same(folder: Path) -> None:
    found = situation(folder, _NUMBERS)
    assert json.loads(json.dumps(found)) == found == situation(folder, _NUMBERS)
    assert list(found["files"]) == ["config.json"]


def test_formats_differ(folder: Path) -> None:
    kinds = [_NUMBERS, Numbers(torch.bfloat16), Numbers(torch.bfloat16, bits=8), Numbers(torch.float32, bits=8)]
    assert len({json.dumps(situation(folder, numbers)) for numbers in kinds}) == 4


def test_a_file_of_the_same_size_and_time_is_another_file(folder: Path) -> None:
    before, file = situation(folder, _NUMBERS), folder / "config.json"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text("[]")
    os.utime(file, ns=times)
    assert situation(folder, _NUMBERS) != before


def test_settings_of_the_kernels_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = situation(folder, _NUMBERS)
    monkeypatch.setenv("COLUMNS", "33")
    assert situation(folder, _NUMBERS) == before
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert situation(folder, _NUMBERS) != before


def test_the_digest_of_the_code_reads_every_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    digests = set()
    for name, text in (("a.py", "1"), ("inner/b.py", "1"), ("inner/b.py", "2"), ("a.txt", "1")):
        (tmp_path / name).write_text(text)
        digests.add(module._code(tmp_path))
    assert len(digests) == 3


def test_instructions_of_the_processor(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two", "none", "missing")]
    for file, text in zip(files, ("flags : sse avx\n", "flags : sse\n", "model : x\n"), strict=False):
        file.write_text(text)
    one, two, *unknown = map(module._instructions, files)
    assert one != two
    assert unknown == ["", ""]
