"""What was asked for: where weights may lie, how much fast memory there is, and for how many tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from sequoia.errors import UsageError
from sequoia.model.placement import Numbers, free_bytes, resident_bytes, weight_bytes

_LOADING = 1.3  # what weights take while they are brought into their fastest form, over what they take then
KINDS = ("auto", "disk", "host", "off")
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class OffloadRequest:
    """How a target is to be loaded.

    Args:
        kind: one of `KINDS`.
        budget: bytes of fast memory, all told; None for what is free.
        context: most tokens of a prompt and its answer; None for the default.
    """

    kind: str = "off"
    budget: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, offload: str, memory_budget: str | int | None, context: int | None) -> OffloadRequest:
        """Arguments as `sequoia.load` takes them.

        Raises:
            UsageError: one is out of range, or they contradict each other.
        """
        if offload not in KINDS:
            raise UsageError(f"offload must be one of {', '.join(KINDS)}, not {offload!r}.")
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        if budget is not None and offload == "off":
            raise UsageError('a memory budget is for offload, which is "off". Leave one of the two out.')
        if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < 1):
            raise UsageError(f"context must be an integer of at least 1, not {context!r}.")
        return cls(offload, budget, context)

    @property
    def must_stream(self) -> bool:
        """Whether it is not left to what fits."""
        return self.kind in ("disk", "host")

    def fits(self, folder: Path, numbers: Numbers, device: torch.device) -> bool:
        """Whether a folder's weights can stay where they are quickest; also where nobody knows."""
        needed = weight_bytes(folder, numbers.dtype)
        free = free_bytes(device)
        if self.budget is not None:
            taken = resident_bytes() if device.type == "cpu" else 0
            free = min(self.budget - taken, self.budget if free is None else free)
            needed = None if needed is None else round(needed * _LOADING)
        return needed is None or free is None or needed <= free

    def check(self, numbers: Numbers, device: torch.device) -> None:
        """Whether weights can be streamed to this device in these numbers.

        Raises:
            UsageError: they cannot.
        """
        if numbers.bits:
            raise UsageError(
                f'weights are streamed as bf16, fp16 or fp32, not as {numbers.name}. Use dtype="auto" or offload="off".'
            )
        if device.type != ("cpu" if self.kind in ("auto", "disk") else "cuda"):
            where = {"disk": "a CPU's memory", "host": "a CUDA device"}.get(self.kind, "a CPU's memory")
            other = "host" if self.kind in ("auto", "disk") else "disk"
            raise UsageError(f'offload "{self.kind}" streams to {where}, not to {device}. Use offload="{other}".')


RESIDENT = OffloadRequest()


def parse_bytes(size: str | int) -> int:
    """Bytes of "2GiB", "500 MB" or a number.

    Raises:
        UsageError: it is no such size, or zero.
    """
    found = _SIZE.fullmatch(str(size))
    unit = {name.lower(): factor for name, factor in _UNITS.items()}.get(found[2].lower()) if found else None
    count = int(float(found[1]) * unit) if found and unit else 0
    if count < 1:
        raise UsageError(f"a memory budget is a size such as 2GiB or 800MiB, not {size!r}.")
    return count


def show_bytes(count: int) -> str:
    """For people: "1.50 GiB", or MiB below one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
