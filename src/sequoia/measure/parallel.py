"""Many small independent tasks on a few processes, each on one thread."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextmanager
def mapped(work: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[Iterator[Result]]:
    """The results of `tasks` in their order, worked on by `workers` processes, or by this one if it is 1.

    Leaving the block early drops what has not begun.
    """
    if workers == 1:
        with _one_thread():
            yield map(work, tasks)
        return
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(min(workers, len(tasks) or 1), mp_context=spawn, initializer=_use_one_thread)
    try:
        with _interrupts_ignored():
            futures: list[Future[Result]] = [pool.submit(work, task) for task in tasks]
        yield (future.result() for future in futures)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    _use_one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # models this small run faster so


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started inside leave Ctrl-C, which a terminal sends to all, to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
