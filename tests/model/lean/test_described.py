"""Recipes as plain data give the same passes, bit for bit; what is no data is not told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VARIANTS, TreeRun, loaded_here, tiny, variant
from torch import Tensor, nn

from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.decoder import Recipe
from sequoia.model.lean.described import NotPlainError, described, rebuilt
from sequoia.model.lean.recipes import recipe_of

_OWN_CODE = ("gemma3", "dynamic")  # rows that are scaled, angles that follow the text's length


def reader(model: Any) -> Callable[[str], Tensor]:
    tensors = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    return tensors.__getitem__


def recipe(model: Any) -> Recipe:
    found = recipe_of(model)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in VARIANTS if not any(code in name for code in _OWN_CODE)])
def test_a_recipe_comes_back_from_data(name: str, dtype: torch.dtype) -> None:
    model = variant(name).to(dtype)
    loaded, read = loaded_here(model, "fp32" if dtype is torch.float32 else "bf16"), reader(model)
    data, kept = described(recipe(model), model, read)
    again = rebuilt(json.loads(json.dumps(data)), {key: tensor.clone() for key, tensor in kept.items()}, read)
    assert isinstance(again, Recipe)
    run = TreeRun(9)
    assert torch.equal(run.logits(CausalLM(loaded, recipe=again)), run.logits(CausalLM(loaded)))


def test_only_small_tensors_are_kept_beside_the_structure() -> None:
    model = tiny("llama")
    data, kept = described(recipe(model), model, reader(model))
    assert {tuple(tensor.shape) for tensor in kept.values()} == {(4,)}  # the angles' frequencies
    assert json.dumps(data).count('"file"') == sum(1 for _ in model.parameters())


@pytest.mark.parametrize("name", [name for name in VARIANTS if any(code in name for code in _OWN_CODE)])
def test_code_of_the_models_own_is_not_told(name: str) -> None:
    model = variant(name)
    with pytest.raises(NotPlainError, match="code of the model's own"):
        described(recipe(model), model, reader(model))


def test_every_tensor_is_held_against_the_files() -> None:
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        for other in (parameter.data + 1, parameter.data.double()):
            read = reader(model)
            with pytest.raises(NotPlainError, match=f"{name} is not in the files"):
                described(recipe(model), model, lambda asked: other if asked == name else read(asked))  # noqa: B023


def test_a_tensor_that_the_files_lack() -> None:
    model = tiny("llama")
    with pytest.raises(NotPlainError, match="is not in the files"):
        described(recipe(model), model, {}.__getitem__)


def test_a_large_tensor_that_is_no_parameter() -> None:
    model = tiny("llama")
    model.model.embed_tokens = nn.Embedding(4096, 32)
    found = recipe(model)
    model.model.embed_tokens = nn.Embedding(96, 32)
    with pytest.raises(NotPlainError, match="131072 numbers is no parameter"):
        described(found, model, reader(model))


@pytest.mark.parametrize(
    "data", [{"Recipe": {}}, {"nothing": 3}, {"file": "lost"}, {"kept": "9"}, {}, {"a": 1, "b": 2}]
)
def test_data_of_another_kind(data: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        rebuilt(data, {}, {}.__getitem__)
