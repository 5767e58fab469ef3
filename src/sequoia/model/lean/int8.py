"""Linear layers in 8-bit integers: a scale for each output of the weights, and one for each row, found as it comes.

Every number a row meets depends on that row alone, and sums of integers are exact in any order: a row gives the same
bits in a tree as alone, which is what makes speculation lossless with respect to the quantised model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.model.lean.fused import PLAIN, Kernels, in_8_bit

_LARGEST = 127
_SMALLEST_SCALE = 1e-30  # outputs of zeros alone have no scale of their own
_PIECE = 4096  # outputs quantised at a time: a large head is not copied whole in 32 bit
_TYPICAL_ROWS = 16  # that the packed layout is chosen for
_MIDDLE = 128  # stands for zero in numbers without a sign


class Int8Rows(NamedTuple):
    """Activations in two terms: (first half of the values + second half / 128) * scale.

    One term alone costs perplexity, where a few numbers of a row are far larger than the others; a kernel that is busy
    reading the weights takes the second nearly for nothing.
    """

    values: Tensor  # int8, [2 * rows, in]
    scale: Tensor  # in 32 bit, as all that is calculated with it, [rows, 1]


def quantised(rows: Tensor) -> Int8Rows:
    """Rows by their largest magnitude each. [rows, in]"""
    return Int8Rows(*in_8_bit(rows))


class Int8Weight:
    """A quantised matrix and its bias. Products leave the kernel in the weight's format, and go on in 32 bit.

    Args:
        weight: [out, in]; not kept.
        bias: [out] or None; not quantised.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded = [_rounded(piece) for piece in torch.split(weight, _PIECE)]
        scale, values = (torch.cat(parts) for parts in zip(*rounded, strict=True))
        self._scale, self._is_packed = scale, has_kernels()
        self._bias = None if bias is None else bias.float()
        self._dtype = weight.dtype
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)  # the kernel's zero points
        self._values = _pack(values) if self._is_packed else values

    def __call__(self, rows: Int8Rows, kernels: Kernels = PLAIN) -> Tensor:
        """[rows, in] → [rows, out]"""
        found = kernels.summed(self._products(rows.values), rows.scale)
        return found if self._bias is None else found.add_(self._bias)

    def plus(self, rows: Int8Rows, other: Tensor, kernels: Kernels = PLAIN) -> Tensor:
        """self(rows) + other"""
        total = kernels.added(self._products(rows.values), rows.scale, other)
        return total if self._bias is None else total.add_(self._bias)

    def gated(self, rows: Int8Rows, activation: Callable[[Tensor], Tensor], kernels: Kernels) -> Int8Rows:
        """activation(gate) * up in 8 bit, where the outputs are a gate's and as many more."""
        if self._bias is None:
            return Int8Rows(*kernels.gated_in_8_bit(self._products(rows.values), rows.scale, activation))
        gate, up = self(rows, kernels).chunk(2, dim=-1)
        return Int8Rows(*kernels.in_8_bit(activation(gate).mul_(up)))

    def dense(self) -> Tensor:
        """[out, in] in the weight's format."""
        values = self._values.to_dense().T if self._is_packed else self._values
        return (values * self._scale[:, None]).to(self._dtype)

    def _products(self, values: Tensor) -> Tensor:
        if self._is_packed:
            return _multiplied(values, self._values, self._scale, self._zeros, self._dtype)
        # The same sums, of integers in 32-bit floats.
        return functional.linear(values.float(), self._values.float()).mul_(self._scale).to(self._dtype)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale [out] and 8-bit values [out, in]."""
    whole = weight.float()
    scale = whole.abs().amax(dim=1).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
    return scale, (whole / scale[:, None]).round_().to(torch.int8)


@cache
def has_kernels() -> bool:
    """Whether torch has oneDNN's integer kernels here, and they are exact.

    Without instructions for it (VNNI, AMX) partial sums may stop at the end of 16 bit.
    """
    values = torch.full((16, 256), _LARGEST, dtype=torch.int8)
    values[::2] = -_LARGEST
    scale, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
    try:
        found = _multiplied(values, _pack(values), scale, zeros, torch.float32)
        _multiplied(values[:1], _pack(values), scale, zeros, torch.bfloat16)
    except (RuntimeError, AttributeError, TypeError):  # private operators may be missing or change
        return False
    return torch.equal(found, values.float() @ values.float().T)


@cache
def _takes_signs() -> bool:
    """Whether this CPU multiplies signed by signed numbers: AMX does. VNNI takes rows without a sign alone, and oneDNN
    runs signed ones in reference code there, which is far slower."""
    try:
        return bool(torch.cpu._is_amx_tile_supported())
    except AttributeError:  # private to torch
        return False


def _pack(values: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, [_TYPICAL_ROWS, values.shape[1]])
    return packed


def _multiplied(values: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    middle = 0 if _takes_signs() else _MIDDLE
    taken = values.view(torch.uint8) ^ _MIDDLE if middle else values  # the same numbers, each raised by 128
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        taken, 1.0, middle, packed, scale, zeros, None, 1.0, 0, dtype, "none", [], ""
    )
    return product
