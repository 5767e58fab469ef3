"""Disks that fail, files that change and Ctrl-C: a clear error soon, nothing left over, and a model that goes on."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from streamed import engine, saved, streamed
from tiny_models import ids, tiny

from sequoia.engine import Engine
from sequoia.errors import FileError
from sequoia.model.offload import disk
from sequoia.params import SamplingParams
from sequoia.speculate.session import Session

SOON = 2.0  # seconds
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPT = ids(20)


class Disk:
    """Reads as `os.preadv` does, but for what is asked of it, from the next read on."""

    def __init__(self) -> None:
        self.fault: Callable[[int, list[memoryview], int], int] | None = None

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(descriptor, buffers, offset) if self.fault is None else self.fault(descriptor, buffers, offset)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tiny("llama", {"num_hidden_layers": 6}), tmp_path / "tiny", torch.bfloat16, "24KB")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C counts, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at_work(folder: Path, disk: Disk) -> tuple[Engine, tuple[int, ...]]:
    """A streamed engine, and what it says when nothing is wrong."""
    made = engine(streamed(folder, torch.bfloat16, resident=[1], slots=3, read=disk))
    return made, made.generate(PROMPT, GREEDY).token_ids


@contextmanager
def soon() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON


def failing(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def cut_short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    return min(100, os.preadv(descriptor, buffers, offset))


def at_its_end(*_: object) -> int:
    return 0


def raising(*_: object) -> int:
    raise RuntimeError("not thought of")


FAULTS = {
    "disk error": (failing, r"cannot read model\.layers\.\d\..* from .*\.safetensors \(byte \d+\): Input/output error"),
    "short read": (cut_short, r"\.safetensors ends at byte \d+, and model\.layers\.\d\.\S+ .*goes on to byte"),
    "end of file": (at_its_end, r"\.safetensors ends at byte \d+, and model\.layers\.\d"),
    "a bug": (raising, r"cannot read model\.layers\.\d.*RuntimeError: not thought of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_soon_and_the_model_goes_on_after_it(fault: str, folder: Path) -> None:
    disk, (action, message) = Disk(), FAULTS[fault]
    made, expected = at_work(folder, disk)
    for _ in range(2):
        disk.fault = action
        with soon(), pytest.raises(FileError, match=message):
            made.generate(PROMPT, GREEDY)
        disk.fault = None
        assert made.generate(PROMPT, GREEDY).token_ids == expected


def test_a_session_goes_on_after_a_fault(folder: Path) -> None:
    disk = Disk()
    made, expected = at_work(folder, disk)
    session = made.session(PROMPT, GREEDY)
    session.step()
    disk.fault = failing
    with pytest.raises(FileError):
        rest(session)
    disk.fault = None
    emitted = [*session.tokens[len(PROMPT) :], *rest(session)]
    assert tuple(emitted) == expected


def rest(session: Session) -> list[int]:
    """What it emits up to its end."""
    emitted: list[int] = []
    while session.finish_reason is None:
        emitted += session.step().token_ids
    return emitted


def test_a_file_that_was_cut_short(folder: Path) -> None:
    made, _ = at_work(folder, Disk())
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 5000)
    with soon(), pytest.raises(FileError, match=r"safetensors (ends at byte|has changed)"):
        made.generate(PROMPT, GREEDY)


def test_a_file_that_was_written_to(folder: Path) -> None:
    made, _ = at_work(folder, Disk())
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size - 2)
            stream.write(b"\x00\x00")
        os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    with soon(), pytest.raises(FileError, match=r"safetensors has changed since it was loaded\. Load the model again"):
        made.generate(PROMPT, GREEDY)


def test_a_file_that_was_replaced_is_read_on(folder: Path) -> None:
    made, expected = at_work(folder, Disk())
    for file in folder.glob("*.safetensors"):
        other = file.with_suffix(".new")
        other.write_bytes(b"another model")
        other.replace(file)
    assert made.generate(PROMPT, GREEDY).token_ids == expected


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["quick disk", "slow disk"])
def test_ctrl_c_at_any_moment(seconds: float, folder: Path) -> None:
    disk = Disk()
    made, expected = at_work(folder, disk)

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(seconds)
        return os.preadv(descriptor, buffers, offset)

    def long() -> None:
        started = time.monotonic()
        while time.monotonic() - started < 10 * SOON:
            made.generate(PROMPT, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))

    for after in (0.01, 0.05, 0.13, 0.31):
        disk.fault = slow
        timer = threading.Timer(after, _thread.interrupt_main)
        timer.start()
        with soon(), pytest.raises(KeyboardInterrupt):
            long()
        disk.fault = None
        assert made.generate(PROMPT, GREEDY).token_ids == expected


def test_threads_and_descriptors_go_after_faults(folder: Path) -> None:
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    disk = Disk()
    made: Engine | None = at_work(folder, disk)[0]
    assert made is not None
    disk.fault = failing
    with pytest.raises(FileError):
        made.generate(PROMPT, GREEDY)
    made = None
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_closed_link_says_so(folder: Path) -> None:
    model = streamed(folder, torch.bfloat16)
    assert model.link is not None
    model.link.close()
    model.link.close()
    with soon(), pytest.raises(FileError, match="closed"):
        model.forward(torch.tensor(PROMPT), model.new_cache())


@pytest.mark.slow
def test_a_hundred_generations_leave_nothing_behind(folder: Path) -> None:
    disk = Disk()
    made, expected = at_work(folder, disk)
    counts = []
    for turn in range(100):
        if turn % 10 == 5:
            disk.fault = failing
            with pytest.raises(FileError):
                made.generate(PROMPT, GREEDY)
            disk.fault = None
        assert made.generate(PROMPT, GREEDY).token_ids == expected
        if turn % 20 == 19:
            gc.collect()
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), resident()))
    threads, descriptors, memory = zip(*counts, strict=True)
    assert len(set(threads)) == len(set(descriptors)) == 1
    assert memory[-1] - memory[1] < 4 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_fill_counts_its_pieces() -> None:
    fill = disk.Fill(3)
    fill.piece_done()
    fill.piece_done("first")
    fill.piece_done("second")
    fill.wait()
    assert fill.error == "first"
