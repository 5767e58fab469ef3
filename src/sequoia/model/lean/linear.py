"""Linear layers for few rows: fused, and on a CPU packed as its kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sequoia.model.lean.fused import PLAIN, Kernels
from sequoia.model.lean.int4 import Int4Weight
from sequoia.model.lean.int8 import Int8Rows, Int8Weight

Activation = Callable[[Tensor], Tensor]

_FUSED: dict[str, tuple[str, str]] = {  # activation by transformers' name → oneDNN's attribute and algorithm
    "silu": ("swish", "none"),
    "swish": ("swish", "none"),
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", "none"),
}
_PLAIN: dict[str, Activation] = {
    "swish none": functional.silu,
    "gelu none": functional.gelu,
    "gelu tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
    "relu none": functional.relu,
}
ACTIVATIONS = frozenset(_FUSED)

PIECE = 8192  # outputs of a wide gate at a time
_MANY_ROWS = 32  # from here on that is faster


class Linear:
    """rows @ weight.T + bias, with what follows it in the same kernel where there is one.

    Weights start as those of the modules they come from, several of them side by side where their inputs are the same.
    `settle` or `quantise` turns them into one matrix and forgets the modules' own.

    Args:
        modules: `nn.Linear`, or transformers' `Conv1D`, whose weight is transposed.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        """None of them once it is settled; a bound one keeps them."""
        self._weight: Tensor | None = None
        self._packed: Tensor | None = None
        self._int8: Int8Weight | None = None
        self._int4: Int4Weight | None = None
        has_bias = any(getattr(module, "bias", None) is not None for module in modules)
        self._bias = torch.cat([_bias(module) for module in modules]) if has_bias else None

    def __call__(self, rows: Tensor | Int8Rows, kernels: Kernels = PLAIN) -> Tensor:
        """[rows, in] → [rows, out], in 32 bit once it has 8. Only then may rows be, too."""
        if self._int8 is not None:
            return self._int8(_in_8_bit(rows, kernels), kernels)
        assert isinstance(rows, Tensor)
        if self._int4 is not None:
            return self._int4(rows)
        if self._packed is not None:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            return packed
        return functional.linear(rows, self._whole(), self._bias)

    def activated(self, rows: Tensor | Int8Rows, activation: str, kernels: Kernels = PLAIN) -> Tensor:
        """activation(self(rows))"""
        attribute, algorithm = _FUSED[activation]
        if self._packed is None or isinstance(rows, Int8Rows):
            return _plain(activation)(self(rows, kernels))
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, attribute, [], algorithm)
        return packed

    def times(self, rows: Tensor, factor: Tensor) -> Tensor:
        """self(rows) * factor"""
        return self(rows).mul_(factor) if self._packed is None else self._combined(rows, factor, "mul")

    def plus(self, rows: Tensor | Int8Rows, other: Tensor, kernels: Kernels = PLAIN) -> Tensor:
        """self(rows) + other"""
        if self._int8 is not None:
            return self._int8.plus(_in_8_bit(rows, kernels), other, kernels)
        assert isinstance(rows, Tensor)
        return self(rows).add_(other) if self._packed is None else self._combined(rows, other, "add")

    def gated(self, rows: Tensor | Int8Rows, activation: str, kernels: Kernels) -> Int8Rows:
        """activation(gate) * up, once quantised, of a gate's outputs and as many more."""
        assert self._int8 is not None
        return self._int8.gated(_in_8_bit(rows, kernels), _plain(activation), kernels)

    def dense(self) -> Tensor:
        """[out, in] the weight itself, as far as quantising has left it."""
        if self._int8 is not None:
            return self._int8.dense()
        return self._whole() if self._packed is None else self._packed.to_dense()

    def beside(self, other: Linear) -> Linear:
        """Both as one, this one's outputs first; before either is settled."""
        both = Linear([*self.modules, *other.modules])
        if self._weight is not None and other._weight is not None:
            both._weight = torch.cat([self._weight, other._weight])
        return both

    def some(self, rows: Tensor, outputs: slice) -> Tensor:
        """Of a plain one, self(rows)[:, outputs]."""
        return functional.linear(rows, self._whole()[outputs], None if self._bias is None else self._bias[outputs])

    @property
    def is_plain(self) -> bool:
        """Whether its weight is one ordinary matrix on a CPU."""
        return self._weight is not None and self._weight.device.type == "cpu"

    @property
    def width(self) -> int:
        """Outputs of a plain one."""
        return len(self._whole())

    @property
    def is_int8(self) -> bool:
        """Whether it was quantised to 8 bits."""
        return self._int8 is not None

    def _combined(self, rows: Tensor, other: Tensor, operation: str) -> Tensor:
        combined: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self._packed, self._bias, operation)
        return combined

    def _whole(self) -> Tensor:
        """[out, in]"""
        if self._weight is not None:
            return self._weight
        weights = [_weight(module) for module in self.modules]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def bind(self, weight: Tensor) -> None:
        """Calculate with a weight that lies elsewhere, where another may come in its place between passes.

        Args:
            weight: the modules' own, one below the other.
        """
        self._weight = _upright(self.modules[0], weight)

    def settle(self, packed: bool, release: bool) -> None:
        """One matrix from now on.

        Args:
            packed: in the layout of the CPU's kernels for few rows; see `can_pack`.
            release: take the weights from the modules, which cannot run any more.
        """
        weight = self._whole()
        if packed:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        else:
            self._weight = weight
        self._forget(release)

    def quantise(self, release: bool, bits: int = 8) -> None:
        """One matrix in integers of 8 or 4 bits from now on; `release` as for `settle`."""
        if bits == 8:
            self._int8 = Int8Weight(self._whole(), self._bias)
        else:
            self._int4 = Int4Weight(self._whole(), self._bias)
        self._weight = None
        self._forget(release)

    def rounded(self, bits: int) -> Linear:
        """Another layer, of these weights in integers; this one, not settled yet, stays as it is."""
        twin = copy(self)
        twin.quantise(release=False, bits=bits)
        return twin

    def _forget(self, release: bool) -> None:
        for module in self.modules if release else ():
            module.weight = nn.Parameter(_weight(module).new_empty(0), requires_grad=False)
        self.modules = ()


class Gated:
    """Two linear layers of the same inputs, one the other's gate."""

    def __init__(self, gate: Linear, up: Linear) -> None:
        self.gate, self.up = gate, up
        self._both: Linear | None = None  # side by side, in 8 bit

    def activated(self, rows: Tensor | Int8Rows, activation: str, kernels: Kernels = PLAIN) -> Tensor | Int8Rows:
        """activation(gate(rows)) * up(rows)"""
        if self._both is not None:
            return self._both.gated(rows, activation, kernels)
        assert isinstance(rows, Tensor)
        if self.gate.is_plain and len(rows) >= _MANY_ROWS and self.gate.width > 2 * PIECE:
            return self._in_pieces(rows, activation)
        return self.up.times(rows, self.gate.activated(rows, activation))

    def _in_pieces(self, rows: Tensor, activation: str) -> Tensor:
        """The same, a part of the outputs at a time, so that what is between two products stays in the CPU's caches."""
        found = rows.new_empty(len(rows), self.gate.width)
        for start in range(0, self.gate.width, PIECE):
            part = slice(start, start + PIECE)
            gate, up = self.gate.some(rows, part), self.up.some(rows, part)
            torch.mul(_plain(activation)(gate), up, out=found[:, part])
        return found

    def settle(self, packed: bool, release: bool) -> None:
        """See `Linear.settle`."""
        self.gate.settle(packed, release)
        self.up.settle(packed, release)

    def quantise(self, release: bool, bits: int = 8) -> None:
        """See `Linear.quantise`."""
        if bits == 8:
            self._both = self.gate.beside(self.up)
            self._both.quantise(release)
        else:
            self.gate.quantise(release, bits)
            self.up.quantise(release, bits)

    def rounded(self, bits: int) -> Gated:
        """See `Linear.rounded`."""
        twin = Gated(copy(self.gate), copy(self.up))
        twin.quantise(release=False, bits=bits)
        return twin


def _in_8_bit(rows: Tensor | Int8Rows, kernels: Kernels) -> Int8Rows:
    return rows if isinstance(rows, Int8Rows) else Int8Rows(*kernels.in_8_bit(rows))


def _plain(activation: str) -> Activation:
    return _PLAIN[" ".join(_FUSED[activation])]


class PackedModule(nn.Module):
    """A linear layer, packed or quantised, in the place of a transformers module's own."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        found = self.linear(rows.reshape(-1, rows.shape[-1]))  # [..., in] → [..., out]
        return found.view(*rows.shape[:-1], found.shape[-1]).to(rows.dtype)


def pack_modules(model: Any) -> None:
    """Pack every linear layer in place, for models that run in transformers' modules."""
    left = model.get_output_embeddings() if shares_head(model) else None
    _replace(model, lambda linear: linear.settle(packed=True, release=True), left)


def quantise_modules(model: Any, bits: int = 8) -> None:
    """The same in integers of 8 or 4 bits; of 4, the head stays as it is."""
    left = model.get_output_embeddings() if bits == 4 else None
    _replace(model, lambda linear: linear.quantise(release=True, bits=bits), left)


def _replace(model: nn.Module, settle: Callable[[Linear], None], left: nn.Module | None = None) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not left:
                linear = Linear([child])
                settle(linear)
                setattr(parent, name, PackedModule(linear))


def shares_head(model: Any) -> bool:
    """Whether the head has the embedding's weight, which is needed as it is: packed it would be there twice."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing pays: in 16 bit, on a CPU, with a torch that has oneDNN's operators.

    In 32 bit the plain kernels are as fast for one row and need no second layout.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    try:
        trial = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 1)
        rows = torch.zeros(1, 16, dtype=dtype)
        torch.ops.mkldnn._linear_pointwise(rows, trial, None, "none", [], "")
        torch.ops.mkldnn._linear_pointwise.binary(rows, rows, trial, None, "add")
    except (RuntimeError, AttributeError, TypeError):  # private operators may be missing or change
        return False
    return True


def _weight(module: Any) -> Tensor:
    """[out, in]"""
    return _upright(module, module.weight.data)


def _upright(module: nn.Module, weight: Tensor) -> Tensor:
    """A module's weight as [out, in]."""
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _bias(module: Any) -> Tensor:
    """[out]"""
    weight = _weight(module)
    bias: Tensor = weight.new_zeros(weight.shape[0]) if module.bias is None else module.bias.data
    return bias
