"""`CausalLM`'s own contract; what kinds of model it serves is in test_architectures.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sequoia.errors import ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block
from sequoia.model.loading import LoadedModel, load_model

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _model(model: Any, lean: bool = True) -> CausalLM:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return CausalLM(load_model(model, device="cpu"), lean)


@pytest.fixture(scope="module")
def llama() -> CausalLM:
    return _model(LlamaForCausalLM(LlamaConfig(**_SIZES)))


@pytest.fixture(
    scope="module", params=[(kind, lean) for kind in ("llama", "mistral", "gpt2") for lean in (True, False)]
)
def model(request: pytest.FixtureRequest) -> CausalLM:
    """In the lean decoder, and in transformers' modules."""
    kinds = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=6)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    }
    kind, lean = request.param
    model = _model(kinds[kind](), lean)
    assert model.is_lean == lean
    return model


def _ids(count: int) -> torch.Tensor:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(1))


def _linear(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.loaded.model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [3, 1, 9, 7], [12, 8]])
def test_any_cut_of_a_text_into_forwards_gives_the_same_logits(model: CausalLM, pieces: list[int]) -> None:
    ids, cache = _ids(20), model.new_cache()
    found = torch.cat([model.forward(piece, cache) for piece in ids.split(pieces)])
    torch.testing.assert_close(found, _linear(model, ids), rtol=1e-4, atol=1e-4)
    assert cache.length == 20


def test_last_gives_that_many_rows(model: CausalLM) -> None:
    ids = _ids(9)
    found = model.forward(ids, model.new_cache(), last=1)
    assert found.shape == (1, 64)
    torch.testing.assert_close(found[0], _linear(model, ids)[-1], rtol=1e-4, atol=1e-4)


def test_a_block_may_cover_slots_that_earlier_forwards_wrote(model: CausalLM) -> None:
    """A tree in two forwards equals the same tree in one."""
    prefix, nodes = _ids(8), _ids(6)
    positions = 8 + torch.tensor([0, 1, 1, 2, 2, 3])
    visible = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate([0, 0, 1, 2, 4], start=1):
        visible[node] |= visible[parent]
    one, two = model.new_cache(), model.new_cache()
    model.forward(prefix, one)
    model.forward(prefix, two)
    whole = model.forward(nodes, one, Block(positions, visible))
    first = model.forward(nodes[:3], two, Block(positions[:3], visible[:3, :3]))
    rest = model.forward(nodes[3:], two, Block(positions, visible[3:]))
    torch.testing.assert_close(torch.cat([first, rest]), whole, rtol=1e-4, atol=1e-4)


def test_truncating_takes_a_forward_back(model: CausalLM) -> None:
    ids, cache = _ids(12), model.new_cache()
    model.forward(ids[:8], cache)
    model.forward(torch.tensor([5, 5, 5, 5]), cache)
    cache.truncate(8)
    found = model.forward(ids[8:], cache)
    torch.testing.assert_close(found, _linear(model, ids)[8:], rtol=1e-4, atol=1e-4)


def test_a_forward_that_fails_half_way_leaves_the_cache_usable(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache = _ids(12), model.new_cache()
    model.forward(ids[:8], cache)
    attention, calls = functional.scaled_dot_product_attention, []

    def fails_in_the_second_layer(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return attention(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", fails_in_the_second_layer)
        with pytest.raises(KeyboardInterrupt):
            model.forward(ids[:4], cache)
    assert cache.length == 8
    torch.testing.assert_close(model.forward(ids[8:], cache), _linear(model, ids)[8:], rtol=1e-4, atol=1e-4)


def test_two_caches_do_not_disturb_each_other(model: CausalLM) -> None:
    ids, one, two = _ids(10), model.new_cache(), model.new_cache()
    found = []
    for token in ids:
        found.append(model.forward(token[None], one)[0])
        model.forward(63 - token[None], two)
    torch.testing.assert_close(torch.stack(found), _linear(model, ids), rtol=1e-4, atol=1e-4)


def test_it_tells_what_the_algorithm_asks(llama: CausalLM) -> None:
    assert (llama.vocab_size, llama.context_length, llama.device.type, llama.window) == (64, 64, "cpu", None)


@pytest.mark.parametrize(("settings", "window"), [({"sliding_window": 6}, 6), ({"sliding_window": None}, None)])
def test_the_window_is_the_configs(settings: dict[str, Any], window: int | None) -> None:
    assert _model(MistralForCausalLM(MistralConfig(**_SIZES, **settings))).window == window


def test_sliding_layers_without_a_width_are_refused() -> None:
    model = MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=6))
    model.config.layer_types, model.config.sliding_window = ["sliding_attention"] * 2, None
    with pytest.raises(ModelError, match="its config's sliding_window is None, not a number of tokens"):
        CausalLM(LoadedModel(model, None, "odd"))


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match='Load it with attn_implementation="sdpa"'):
        CausalLM(LoadedModel(model, None, "odd"))
