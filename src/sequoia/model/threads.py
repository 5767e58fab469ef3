"""How many threads of the CPU to run on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from sequoia.errors import UsageError

_CHOSEN_OUTSIDE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUS = Path("/sys/devices/system/cpu")
_GROUP = Path("/sys/fs/cgroup")


def set_threads(count: int | None) -> None:
    """Run on `count` threads from now on; None for a number that suits the machine.

    Torch's own choice knows nothing of a container's share of the machine, and not in every build which CPUs are two
    halves of one core. So None takes threads away where there are too many of them, and never adds any: a number set
    in the environment or by the caller before stays.

    Raises:
        UsageError: no such number of CPUs here.
    """
    if count is not None:
        most = len(available_cpus())
        if not 1 <= count <= most:
            raise UsageError(f"threads must be an integer from 1 to {most}, the CPUs of this machine, not {count}.")
        torch.set_num_threads(count)
    elif not any(os.environ.get(name) for name in _CHOSEN_OUTSIDE):
        suitable = suitable_threads()
        if suitable < torch.get_num_threads():
            torch.set_num_threads(suitable)


def suitable_threads() -> int:
    """One for each core that this process may run on, and no more than a container's share of them."""
    cores = core_count(available_cpus())
    share = container_cpus()
    return cores if share is None else max(1, min(cores, round(share)))


def available_cpus() -> frozenset[int]:
    """Numbers of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_count(cpus: Iterable[int], root: Path = _CPUS) -> int:
    """Cores among logical CPUs; where the system does not say which of them share one, each counts."""
    return len({_core(cpu, root) for cpu in cpus})


def _core(cpu: int, root: Path) -> str:
    try:
        return (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def container_cpus(group: Path = _GROUP) -> float | None:
    """CPUs' worth of time that the control group may use; None without a limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
