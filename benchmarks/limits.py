"""What the machine allows: how fast it reads memory, and how fast it multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8}
MEMORY = 2**30  # bytes: more than any cache holds
_SIDES = (1024, 2048)  # of the matrices: smaller ones stay in a core's cache, larger ones split better
_REPEATS = 8


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, to the end of what it started on a GPU."""
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Limits:
    """The best rates seen."""

    reading: dict[int, float]  # bytes of the buffer → bytes/s, all threads together
    multiplying: dict[str, float]  # number format → operations/s; none where torch has no such product

    @classmethod
    def measured(cls, sizes: Iterable[int], device: torch.device) -> Limits:
        """Rates of reading buffers of these sizes and one of `MEMORY` bytes, and of matrices in each format."""
        reading = {size: _read_rate(size, device) for size in {MEMORY, *sizes}}
        rates = {name: _matrix_rate(dtype, device) for name, dtype in FORMATS.items()}
        return cls(reading, {name: rate for name, rate in rates.items() if rate is not None})

    def __or__(self, other: Limits) -> Limits:
        """The better of two measurements of the same."""
        return Limits(_best(self.reading, other.reading), _best(self.multiplying, other.multiplying))

    def read_rate(self, size: int) -> float:
        """Bytes/s at which weights of `size` bytes can be read once per pass: faster where a cache holds them."""
        return max(self.reading[MEMORY], self.reading[size])

    def matrix_rate(self, number_format: str) -> float:
        return self.multiplying.get(number_format, max(self.multiplying.values()))


def _best(first: dict, second: dict) -> dict:
    return {key: max(rate, second[key]) for key, rate in first.items()}


def _least(call: Callable[[], object], device: torch.device) -> float:
    return min(seconds(call, device) for _ in range(_REPEATS))


def _read_rate(size: int, device: torch.device) -> float:
    buffer = torch.ones(size // 8, dtype=torch.int64, device=device)
    return 8 * len(buffer) / _least(buffer.sum, device)


def _matrix_rate(dtype: torch.dtype, device: torch.device) -> float | None:
    try:
        return max(
            2 * side**3 / _least(partial(_product(dtype), *_pair(side, dtype, device)), device) for side in _SIDES
        )
    except (RuntimeError, AttributeError):
        return None


def _product(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return torch._int_mm if dtype is torch.int8 else torch.matmul


def _pair(side: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    left, right = torch.randint(-9, 10, (2, side, side), device=device).to(dtype)
    return left, right.T  # as weights lie
