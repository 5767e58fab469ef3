"""How many threads run: what is asked for, what the environment says, and what the machine and its container have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sequoia.errors import UsageError
from sequoia.model import threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine of 8 CPUs, two to a core, where torch has taken 8 threads and nobody has asked for a number."""
    state = {"threads": 8}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "available_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(threads, "core_count", lambda cpus: len(cpus) // 2)
    monkeypatch.setattr(threads, "container_cpus", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))
    return state


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_number_asked_for_is_set(machine, count):
    threads.set_threads(count)
    assert machine["threads"] == count


@pytest.mark.parametrize("count", [0, -1, 9])
def test_a_number_out_of_range_is_refused(machine, count):
    with pytest.raises(UsageError, match=rf"from 1 to 8, the CPUs of this machine, not {count}\."):
        threads.set_threads(count)
    assert machine["threads"] == 8


def test_by_default_there_is_one_for_each_core(machine):
    threads.set_threads(None)
    assert machine["threads"] == 4


@pytest.mark.parametrize(("share", "expected"), [(0.5, 1), (1.0, 1), (2.5, 2), (3.0, 3), (16.0, 4)])
def test_a_container_s_share_is_kept_to(machine, monkeypatch, share, expected):
    monkeypatch.setattr(threads, "container_cpus", lambda: share)
    threads.set_threads(None)
    assert machine["threads"] == expected


def test_the_default_adds_none(machine):
    machine["threads"] = 1
    threads.set_threads(None)
    assert machine["threads"] == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_environment_s_number_stays_unless_one_is_asked_for(machine, monkeypatch, name):
    monkeypatch.setenv(name, "8")
    threads.set_threads(None)
    assert machine["threads"] == 8
    threads.set_threads(2)
    assert machine["threads"] == 2


def test_cpus_that_share_a_core_count_once(tmp_path: Path):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert threads.core_count(range(4), tmp_path) == 2
    assert threads.core_count([0, 2], tmp_path) == 1
    assert threads.core_count(range(4), tmp_path / "missing") == 4


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("1 0\n", None), ("nonsense\n", None)]
)
def test_the_container_s_quota(tmp_path: Path, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    assert threads.container_cpus(tmp_path) == expected
    assert threads.container_cpus(tmp_path / "missing") is None


def test_this_machine_has_cpus():
    assert 1 <= threads.suitable_threads() <= len(threads.available_cpus())
