"""What this machine is, as far as times depend on it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model as it calls itself."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def gpu_name(device: torch.device) -> str | None:
    """None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
