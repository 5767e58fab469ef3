"""The small operations between a decoder's products: functions of tensors alone, so that a compiler can fuse each.

They run as they are, and compiled where that was asked for (`compiled`): one source for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 127  # of both signs, so that zero is in the middle
_FINER = 128  # rounding leaves at most a half; a power of two, so that no order of operations changes a bit
_SMALLEST_SCALE = 1e-30  # rows of zeros have no scale of their own


def normed(rows: Tensor, weight: Tensor, least: Tensor) -> Tensor:
    """rows · weight / hypot(norm, least). [rows, size] or [heads, rows, size]"""
    weighted, norm = _fraction(rows, weight, least)
    return weighted.div_(norm).to(rows.dtype)


def normed_in_8_bit(rows: Tensor, weight: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """`normed` and `in_8_bit`; only the scale takes notice of the norm."""
    weighted, norm = _fraction(rows, weight, least)
    values, scale = in_8_bit(weighted)
    return values, scale.div_(norm)


def _fraction(rows: Tensor, weight: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    return wide * weight, torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(least)


def in_8_bit(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows by their largest magnitude each, as (first half of the values + second half / 128) · scale.

    Args:
        rows: [rows, in]

    Returns:
        Values, int8, [2 · rows, in], and scale, in 32 bit, [rows, 1].
    """
    wide = rows.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).mul_(1 / _LARGEST).add_(_SMALLEST_SCALE)
    whole = torch.div(wide, scale).round_()
    finer = torch.div(wide, scale * (1 / _FINER)).round_().sub_(whole, alpha=_FINER)
    return torch.cat([whole, finer]).to(torch.int8), scale


def heads_in_8_bit(attended: Tensor) -> tuple[Tensor, Tensor]:
    """`in_8_bit` of each row's heads side by side. [heads, rows, size]"""
    return in_8_bit(attended.transpose(0, 1).flatten(1))


def summed(products: Tensor, scale: Tensor) -> Tensor:
    """Both halves of an 8-bit product. [2 · rows, out] → [rows, out], in 32 bit"""
    first, second = products.float().chunk(2)
    return torch.add(first, second, alpha=1 / _FINER).mul_(scale)


def added(products: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    """summed + other"""
    first, second = products.float().chunk(2)
    return torch.addcmul(other, torch.add(first, second, alpha=1 / _FINER), scale)


def gated_in_8_bit(products: Tensor, scale: Tensor, activation: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """activation(gate) · up in 8 bit, of gate and up side by side in one 8-bit product."""
    gate, up = summed(products, scale).chunk(2, dim=-1)
    return in_8_bit(activation(gate) * up)


def rotated(parts: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor, queries: int) -> Tensor:
    """Turn queries and keys to their positions, and write keys and values into the cache.

    Args:
        parts: heads of queries, keys and values side by side, [rows, heads · size].
        cosines, sines: the latter with the sign of each half, [1, rows, size].
        keys, values: where they go, [key heads, rows, size].
        queries: number of heads.

    Returns:
        Queries, [queries, rows, size].
    """
    rows, size = cosines.shape[1:]
    split = parts.view(rows, -1, 2, size // 2).transpose(0, 1)  # halves change places in a turn
    both = split[: queries + len(keys)]
    halves = (1, rows, 2, size // 2)
    turned = torch.addcmul(both * cosines.view(halves), both.flip(2), sines.view(halves)).flatten(2)
    keys.copy_(turned[queries:])
    values.copy_(split[queries + len(keys) :].flatten(2))
    return turned[:queries].to(keys.dtype)


def split(parts: Tensor, keys: Tensor, values: Tensor, queries: int) -> Tensor:
    """`rotated` without a turn, for models whose positions are elsewhere."""
    heads = parts.view(len(parts), -1, keys.shape[-1]).transpose(0, 1)
    keys.copy_(heads[queries : queries + len(keys)])
    values.copy_(heads[queries + len(keys) :])
    return heads[:queries].to(keys.dtype)


@dataclass(frozen=True)
class Kernels:
    """Who runs each function: itself, or its compiled form."""

    normed: Callable[..., Tensor] = normed
    normed_in_8_bit: Callable[..., tuple[Tensor, Tensor]] = normed_in_8_bit
    in_8_bit: Callable[..., tuple[Tensor, Tensor]] = in_8_bit
    heads_in_8_bit: Callable[..., tuple[Tensor, Tensor]] = heads_in_8_bit
    summed: Callable[..., Tensor] = summed
    added: Callable[..., Tensor] = added
    gated_in_8_bit: Callable[..., tuple[Tensor, Tensor]] = gated_in_8_bit
    rotated: Callable[..., Tensor] = rotated


PLAIN = Kernels()
