"""accelerate's view of where training runs: one process, or as many as `accelerate launch` started."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sequoia.model.placement import resolve_device, resolve_dtype


def accelerator(device: str | torch.device = "auto") -> Any:
    """An `accelerate.Accelerator`, in bf16 where the hardware has it.

    Raises:
        UsageError: there is no such device.
    """
    accelerate: Any = importlib.import_module("accelerate")  # takes a while, and has no types

    place = resolve_device(device)
    precision = "bf16" if resolve_dtype("auto", place) is torch.bfloat16 else "no"
    return accelerate.Accelerator(cpu=place.type == "cpu", mixed_precision=precision)
