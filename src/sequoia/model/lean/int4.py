"""Linear layers in 4-bit integers: a scale and a zero for each group of an output's weights; rows stay as they are.

torch's kernels read the integers themselves. On a CPU a row gives the same bits in a tree as alone.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.errors import UsageError

GROUP = 64  # weights
_STEPS = 15  # between the smallest and the largest of a group
_MIDDLE = 8  # the integer that stands for the zero
_FITS = 2
_ROWS = 64  # that are rounded at a time, so that they stay in the processor's caches
_SMALLEST_SCALE = 1e-8  # groups of one number alone have no scale of their own
_OUTPUTS = 16  # kernels take multiples
_TILES = {"cpu": (1,), "cuda": (8, 4, 2)}  # of 16 inputs, side by side in memory; on a CPU the kernel chooses


class Rounded(NamedTuple):
    """(values - 8) * scale + zero"""

    values: Tensor  # 0 … 15, in 32 bit, [out, in]
    scale: Tensor  # in the weight's format, as zero is, [out, groups]
    zero: Tensor

    def restored(self) -> Tensor:
        """The weights that it stands for, in 32 bit. [out, in]"""
        grouped = self.values.view(*self.scale.shape, GROUP) - _MIDDLE
        whole = torch.addcmul(self.zero.float()[..., None], grouped, self.scale.float()[..., None])
        return whole.flatten(1)


def rounded(weight: Tensor) -> Rounded:
    """Each group in equal steps, at first over its range, then fitted by least squares to the integers they gave.
    [out, in], where groups divide the inputs
    """
    parts = [_rounded(rows) for rows in torch.split(weight, _ROWS)]
    values, scales, zeros = map(torch.cat, zip(*parts, strict=True))
    return Rounded(values, scales, zeros)


def _rounded(weight: Tensor) -> Rounded:
    groups = weight.float().reshape(len(weight), -1, GROUP)
    least, most = groups.aminmax(dim=2, keepdim=True)
    scale = ((most - least) / _STEPS).clamp_(min=_SMALLEST_SCALE)
    zero = least + scale * _MIDDLE
    for _ in range(_FITS):
        scale, zero = _fitted(groups, _steps(groups, scale, zero))
    scale, zero = scale.to(weight.dtype), zero.to(weight.dtype)
    values = _steps(groups, scale.float(), zero.float()).add_(_MIDDLE)
    return Rounded(values.int().flatten(1), scale.squeeze(2), zero.squeeze(2))


def _steps(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """From the zero to the nearest value. [out, groups, weights]"""
    return (groups - zero).div_(scale).round_().clamp_(-_MIDDLE, _STEPS - _MIDDLE)


def _fitted(groups: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and zero by which these steps come closest to the weights. [out, groups, 1] both"""
    mean = steps.mean(2, keepdim=True)
    apart = steps - mean
    covariance, variance = (apart * groups).sum(2, keepdim=True), apart.square().sum(2, keepdim=True)
    scale = (covariance / variance.clamp_(min=_SMALLEST_SCALE)).clamp_(min=_SMALLEST_SCALE)
    return scale, groups.mean(2, keepdim=True) - scale * mean


class Int4Weight:
    """A matrix in 4 bits and its bias.

    Args:
        weight: [out, in], in the format that rows have; not kept.
        bias: [out] or None; not rounded.

    Raises:
        UsageError: torch has no kernel for it here.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if not has_kernels(weight.dtype, weight.device.type):
            raise UsageError(
                f"int4 weights need a kernel that this torch has not for {weight.dtype} on {weight.device} here. Use "
                'int8, or dtype="bf16".'
            )
        self._outputs, inputs = weight.shape
        self._missing = -inputs % GROUP  # inputs, to whole groups
        whole = rounded(functional.pad(weight, (0, self._missing, 0, -self._outputs % _OUTPUTS)))
        self._scales = torch.stack([whole.scale, whole.zero], dim=2).transpose(0, 1).contiguous()  # [groups, out, 2]
        self._values = _pack(whole.values)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] → [rows, out]"""
        whole = functional.pad(rows, (0, self._missing)) if self._missing else rows.contiguous()
        found = _multiplied(whole, self._values, self._scales)[:, : self._outputs]
        return found if self._bias is None else found.add_(self._bias)

    @property
    def bytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes


@cache
def has_kernels(dtype: torch.dtype, device: str) -> bool:
    """Whether torch multiplies 4-bit weights by rows of this format on this kind of device, and does it right."""
    if device not in _TILES:
        return False
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUTPUTS, 4 * GROUP, generator=noise).to(dtype).to(device)
    rows = torch.randn(3, 4 * GROUP, generator=noise).to(dtype).to(device)
    whole = rounded(weight)
    scales = torch.stack([whole.scale, whole.zero], dim=2).transpose(0, 1).contiguous()
    try:
        found = _multiplied(rows, _pack(whole.values), scales)
    except (RuntimeError, AttributeError, TypeError):  # private operators may be missing or change
        return False
    expected = rows.float() @ whole.restored().T
    return bool((found - expected).norm() <= 1e-2 * expected.norm())


def _pack(values: Tensor) -> Tensor:
    """In the kernel's layout. [out, in]"""
    kind = values.device.type
    tiles = next(count for count in _TILES[kind] if values.shape[1] % (16 * count) == 0)
    if kind == "cpu":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, tiles)
        return packed
    pairs = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)
    on_chip: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
    return on_chip


def _multiplied(rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    multiply = (
        torch.ops.aten._weight_int4pack_mm_for_cpu if rows.device.type == "cpu" else torch.ops.aten._weight_int4pack_mm
    )
    product: Tensor = multiply(rows, packed, GROUP, scales)
    return product
