"""Transformers models whose layers' matrices are still in their files; everything else is there.

The parts that compute are read from such a model as from any other (`lean.recipes`); the matrices come when they are
needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from sequoia.errors import ModelError
from sequoia.model.lean.recipes import FAMILIES
from sequoia.model.offload.files import Read
from sequoia.model.offload.source import WeightSource

_FEWEST_LAYERS = 2  # of a sample
_Layer = TypeVar("_Layer")


@dataclass(frozen=True)
class Hollow:
    """A model, and the names of its layers' matrices."""

    model: Any
    source: WeightSource
    matrices: Sequence[Sequence[str]]  # by layer
    device: torch.device

    def fill(self, layer: int) -> None:
        """Read a layer's matrices for keeps.

        Raises:
            FileError: one cannot be read.
        """
        _give(self.model, {name: name for name in self.matrices[layer]}, self.source, self.device)

    def filled(self, layers: Iterable[_Layer]) -> Iterator[_Layer]:
        """All of them in order, each with its matrices until the next is asked for.

        Raises:
            FileError: one cannot be read.
        """
        for number, layer in enumerate(layers):
            self.fill(number)
            yield layer
            meta = {name: self.model.get_parameter(name).to("meta") for name in self.matrices[number]}
            _take(self.model, meta)


def hollow_model(config: Any, dtype: torch.dtype, device: torch.device, folder: Path, read: Read = os.preadv) -> Hollow:
    """The model of a folder without its layers' matrices.

    Args:
        read: see `WeightFile`.

    Raises:
        FileError: the files lack a tensor, or it cannot be read.
    """
    model = _empty(config, dtype, device)
    matrices = _matrices(model)
    source = WeightSource(folder, model.base_model_prefix, read)
    source.places(name for layer in matrices for name in layer)
    within = {name for layer in matrices for name in layer}
    names = [name for name, _ in model.named_parameters() if name not in within]
    _give(model, {name: name for name in names}, source, device)
    model.tie_weights()
    return Hollow(model, source, matrices, device)


def not_streamable(name: str, family: str) -> ModelError:
    """What to tell of a model whose layers are not known part by part."""
    return ModelError(
        f"{name} ({family}) cannot be streamed; plain models of the families {', '.join(sorted(FAMILIES))} can. "
        'Use offload="off", or choose one of these.'
    )


def sample_model(hollow: Hollow, dtype: torch.dtype) -> Any:
    """A whole model of few layers, one of each kind of attention at least: what holds for it holds for all of them.

    Raises:
        FileError: a tensor cannot be read.
    """
    layers = _sampled(hollow.model.config)
    config = deepcopy(hollow.model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    model = _empty(config, dtype, hollow.device)
    whole, own = _layer_lists(hollow.model), _layer_lists(model)
    names = {name: name for name, _ in model.named_parameters()}
    for number, layer in enumerate(layers):
        names |= {name: name.replace(own[number], whole[layer], 1) for name in names if name.startswith(own[number])}
    shared = dict(hollow.model.named_parameters())
    absent = {name: there for name, there in names.items() if shared[there].is_meta}
    _give(model, absent, hollow.source, hollow.device)
    _take(model, {name: shared[there].data for name, there in names.items() if not shared[there].is_meta})
    model.tie_weights()
    return model


def _sampled(config: Any) -> list[int]:
    """Numbers of the layers in a sample."""
    kinds = list(getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    others = [layer for layer in range(len(kinds)) if layer not in first]
    return sorted([*first, *others[: max(0, _FEWEST_LAYERS - len(first))]])


def _empty(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM  # which takes seconds, and only models that are streamed need it here

    causal_lm: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model = causal_lm.from_config(config, dtype=dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    model.tie_weights()  # so that a weight that is two modules' has one name
    return model.eval()


def _give(model: Any, names: Mapping[str, str], source: WeightSource, device: torch.device) -> None:
    """Read parameters; `names` are the model's, and the source's for each."""
    for name, there in names.items():
        _take(model, {name: source.tensor(there, model.dtype).to(device)})


def _take(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    model.load_state_dict(tensors, strict=False, assign=True)
    for name in tensors:
        model.get_parameter(name).requires_grad_(False)


def _layer_lists(model: Any) -> list[str]:
    """What the names of each layer's parameters begin with."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [f"{name}.{number}." for name, module in lists[:1] for number in range(len(module))]


def _matrices(model: Any) -> list[list[str]]:
    """Names by layer."""
    wide = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    return [[name for name in wide if name.startswith(prefix)] for prefix in _layer_lists(model)]
