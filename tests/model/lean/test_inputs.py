"""Angles and rows from tables are transformers' own, and others' stay with the modules."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VARIANTS, variant

from sequoia.model.lean.inputs import Angles, Embedding
from sequoia.model.lean.recipes import recipe_of

_ROTARY = [name for name in VARIANTS if "gpt2" not in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in _ROTARY if "gemma3" not in name and "dynamic" not in name])
def test_angles_are_the_modules_own_at_every_position(name: str, dtype: torch.dtype) -> None:
    model = variant(name)
    recipe = recipe_of(model)
    assert recipe is not None
    assert isinstance(recipe.rotations, Angles)
    positions, rows = torch.arange(100_000, 101_000), torch.zeros(1000, 32, dtype=dtype)
    cosines, sines = model.model.rotary_emb(rows[None], positions[None])
    for found, turned in recipe.rotations(rows, positions).values():
        assert found.dtype == turned.dtype == dtype
        assert torch.equal(found, cosines)
        half = sines.shape[-1] // 2
        assert torch.equal(turned, torch.cat([-sines[..., :half], sines[..., half:]], -1))


@pytest.mark.parametrize("name", [name for name in _ROTARY if "gemma3" in name or "dynamic" in name])
def test_angles_of_another_kind_stay_with_the_modules(name: str) -> None:
    recipe = recipe_of(variant(name))
    assert recipe is not None
    assert not isinstance(recipe.rotations, Angles)


def test_angles_that_differ_in_a_bit_stay_with_the_modules() -> None:
    model = variant("llama")
    forward = type(model.model.rotary_emb).forward

    def shifted(module: torch.nn.Module, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cosines, sines = forward(module, rows, positions)
        return cosines, sines * (1 + 1e-6)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.rotary_emb), "forward", shifted)
        recipe = recipe_of(model)
        assert recipe is not None
        assert not isinstance(recipe.rotations, Angles)


def test_rows_of_tokens_and_of_learned_positions() -> None:
    tokens, positions = torch.randn(5, 3), torch.randn(4, 3)
    asked, places = torch.tensor([4, 0]), torch.tensor([1, 3])
    assert torch.equal(Embedding(tokens)(asked, places), tokens[[4, 0]])
    assert torch.equal(Embedding(tokens, positions)(asked, places), tokens[[4, 0]] + positions[[1, 3]])
