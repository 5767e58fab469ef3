"""Where weights go and in which number format: device, dtype, and whether they fit."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sequoia.errors import FileError, ModelError, UsageError
from sequoia.model.tensor_files import tensor_places

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
}

INT8, INT4 = "int8", "int4"


def resolve_device(device: str | torch.device) -> torch.device:
    """The device to run on: "auto" is CUDA where PyTorch finds it, else the CPU.

    Raises:
        UsageError: no such device here; the message lists those there are.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _device_error(device) from error
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }
    if (resolved.index or 0) >= available.get(resolved.type, 0):
        raise _device_error(device)
    return resolved


def _device_error(device: object) -> UsageError:
    choices = ["auto", "cpu"]
    if torch.cuda.is_available():
        choices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return UsageError(f"device must be one of {', '.join(choices)} on this machine, not {str(device)!r}.")


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The number format of the weights: "auto" is bf16 on CUDA and on CPUs with bf16 instructions, else fp32.

    Raises:
        UsageError: not one of the formats; the message lists them.
    """
    if dtype == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and cpu_has_bf16())
        return torch.bfloat16 if fast else torch.float32
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise UsageError(f"dtype must be one of auto, {INT8}, {INT4}, {', '.join(DTYPES)}, not {str(dtype)!r}.")


@dataclass(frozen=True)
class Numbers:
    """Number formats of a model."""

    dtype: torch.dtype  # of activations, and of all weights that are not integers
    bits: int | None = None  # of linear layers in integers: 8 or 4

    @property
    def name(self) -> str:
        """As it is asked for and shown: int8, int4, bf16, fp16 or fp32."""
        names = (name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return f"int{self.bits}" if self.bits else next(names, str(self.dtype).removeprefix("torch."))


def resolve_numbers(dtype: str | torch.dtype | Numbers, device: torch.device) -> Numbers:
    """The formats that `dtype` names: those of `resolve_dtype`, or integers for the weights and "auto" for the rest.

    Raises:
        UsageError: not one of the formats, or not one that runs on this device.
    """
    if isinstance(dtype, Numbers):
        return dtype
    if dtype == INT4:
        return Numbers(resolve_dtype("auto", device), bits=4)
    if dtype not in (INT8, torch.int8):
        return Numbers(resolve_dtype(dtype, device))
    if device.type != "cpu":
        raise UsageError(f'int8 weights run on CPUs for now, not on {device}. Use device="cpu" or dtype="bf16".')
    return Numbers(resolve_dtype("auto", device), bits=8)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 numbers in hardware (AVX-512 BF16, AMX, or Arm's BF16)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(getattr(torch.cpu, probe, bool)() for probe in probes):
        return True
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return bool(re.search(r"^(?:flags|Features)\s*:.*\b(?:avx512_bf16|amx_bf16|bf16)\b", text, re.MULTILINE))


def check_memory(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that clearly do not fit; silent where either figure is unknown.

    Raises:
        ModelError: the weights alone are larger than the device's free memory.
    """
    needed, free = weight_bytes(folder, dtype), free_bytes(device)
    if needed is not None and free is not None and needed > free:
        smaller = ', dtype="bf16"' if dtype == torch.float32 else ""
        raise ModelError(
            f"{name} needs {_gib(needed)} GiB for its weights, but {device} has {_gib(free)} GiB of memory free. "
            f"Choose a smaller model{smaller}, a device with more memory, or offload, which streams them."
        )


def weight_bytes(folder: Path, dtype: torch.dtype) -> int | None:
    """Bytes of a folder's safetensors weights once cast to `dtype`; None where their headers cannot be read."""
    try:
        return sum(place.bytes_as(dtype) for place in tensor_places(folder).values())
    except FileError:
        return None


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device; None where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [limit for limit in (_available_memory(), _container_memory()) if limit is not None]
    return min(known, default=None)


def resident_bytes() -> int:
    """Bytes of this process in memory, shared libraries included; its peak where only that is known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> None:
    """Give back to the system what was freed, where the C library keeps it for later (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _available_memory() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _container_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    # File pages count as used there but can be reclaimed.
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        reclaimable = re.search(r"^file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + (int(reclaimable[1]) if reclaimable else 0))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
