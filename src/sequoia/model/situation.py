"""What a proof rests on, so that one that was kept is taken for an identical situation only."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sequoia.model.machine import cpu_name
from sequoia.model.placement import Numbers

_PACKAGES = ("transformers", "safetensors", "numpy")
_SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "GOMP_", "TORCH_", "PYTORCH_")  # begin their names


def situation(folder: Path, numbers: Numbers) -> dict[str, Any]:
    """The model's files, the code, the libraries and their settings, and the processor, as plain data.

    Args:
        folder: of a model in transformers' format.
        numbers: that it runs in, on the CPU.
    """
    return {
        "files": {file.name: _identity(file) for file in sorted(folder.iterdir()) if file.is_file()},
        "numbers": [numbers.name, str(numbers.dtype)],
        "code": _code(Path(__file__).parent),
        "python": platform.python_version(),
        "torch": [torch.__version__, torch.version.git_version],
        "packages": {name: version(name) for name in _PACKAGES},
        "processor": [cpu_name(), _instructions(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "torch settings": [
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
        ],
        "environment": {name: text for name, text in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def _identity(file: Path) -> list[Any]:
    """Changes whenever the file is written or another takes its place."""
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _code(folder: Path) -> str:
    """A digest of what loads, proves and runs models here."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _instructions(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's instruction sets as the system lists them; empty where it does not."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return hashlib.sha256(found[1].encode()).hexdigest() if found else ""
