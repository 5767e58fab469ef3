"""Features of the target: those of transformers' own modules, through prompt, tree, kept path and what follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.model.features import listening
from sequoia.model.language_model import Block
from sequoia.model.loading import load_model

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 64},
    "GPT2": {},
}
LAYERS, VOCAB = 3, 40
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
TAPS = (4, 0, 2, 3, 1)


@pytest.fixture(params=FAMILIES)
def whole(request: pytest.FixtureRequest) -> Any:
    return _model(request.param)


def _model(family: str) -> Any:
    import transformers

    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    settings = FAMILIES[family] | {"vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **settings)
    return getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()


@torch.inference_mode()
def _states(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, taps, size]"""
    norm, seen = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm, list[Tensor]()
    hook = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    states = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    rows = [*(state[0] for state in states[:-1]), seen[0], states[-1][0]]
    return torch.stack([rows[tap] for tap in TAPS], dim=1)


@pytest.mark.parametrize("lean", [True, False])
def test_they_are_the_models_own_whatever_was_kept(whole: Any, lean: bool) -> None:
    model = CausalLM(load_model(whole, dtype="fp32", device="cpu"), lean=lean)
    assert model.is_lean == lean
    cache = model.new_cache(TAPS)
    model.forward(torch.tensor(TEXT), cache, last=1)
    assert cache.features is not None
    torch.testing.assert_close(cache.features.read(0, 10), _states(whole, TEXT), rtol=1e-4, atol=1e-4)

    # A root with two children, of which the second is kept with its child.
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    model.forward(torch.tensor([7, 8, 9, 11]), cache, Block(10 + torch.tensor([0, 1, 1, 2]), visible))
    cache.keep(10, [10, 12, 13])
    torch.testing.assert_close(cache.features.read(0, 13), _states(whole, [*TEXT, 7, 9, 11]), rtol=1e-4, atol=1e-4)
    cache.truncate(11)
    model.forward(torch.tensor([2] * 300)[:90], cache, last=1)
    expected = _states(whole, [*TEXT, 7, *[2] * 90])
    torch.testing.assert_close(cache.features.read(0, 101), expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_asked_for_is_not_kept() -> None:
    model = CausalLM(tiny_llama(VOCAB, 1, device="cpu"))
    assert model.new_cache().features is None
    cache = model.new_cache((1,))
    logits = model.forward(torch.tensor(TEXT), cache)
    assert cache.features is not None
    assert cache.features.read(0, 10).shape == (10, 1, 16)
    torch.testing.assert_close(logits, model.forward(torch.tensor(TEXT), model.new_cache()))


def test_listening_leaves_no_hook_behind_and_says_where_it_cannot() -> None:
    loaded = tiny_llama(VOCAB, 1, device="cpu")
    model = CausalLM(loaded, lean=False)
    cache = model.new_cache((0, 1, 2, 3))
    model.forward(torch.tensor(TEXT), cache)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())
    loaded.model.config.num_hidden_layers = 7
    assert cache.features is not None
    with (
        pytest.raises(ModelError, match="no list of 7 decoder layers"),
        listening(loaded.model, cache.features, 0),
    ):
        pass


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_can_be_read_and_run_once_settled(
    bits: int | None, dtype: str, lean: bool, tied: bool
) -> None:
    from dataclasses import replace

    from sequoia.model.placement import Numbers

    whole = _model("Llama").to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    if tied:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    weight = whole.lm_head.weight.detach().clone()
    loaded = load_model(whole, device="cpu")
    loaded = replace(loaded, load_again=lambda: loaded, numbers=Numbers(whole.dtype, bits))
    model = CausalLM(loaded, lean=lean)
    model.settle()
    found = model.ends.head_weight()
    assert found.dtype == weight.dtype
    exact = bits != 8 or (tied and lean)
    torch.testing.assert_close(found, weight, rtol=0, atol=0 if exact else float(weight.abs().max()) / 100)
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(whole.dtype)
    expected = (rows.float() @ weight.float().T).to(whole.dtype)
    error = (model.ends.head(rows).float() - expected.float()).square().mean().sqrt() / expected.float().std()
    assert error < (0.03 if bits == 8 else 0.01)
