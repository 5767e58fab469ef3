"""Many small independent tasks on a few processes, each on one thread."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 8  # tasks waiting for each worker: few, so that leaving early is quick


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
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_use_one_thread)
    try:
        waiting = iter(tasks)
        with _interrupts_ignored():  # the first tasks start the processes
            begun = deque(pool.submit(work, task) for task in islice(waiting, workers))
        begun.extend(pool.submit(work, task) for task in islice(waiting, workers * _AHEAD))
        yield _results(pool, work, waiting, begun)
    finally:
        pool.shutdown(cancel_futures=True)


def _results(
    pool: ProcessPoolExecutor, work: Callable[[Task], Result], waiting: Iterator[Task], begun: deque[Future[Result]]
) -> Iterator[Result]:
    while begun:
        result = begun.popleft().result()
        begun.extend(pool.submit(work, task) for task in islice(waiting, 1))
        yield result


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
