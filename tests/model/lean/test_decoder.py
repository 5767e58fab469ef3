"""The lean decoder gives the logits of transformers' modules, in every variant of every family it knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import (
    BASES,
    VARIANTS,
    TreeRun,
    assert_close,
    block,
    ids,
    layer_linears,
    linear,
    loaded_here,
    tiny,
    variant,
)
from torch import Tensor
from torch.nn import functional

from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.linear import can_pack
from sequoia.tree.shape import TreeShape

_settled = pytest.mark.parametrize("settled", [False, True], ids=["modules' weights", "own weights"])
needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU or torch has no packed bf16 kernels"
)


def _lean(model: Any, settled: bool, dtype: str = "fp32") -> CausalLM:
    found = CausalLM(loaded_here(model, dtype))
    assert found.is_lean
    if settled:
        found.settle()
    return found


@_settled
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [3, 1, 9, 7]])
@pytest.mark.parametrize("name", VARIANTS)
def test_linear_passes(name: str, pieces: list[int], settled: bool) -> None:
    model, text = variant(name), ids(20)
    expected = linear(model, [text[:end] for end in range(1, 21)])
    lean = _lean(model, settled)
    cache = lean.new_cache()
    found = torch.cat([lean.forward(piece, cache) for piece in torch.tensor(text).split(pieces)])
    assert_close(found, expected)


@_settled
@pytest.mark.parametrize("length", [1, 13])  # the longer one reaches past the windows
@pytest.mark.parametrize("name", VARIANTS)
def test_a_tree_and_what_follows_its_kept_path(name: str, length: int, settled: bool) -> None:
    model, run = variant(name), TreeRun(length)
    expected = linear(model, run.texts)
    assert_close(run.logits(_lean(model, settled)), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_part_of_these_models_matters(name: str) -> None:
    """Or the comparisons above would show little: each weight changed alone moves the logits by far more than 1e-4."""
    model, text = variant(name), [ids(20)]
    expected = linear(model, text)
    for entry, weight in model.named_parameters():
        kept = weight.data.clone()
        weight.data += 0.3 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(1))
        moved = (linear(model, text) - expected).abs().max() / expected.abs().max()
        weight.data = kept
        assert moved > 1e-3, f"{entry}: {moved:.2g}"


def test_dynamic_rope_up_to_the_context() -> None:
    changes = {"max_position_embeddings": 24, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    model, text = tiny("llama", changes), ids(24)
    expected = linear(model, [text[:end] for end in range(1, 25)])
    lean = _lean(model, settled=True)
    cache = lean.new_cache()
    assert_close(torch.cat([lean.forward(piece, cache) for piece in torch.tensor(text).split(5)]), expected)


@pytest.mark.parametrize("family", BASES)
def test_eager_models_give_the_same(family: str) -> None:
    model, run = tiny(family), TreeRun(13)
    model.set_attn_implementation("eager")
    expected = linear(model, run.texts)
    assert_close(run.logits(_lean(model, settled=True)), expected)


@pytest.mark.parametrize("last", [1, 3, 9])
@pytest.mark.parametrize("family", BASES)
def test_last_gives_that_many_rows(family: str, last: int) -> None:
    lean, text = _lean(tiny(family), settled=True), torch.tensor(ids(9))
    whole = lean.forward(text, lean.new_cache())
    found = lean.forward(text, lean.new_cache(), last=last)
    assert found.shape == (last, whole.shape[1])
    assert_close(found, whole[-last:])


def _failing_at(function: Any, call: int) -> Any:
    calls: list[None] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return fails


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("operation", ["scaled_dot_product_attention", "linear"])
@pytest.mark.parametrize("family", BASES)
def test_an_interrupted_pass_leaves_the_cache_usable(
    family: str, operation: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 13: even one for which the cache grew."""
    model = tiny(family, {"n_positions" if family == "gpt2" else "max_position_embeddings": 512})
    text, start = ids(270), 250
    expected = linear(model, [text[:end] for end in range(start + 1, 271)])
    lean = _lean(model, settled=True)
    cache = lean.new_cache()
    lean.forward(torch.tensor(text[:start]), cache)
    with monkeypatch.context() as patch:
        patch.setattr(functional, operation, _failing_at(getattr(functional, operation), call))
        with pytest.raises(KeyboardInterrupt):
            lean.forward(torch.tensor(ids(20, seed=5)), cache)
    assert cache.length == start
    assert_close(lean.forward(torch.tensor(text[start:]), cache), expected)


@pytest.mark.parametrize("keep", [(13, [13, 16, 17]), (13, []), (10, [10, 11, 12, 13])])
@pytest.mark.parametrize("family", BASES)
def test_a_keep_after_an_interrupted_pass(
    family: str, keep: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text, (start, slots) = tiny(family), ids(13), keep
    lean = _lean(model, settled=False)
    cache = lean.new_cache()
    lean.forward(torch.tensor(text), cache)
    nodes, shape = ids(5, seed=1), TreeShape((-1, 0, 0, 0, 3))  # slots 13, 16 and 17 are a path
    lean.forward(torch.tensor(nodes), cache, block(shape, 13))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", _failing_at(None, 1))
        with pytest.raises(KeyboardInterrupt):
            lean.forward(torch.tensor(nodes), cache)
    cache.keep(start, slots)
    whole = [*text, *nodes]
    kept = [*whole[:start], *(whole[slot] for slot in slots)]
    assert cache.length == len(kept)
    assert_close(lean.forward(torch.tensor([7]), cache), linear(model, [[*kept, 7]]))


# --- 16 bit ---------------------------------------------------------------------------------------------------------

_WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "qwen3": _WIDE | {"head_dim": 16},
    "gemma3_text": _WIDE | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"n_embd": 64, "n_layer": 4},
}


def _rms_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
@pytest.mark.parametrize("family", _SHAPES)
def test_bf16_is_no_farther_from_fp32_than_transformers(family: str, packed: bool) -> None:
    """Over linear rows, trees and what follows a kept path."""
    model, runs = tiny(family, _SHAPES[family]).bfloat16(), [TreeRun(length) for length in (13, 50)]
    texts = [text for run in runs for text in run.texts]
    exact = linear(copy.deepcopy(model).float(), texts)
    theirs = _rms_error(linear(model, texts), exact)
    lean = _lean(model, settled=packed, dtype="bf16")
    assert lean._decoder is not None
    assert all((layer._packed is not None) == packed for layer in layer_linears(lean._decoder.recipe))
    ours = _rms_error(torch.cat([run.logits(lean) for run in runs]), exact)
    assert 1e-4 < ours < 1.2 * theirs
