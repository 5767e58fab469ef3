"""What absolute times must stand beside: the machine, its threads, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sequoia import __version__
from sequoia.model.machine import cpu_name, gpu_name

_CHECKOUT = Path(__file__).parents[4]  # where the package runs from its source


def machine(device: torch.device) -> dict[str, Any]:
    """Plain data, the same each time until something changes; None for what cannot be known here."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "gpu": gpu_name(device),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "transformers": version("transformers"), "sequoia": __version__},
        "commit": commit(_CHECKOUT),
    }


def commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, "+" for changes since; None where it is no checkout of its own."""
    if not (root / ".git").exists():
        return None
    name = _git(root, "rev-parse", "--short=12", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return name and name + ("+" if changes else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError, AttributeError):
        return None
