"""Linear layers in 8-bit integers: a scale for each output of the weights, and one for each row, found as it comes.

Every number a row meets depends on that row alone, and sums of integers are exact in any order: a row gives the same
bits in a tree as alone, which is what makes speculation lossless with respect to the quantised model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_LARGEST = 127  # of both signs, so that zero is in the middle
_FINER = 128  # rounding leaves at most a half; a power of two, so that no order of operations changes a bit
_SMALLEST_SCALE = 1e-30  # rows of zeros have no scale of their own
_TYPICAL_ROWS = 16  # that the packed layout is chosen for


@dataclass(frozen=True)
class Int8Rows:
    """Activations in two terms: (first half of the values + second half / 128) * scale.

    One term alone costs perplexity, where a few numbers of a row are far larger than the others; a kernel that is busy
    reading the weights takes the second nearly for nothing.
    """

    values: Tensor  # int8, [2 * rows, in]
    scale: Tensor  # in 32 bit, as all that is calculated with it, [rows, 1]


def quantised(rows: Tensor, divisors: Tensor | None = None) -> Int8Rows:
    """Rows by their largest magnitude each.

    Args:
        rows: [rows, in]
        divisors: [rows, 1]; quantise rows / divisors, of which only the scale takes notice.
    """
    steps, least = _steps()
    wide = rows.float()
    scales = torch.addcmul(least, wide.abs().amax(dim=-1, keepdim=True), steps)  # [2, rows, 1]
    terms = torch.div(wide, scales).round_()  # [2, rows, in]
    whole, finer = terms.unbind()
    finer.sub_(whole, alpha=_FINER)
    scale = scales[0] if divisors is None else scales[0] / divisors
    return Int8Rows(terms.to(torch.int8).flatten(0, 1), scale)


@cache
def _steps() -> tuple[Tensor, Tensor]:
    """What a row's largest magnitude is multiplied with for the scales of both terms, [2, 1, 1], and the least."""
    step = torch.tensor(1 / _LARGEST)
    return torch.stack([step, step / _FINER]).view(2, 1, 1), torch.tensor(_SMALLEST_SCALE)


class Int8Weight:
    """A quantised matrix and its bias. Products are in 32 bit, where small operations cost least.

    Args:
        weight: [out, in]; not kept.
        bias: [out] or None; not quantised.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        whole = weight.float()
        scale = whole.abs().amax(dim=1).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
        values = (whole / scale[:, None]).round_().to(torch.int8)
        self._scale, self._is_packed = scale, has_kernels()
        self._bias = None if bias is None else bias.float()
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)  # the kernel's zero points
        self._values = _pack(values) if self._is_packed else values

    def __call__(self, rows: Int8Rows) -> Tensor:
        """[rows, in] → [rows, out]"""
        sums = self._sums(rows)
        return sums.mul_(rows.scale) if self._bias is None else torch.addcmul(self._bias, sums, rows.scale)

    def plus(self, rows: Int8Rows, other: Tensor) -> Tensor:
        """self(rows) + other"""
        total = torch.addcmul(other, self._sums(rows), rows.scale)
        return total if self._bias is None else total.add_(self._bias)

    def _sums(self, rows: Int8Rows) -> Tensor:
        """[rows, out], without the rows' scales"""
        first, second = self._products(rows.values).chunk(2)
        return first.add_(second, alpha=1 / _FINER)

    def _products(self, values: Tensor) -> Tensor:
        if self._is_packed:
            return _multiplied(values, self._values, self._scale, self._zeros)
        # The same sums, of integers in 32-bit floats.
        return functional.linear(values.float(), self._values.float()).mul_(self._scale)


@cache
def has_kernels() -> bool:
    """Whether torch has oneDNN's integer kernels here, and they are exact.

    Without instructions for it (VNNI, AMX) partial sums may stop at the end of 16 bit.
    """
    values = torch.full((16, 256), _LARGEST, dtype=torch.int8)
    values[::2] = -_LARGEST
    scale, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
    try:
        found = _multiplied(values, _pack(values), scale, zeros)
    except (RuntimeError, AttributeError, TypeError):  # private operators may be missing or change
        return False
    return torch.equal(found, values.float() @ values.float().T)


def _pack(values: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, [_TYPICAL_ROWS, values.shape[1]])
    return packed


def _multiplied(values: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        values, 1.0, 0, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product
