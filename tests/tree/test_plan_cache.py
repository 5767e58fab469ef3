"""Plans in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sequoia.errors import FileError
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option, Prediction
from sequoia.tree.plan import Plan, PlanFile
from sequoia.tree.plan_cache import find, plan_path, plans_folder, store
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

PAIR = {
    "target": "Some Model-8B/x",
    "draft": "ngram",
    "vocab_size": 32,
    "target_dtype": "bf16",
    "draft_dtype": None,
    "device": "cpu",
    "threads": 2,
    "compiled": False,
    "offload": "off",
}


def _file(**changes: Any) -> PlanFile:
    off = Option("off", TreeShape.root_only(), Prediction(1.0, 0.0, 0.02, 0.001))
    latency = LatencyProfile({128: {1: Timing(0.02, 0.001)}}, {}, {})
    plan = Plan({"temperature": 0.0}, AcceptanceProfile([[0.5]]), (off,))
    return PlanFile(PAIR | changes, {}, {}, latency, (plan,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_stored_is_found() -> None:
    assert find(PAIR) is None
    path = store(_file())
    assert find(PAIR) == _file()
    assert path.parent == plans_folder()
    assert path.name.startswith("Some_Model_8B_x-ngram-")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("key", [key for key in PAIR if key != "threads"])
def test_another_pair_finds_nothing(key: str) -> None:
    store(_file())
    assert find(PAIR | {key: "other"}) is None


def test_names_that_look_alike_as_files_are_kept_apart() -> None:
    assert plan_path(PAIR | {"target": "a b"}) != plan_path(PAIR | {"target": "a_b"})


def test_other_threads_find_the_latest() -> None:
    for age, threads in ((30, 4), (10, 8), (20, 16)):
        path = store(_file(threads=threads))
        os.utime(path, (1e9 - age, 1e9 - age))
    found = find(PAIR)
    assert found is not None
    assert found.pair["threads"] == 8
    store(_file())
    exact = find(PAIR)
    assert exact is not None
    assert exact.pair["threads"] == 2


def test_a_later_plan_takes_the_place_of_the_earlier() -> None:
    store(_file())
    later = PlanFile(PAIR, {"cpu": "Abacus"}, {}, _file().latency, _file().plans)
    store(later)
    assert find(PAIR) == later


def test_a_damaged_plan_is_named() -> None:
    path = store(_file())
    path.write_text("{}")
    with pytest.raises(FileError, match=path.name):
        find(PAIR)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find(PAIR) is None
    with pytest.raises(FileError, match="cannot make"):
        store(_file())


def test_without_the_variable_it_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert plans_folder() == Path.home() / ".cache" / "sequoia" / "plans"
