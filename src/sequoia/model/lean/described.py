"""A recipe as plain data: its structure, its small tensors, and the names of the others in the model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from sequoia.model.lean.decoder import Heads, Layer, LayerNorm, Recipe, RMSNorm
from sequoia.model.lean.inputs import Angles, Embedding
from sequoia.model.lean.linear import Gated, Linear

Read = Callable[[str], Tensor]
"""A tensor of the model's files by its name, in the model's number format."""

_RECORDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (Recipe, Heads, Layer, LayerNorm, RMSNorm, Angles, Embedding)
}
_LARGEST = 65536  # numbers of a tensor that may be kept beside the structure


class NotPlainError(Exception):
    """A part of the recipe cannot be told in data."""


def described(recipe: Recipe, model: nn.Module, read: Read) -> tuple[Any, dict[str, Tensor]]:
    """The recipe of a model that is still whole, as JSON and the tensors it refers to as `kept`.

    Each of the model's tensors is held against what `read` gives, bit for bit.

    Raises:
        NotPlainError: a part is code of the model's own, or a tensor is not in the files as it is in the model.
    """
    names = {_place(parameter): name for name, parameter in model.named_parameters()}
    kept: dict[str, Tensor] = {}

    def tensor(value: Tensor) -> dict[str, str]:
        name = names.get(_place(value))
        if name is not None:
            if not _is_there(value, name, read):
                raise NotPlainError(f"{name} is not in the files as the model has it")
            return {"file": name}
        if value.numel() > _LARGEST:
            raise NotPlainError(f"a tensor of {value.numel()} numbers is no parameter of the model")
        kept[key := str(len(kept))] = value.detach().clone()
        return {"kept": key}

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Tensor):
            return tensor(value)
        if isinstance(value, Linear):
            return {"linear": [_module_data(module, plain) for module in value.modules]}
        if isinstance(value, Gated):
            return {"gated": [plain(value.gate), plain(value.up)]}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if _RECORDS.get(type(value).__name__) is type(value):
            return {type(value).__name__: {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}}
        raise NotPlainError(f"{value!r:.80} is code of the model's own")

    return plain(recipe), kept


def rebuilt(data: Any, kept: Mapping[str, Tensor], read: Read) -> Any:
    """What `described` was given, of the same tensors.

    Raises:
        KeyError, TypeError, ValueError: the data is of another kind, or names what is not there.
    """
    if isinstance(data, list):
        return tuple(rebuilt(item, kept, read) for item in data)
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "file":
        return read(value)
    if kind == "kept":
        return kept[value]
    if kind == "linear":
        return Linear([_module(*(rebuilt(part, kept, read) for part in module)) for module in value])
    if kind == "gated":
        return Gated(*(rebuilt(part, kept, read) for part in value))
    return _RECORDS[kind](**{name: rebuilt(part, kept, read) for name, part in value.items()})


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The same for all views of one memory that look alike."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _is_there(value: Tensor, name: str, read: Read) -> bool:
    try:
        found = read(name)
    except KeyError:
        return False
    return found.dtype == value.dtype and torch.equal(found, value)


def _module_data(module: Any, plain: Callable[[Any], Any]) -> list[Any]:
    return [plain(module.weight.data), None if module.bias is None else plain(module.bias.data), _is_turned(module)]


def _is_turned(module: nn.Module) -> bool:
    """Whether the weight is [in, out], as transformers' `Conv1D` has it."""
    return type(module).__name__ == "Conv1D"


def _module(weight: Tensor, bias: Tensor | None, turned: bool) -> nn.Linear:
    module = nn.Linear(1, 1, device="meta")
    module.weight = nn.Parameter(weight.T if turned else weight, requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return module
