"""The probe passes what is exact, at any context length, and catches each way to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import sequoia.model.probe
from sequoia.errors import ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.kv_cache import KVCache
from sequoia.model.language_model import Block
from sequoia.model.lean.cache import LeanCache
from sequoia.model.loading import LoadedModel, load_model
from sequoia.model.probe import probe, proved

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_LLAMA))


def _mistral(window: int = 8) -> Any:
    return MistralForCausalLM(MistralConfig(**_LLAMA, sliding_window=window))


def _gpt2(context: int = 64) -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=context))


def _opt(context: int) -> Any:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_hidden_layers": 1}
    return OPTForCausalLM(
        OPTConfig(vocab_size=64, num_attention_heads=2, max_position_embeddings=context, pad_token_id=1, **sizes)
    )


_MODELS = {"llama": _llama, "mistral": _mistral, "gpt2": _gpt2}


def _wrapped(model: Any, kind: type[CausalLM] = CausalLM, dtype: str = "fp32", lean: bool = True) -> CausalLM:
    _randomise(model)
    return kind(load_model(model, dtype=dtype, device="cpu"), lean)


def _randomise(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


class _PositionByIndex(CausalLM):
    """Fault 15: position = place in the cache."""

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        if block is not None:
            start = cache.length + len(tokens) - len(block.positions)
            block = Block(start + torch.arange(len(block.positions)), block.visible)
        return super().forward(tokens, cache, block, last)


class _SiblingsVisible(CausalLM):
    """Every earlier node is visible."""

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        if block is not None:
            block = Block(block.positions, torch.ones_like(block.visible).tril())
        return super().forward(tokens, cache, block, last)


class _AncestorsHidden(CausalLM):
    """A node sees the prefix and itself only."""

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        if block is not None:
            block = Block(block.positions, torch.eye(len(tokens), dtype=torch.bool))
        return super().forward(tokens, cache, block, last)


class _OtherCache(CausalLM):
    """A model whose caches keep a path in another way."""

    def keep(self, cache: Any, start: int, slots: Sequence[int]) -> None:
        raise NotImplementedError

    def new_cache(self) -> KVCache | LeanCache:
        cache: Any = super().new_cache()
        self.right_keep = cache.keep
        cache.keep = partial(self.keep, cache)
        return cache  # type: ignore[no-any-return]


class _KeepsFirstSlots(_OtherCache):
    """Fault 13, 14: the cache is rewound by a count; the path's rows stay where they were."""

    def keep(self, cache: Any, start: int, slots: Sequence[int]) -> None:
        cache.truncate(start + len(slots))


class _KeepsNextSlots(_OtherCache):
    def keep(self, cache: Any, start: int, slots: Sequence[int]) -> None:
        self.right_keep(start, [min(slot + 1, cache.length - 1) for slot in slots])


class _KeepsOneTooMany(_OtherCache):
    def keep(self, cache: Any, start: int, slots: Sequence[int]) -> None:
        self.right_keep(start, slots)
        cache.append(1)


_BROKEN = [_PositionByIndex, _SiblingsVisible, _AncestorsHidden, _KeepsFirstSlots, _KeepsNextSlots, _KeepsOneTooMany]


_each_decoder = pytest.mark.parametrize("lean", [pytest.param(True, id="lean"), pytest.param(False, id="modules")])


@_each_decoder
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", _MODELS)
def test_sound_models_pass(name: str, dtype: str, lean: bool) -> None:
    model = _wrapped(_MODELS[name](), dtype=dtype, lean=lean)
    assert model.is_lean == lean
    probe(model)


@_each_decoder
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("broken", _BROKEN)
def test_broken_models_are_caught(name: str, broken: type[CausalLM], dtype: str, lean: bool) -> None:
    with pytest.raises(ModelError, match="other logits in a token tree"):
        probe(_wrapped(_MODELS[name](), broken, dtype, lean))


class _NoWindow(CausalLM):
    @property
    def window(self) -> int | None:
        return 1 << 20


class _WiderWindow(CausalLM):
    @property
    def window(self) -> int | None:
        return (super().window or 0) + 1


@_each_decoder
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("broken", [_NoWindow, _WiderWindow])
@pytest.mark.parametrize("window", [2, 8])
def test_a_wrong_window_is_caught(window: int, broken: type[CausalLM], dtype: str, lean: bool) -> None:
    with pytest.raises(ModelError, match="other logits in a token tree"):
        probe(_wrapped(_mistral(window), broken, dtype, lean))


@_each_decoder
@pytest.mark.parametrize("window", [1, 2, 8, 4096])
def test_every_window_is_crossed_and_left_as_it_was(window: int, lean: bool) -> None:
    """Fault 22: a window wider than any probe's text is proved too."""
    model = _wrapped(_mistral(window), lean=lean)
    probe(model)
    assert model.window == window
    assert model.loaded.model.config.sliding_window == window


def test_the_window_is_left_as_it_was_after_a_refusal() -> None:
    model = _wrapped(_mistral(4096), _SiblingsVisible)
    with pytest.raises(ModelError):
        probe(model)
    assert model.loaded.model.config.sliding_window == 4096


@pytest.mark.parametrize("context", range(8, 16))
@pytest.mark.parametrize("make", [_gpt2, _opt])
def test_short_contexts_are_not_overrun(make: Any, context: int) -> None:
    """Learned positions: the table ends at the context."""
    probe(_wrapped(make(context)))


@pytest.mark.parametrize("context", [1, 4, 7])
def test_a_context_too_short_for_any_tree_is_refused(context: int) -> None:
    with pytest.raises(ModelError, match=f"has a context of {context} tokens; Sequoia needs 8"):
        probe(_wrapped(_gpt2(context)))


class _Failing(CausalLM):
    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        raise RuntimeError("shapes do not match:\n  [1, 2]\n  [3]")


def test_a_failing_forward_is_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"cannot run with a tree mask .*shapes do not match: \[1, 2\] \[3\]"
    ) as refusal:
        probe(_wrapped(_llama(), _Failing))
    assert "\n" not in str(refusal.value)


class _NaN(CausalLM):
    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        return super().forward(tokens, cache, block, last) * torch.nan


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_that_are_no_numbers_are_refused(dtype: str) -> None:
    with pytest.raises(ModelError):
        probe(_wrapped(_llama(), _NaN, dtype))


# --- proved ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", _BROKEN)
def test_what_is_wrong_in_both_decoders_is_refused(broken: type[CausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = _llama(), list[bool]()
    _randomise(model)

    def tries(loaded: LoadedModel, lean: bool = True) -> CausalLM:
        tried.append(lean)
        return broken(loaded, lean)

    monkeypatch.setattr(sequoia.model.probe, "CausalLM", tries)
    with pytest.raises(ModelError, match="other logits in a token tree"):
        proved(load_model(model, device="cpu"))
    assert tried == [True, False]


@pytest.mark.parametrize("broken", _BROKEN)
@pytest.mark.parametrize("name", _MODELS)
def test_what_is_wrong_in_the_lean_decoder_only_runs_in_modules(
    name: str, broken: type[CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _MODELS[name]()
    _randomise(model)

    def breaks(loaded: LoadedModel, lean: bool = True) -> CausalLM:
        return (broken if lean else CausalLM)(loaded, lean)

    monkeypatch.setattr(sequoia.model.probe, "CausalLM", breaks)
    found = proved(load_model(model, device="cpu"))
    assert (type(found), found.is_lean) == (CausalLM, False)
    probe(found)


def test_a_model_of_no_known_family_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = _opt(64), list[bool]()
    _randomise(model)

    def tries(loaded: LoadedModel, lean: bool = True) -> CausalLM:
        tried.append(lean)
        return _KeepsNextSlots(loaded, lean)

    monkeypatch.setattr(sequoia.model.probe, "CausalLM", tries)
    with pytest.raises(ModelError, match="other logits in a token tree"):
        proved(load_model(model, device="cpu"))
    assert tried == [True]


def test_a_refused_model_is_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that was loaded here, and would have been taken apart."""
    model = _llama()
    _randomise(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    loaded = load_model(model, device="cpu")
    monkeypatch.setattr(sequoia.model.probe, "CausalLM", _SiblingsVisible)
    with pytest.raises(ModelError):
        proved(replace(loaded, load_again=lambda: loaded))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
