"""Compiled kernels: the same passes within rounding, taken up in the background, and nothing lost where they fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import ids, loaded_here, tiny
from torch import Tensor

from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean import compiled
from sequoia.model.lean.fused import PLAIN, Kernels, normed
from sequoia.model.placement import Numbers

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++")), reason="no C++ compiler here"
)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def _settled(family: str, dtype: str) -> CausalLM:
    loaded = loaded_here(tiny(family), "fp32")
    model = CausalLM(replace(loaded, numbers=Numbers(torch.float32, bits=8 if dtype == "int8" else None)))
    model.settle()
    return model


def _logits(model: CausalLM, pieces: list[int]) -> Tensor:
    cache = model.new_cache()
    return torch.cat([model.forward(piece, cache) for piece in torch.tensor(ids(sum(pieces))).split(pieces)])


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_passes_are_the_same_with_any_number_of_rows(family: str, dtype: str, tmp_path: Path) -> None:
    model, told = _settled(family, dtype), list[str]()
    pieces = [1, 2, 7, 300, 1, 16]  # the cache grows on the way
    expected = _logits(model, pieces)
    model.compile(tmp_path, told.append)
    model.wait_until_compiled()
    assert told == []
    assert model._decoder is not None
    assert model._decoder.kernels is not PLAIN
    found = _logits(model, pieces)
    assert float((found - expected).square().mean().sqrt() / expected.std()) < (1e-5 if dtype == "fp32" else 0.02)


def test_what_cannot_be_compiled_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_compiler(site: compiled.Site) -> Callable[..., object]:
        raise RuntimeError("no compiler found\nat great length")

    monkeypatch.setattr(compiled, "_compile", no_compiler)
    model, told = _settled("llama", "fp32"), list[str]()
    expected = _logits(model, [5])
    model.compile(tmp_path, told.append)
    model.wait_until_compiled()
    assert told == ["passes are not compiled: no compiler found"]
    assert torch.equal(_logits(model, [5]), expected)


def test_a_kernel_with_other_numbers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(site: compiled.Site) -> Callable[..., object]:
        return lambda tensors: [site.function(*tensors, *site.calls[0][len(tensors) :]) * 2]

    monkeypatch.setattr(compiled, "_compile", wrong)
    rows, weight, least = torch.rand(1, 8), torch.rand(8), torch.tensor(0.1)

    def run_pass(kernels: Kernels, count: int) -> None:
        kernels.normed(rows.expand(count, 8).contiguous(), weight, least)

    with pytest.raises(RuntimeError, match="normed gives other numbers"):
        compiled.compiled(run_pass)


def test_calls_of_one_width_that_differ_otherwise_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda site: pytest.fail("nothing to compile"))

    def run_pass(kernels: Kernels, count: int) -> None:
        kernels.normed(torch.rand(count, 8), torch.rand(8), torch.tensor(0.1))
        kernels.normed(torch.rand(3, count, 8), torch.rand(8), torch.tensor(0.1))

    arguments = torch.rand(2, 8), torch.rand(8), torch.tensor(0.1)
    assert torch.equal(compiled.compiled(run_pass).normed(*arguments), normed(*arguments))


def test_models_in_modules_say_so(tmp_path: Path) -> None:
    model, told = CausalLM(loaded_here(tiny("llama"), "fp32"), lean=False), list[str]()
    model.compile(tmp_path, told.append)
    model.wait_until_compiled()
    assert "only lean decoders on a CPU" in told[0]
