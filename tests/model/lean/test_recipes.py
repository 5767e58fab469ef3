"""Which models run in the lean decoder, and what happens to those that a recipe does not cover or gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BASES, VARIANTS, TreeRun, assert_close, ids, linear, loaded_here, tiny, variant
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import sequoia
from sequoia.errors import ModelError
from sequoia.model import causal_lm
from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.decoder import Recipe
from sequoia.model.lean.linear import Gated
from sequoia.model.lean.recipes import recipe_of
from sequoia.model.loading import load_model
from sequoia.model.probe import probe, proved


@pytest.mark.parametrize("name", VARIANTS)
def test_known_families_are_proved_and_run_lean(name: str) -> None:
    model, run = variant(name), TreeRun(13)
    found = proved(load_model(model, device="cpu"))
    assert found.is_lean
    assert_close(run.logits(found), linear(model, run.texts))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", BASES)
def test_known_families_run_lean_in_16_bit(family: str, dtype: str) -> None:
    found = proved(load_model(tiny(family), dtype=dtype, device="cpu"))
    assert found.is_lean
    assert found.new_cache().rows(1)[0][0].dtype == found.loaded.dtype


# --- what no recipe covers ------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer of somebody's own around one of the model's."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    @property
    def weight(self) -> Tensor:  # as adapters' layers show the weight that they add to
        return self.inner.weight  # type: ignore[return-value]

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.inner(rows) * self.factor
        return found


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.inner(rows)
        return found


class HalfLogits(transformers.LlamaForCausalLM):
    @wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def _with_layer(wrap: Callable[[nn.Module], nn.Module]) -> Any:
    model = tiny("llama")
    mlp = model.model.layers[1].mlp
    mlp.up_proj = wrap(mlp.up_proj)
    return model


def _with_adapter() -> Any:
    return _with_layer(lambda inner: Scaled(inner, 1.02))


def _with_a_layer_without_weight() -> Any:
    return _with_layer(Wrapped)


def _with_hook() -> Any:
    model = tiny("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.02)
    return model


def _with_hook_before() -> Any:
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.02,))
    return model


def _with_forward_of_its_own() -> Any:
    model = tiny("llama")
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda rows: type(norm).forward(norm, rows) * 1.02
    return model


def _of_a_subclass() -> Any:
    source = tiny("llama")
    model = HalfLogits(source.config)
    model.load_state_dict(source.state_dict())
    return model.eval()


_UNCOVERED: dict[str, Callable[[], Any]] = {
    "logits soft-capped": lambda: tiny("gemma3_text", {"final_logit_softcapping": 2.0}),
    "activation: quick_gelu": lambda: tiny("llama", {"hidden_act": "quick_gelu"}),
    "activation: tanh": lambda: tiny("gpt2", {"activation_function": "tanh"}),
    "adapter": _with_adapter,
    "a layer without weight": _with_a_layer_without_weight,
    "hook": _with_hook,
    "hook before": _with_hook_before,
    "forward of its own": _with_forward_of_its_own,
    "subclass": _of_a_subclass,
    "64 bit": lambda: tiny("llama").double(),
}


@pytest.mark.parametrize("name", _UNCOVERED)
def test_what_no_recipe_covers_runs_in_modules(name: str) -> None:
    model, run = _UNCOVERED[name](), TreeRun(13)
    found = proved(load_model(model, device="cpu"))
    assert not found.is_lean
    assert_close(run.logits(found), linear(model, run.texts))


@pytest.mark.parametrize("name", [name for name in _UNCOVERED if name != "64 bit"])
def test_nor_does_the_probe_need_to_find_it_out(name: str) -> None:
    """In 16 bit many of these would pass for rounding."""
    assert recipe_of(_UNCOVERED[name]().bfloat16()) is None


_OTHER = {
    "PartialRotary": ("StableLm", {"partial_rotary_factor": 0.25, "num_key_value_heads": 2}),
    "Phi3": ("Phi3", {"num_key_value_heads": 2}),
    "Gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}),
    "Olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "GPTNeoX": ("GPTNeoX", {}),
}


@pytest.mark.parametrize("name", _OTHER)
def test_other_model_types_run_in_modules(name: str) -> None:
    kind, changes = _OTHER[name]
    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings | changes))
    run = TreeRun(13)
    found = proved(load_model(model, device="cpu"))
    assert not found.is_lean
    assert_close(run.logits(found), linear(model, run.texts))


def test_a_model_without_a_head_is_refused_and_does_not_crash() -> None:
    model = transformers.LlamaModel(tiny("llama").config).eval()
    assert recipe_of(model) is None
    with pytest.raises(ModelError, match="LlamaModel cannot run"):
        sequoia.load(model, device="cpu")


# --- recipes that are wrong -----------------------------------------------------------------------------------------


def _layers(change: Callable[[Any], Any]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(recipe, layers=[change(layer) for layer in recipe.layers])


def _less_one(norm: Any) -> Any:
    return None if norm is None else replace(norm, weight=norm.weight - 1)


def _without_gemmas_one(recipe: Recipe) -> Recipe:
    norms = ("before_attention", "qk_norm", "after_attention", "before_mlp", "after_mlp")
    changed = _layers(lambda layer: replace(layer, **{name: _less_one(getattr(layer, name)) for name in norms}))(recipe)
    return replace(changed, norm=_less_one(recipe.norm))


def _backwards(recipe: Recipe) -> Recipe:
    def rotations(rows: Tensor, positions: Tensor) -> Any:
        assert recipe.rotations is not None
        return {kind: (cosines, -sines) for kind, (cosines, sines) in recipe.rotations(rows, positions).items()}

    return replace(recipe, rotations=rotations)


def _one_base(recipe: Recipe) -> Recipe:
    def rotations(rows: Tensor, positions: Tensor) -> Any:
        assert recipe.rotations is not None
        found = recipe.rotations(rows, positions)
        return dict.fromkeys(found, found["full_attention"])

    return replace(recipe, rotations=rotations)


def _other_kinds(layer: Any) -> Any:
    return replace(layer, kind="full_attention" if layer.kind == "sliding_attention" else "sliding_attention")


def _ones(norm: Any) -> Any:
    return replace(norm, weight=torch.ones_like(norm.weight))


def _without_bias(linear: Any) -> Any:
    linear._bias = None
    return linear


_TWO_BASES = "gemma3, two rope bases"
# what is wrong → (model, how)
_GROSS: dict[str, tuple[str, Callable[[Recipe], Recipe]]] = {
    "scale": ("llama", _layers(lambda layer: replace(layer, scale=3 * layer.scale))),
    "no norm of queries and keys": ("qwen3", _layers(lambda layer: replace(layer, qk_norm=None))),
    "Gemma's norms without 1": ("gemma3", _without_gemmas_one),
    "rotation the other way": ("llama", _backwards),
    "no rotation": ("qwen2", lambda recipe: replace(recipe, rotations=None)),
    "no positions": ("gpt2", lambda recipe: replace(recipe, embed=lambda tokens, _: recipe.embed(tokens, 0 * tokens))),
    "gate and up exchanged": ("llama", _layers(lambda layer: replace(layer, up=Gated(layer.up.up, layer.up.gate)))),
    "no gate": ("mistral", _layers(lambda layer: replace(layer, up=layer.up.up))),
    "no norm after": ("gemma3", _layers(lambda layer: replace(layer, after_attention=None, after_mlp=None))),
    "a layer left out": ("llama", lambda recipe: replace(recipe, layers=recipe.layers[:1])),
    "layers exchanged": ("llama", lambda recipe: replace(recipe, layers=recipe.layers[::-1])),
    "embedding not scaled": (
        "gemma3",
        lambda recipe: replace(recipe, embed=lambda tokens, at: recipe.embed(tokens, at) / 32**0.5),
    ),
    "last norm's weight": ("gpt2", lambda recipe: replace(recipe, norm=_ones(recipe.norm))),
}
_FINE: dict[str, tuple[str, Callable[[Recipe], Recipe]]] = {  # 16 bit would take these for rounding
    "no bias": ("gpt2", _layers(lambda layer: replace(layer, up=_without_bias(layer.up)))),
    "one rope base": (_TWO_BASES, _one_base),
    "kinds exchanged": ("gemma3", _layers(_other_kinds)),
    "activation": ("llama", _layers(lambda layer: replace(layer, activation="gelu_new"))),
    "scale, a little": ("llama", _layers(lambda layer: replace(layer, scale=1.01 * layer.scale))),
    "eps": (
        "llama, large eps",
        _layers(lambda layer: replace(layer, before_mlp=replace(layer.before_mlp, eps=0.49))),
    ),
}


@pytest.mark.parametrize(
    ("wrong", "dtype"), [*((wrong, "fp32") for wrong in _GROSS | _FINE), *((wrong, "bf16") for wrong in _GROSS)]
)
def test_a_wrong_recipe_is_found_out_and_the_modules_run(
    wrong: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = (_GROSS | _FINE)[wrong]
    model, run = variant(name), TreeRun(13)

    def wrong_recipe(model: Any) -> Recipe:
        recipe = recipe_of(model)
        assert recipe is not None
        return change(recipe)

    monkeypatch.setattr(causal_lm, "recipe_of", wrong_recipe)
    loaded = load_model(model, dtype=dtype, device="cpu")
    with pytest.raises(ModelError):
        probe(CausalLM(loaded))
    found = proved(loaded)
    assert not found.is_lean
    if dtype == "fp32":
        assert_close(run.logits(found), linear(model, run.texts))


def test_a_model_loaded_here_whose_recipe_is_wrong_stays_whole_until_it_is_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, run = variant("llama"), TreeRun(13)
    expected = linear(model, run.texts)
    monkeypatch.setattr(causal_lm, "recipe_of", lambda model: _backwards(recipe_of(model)))  # type: ignore[arg-type]
    found = proved(loaded_here(model))
    assert not found.is_lean
    assert_close(run.logits(found), expected)
    assert found.whole_model is model  # nothing was taken apart for it


# --- what becomes of the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BASES)
def test_a_model_object_goes_on_as_it_was(family: str, tmp_path: Any) -> None:
    model, text = tiny(family), [ids(9)]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    pointers = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    expected = linear(model, text)
    engine = sequoia.load(model, tree="kary:2x3", device="cpu")
    assert engine.target.is_lean
    engine.generate(ids(5), sequoia.SamplingParams(max_tokens=8))
    assert engine.target_model is model
    assert torch.equal(linear(model, text), expected)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == pointers

    model.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weight, saved[name]) for name, weight in before.items())

    model.requires_grad_(True).train()
    loss = model(input_ids=torch.tensor(text), labels=torch.tensor(text)).loss
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def _folder(model: Any, where: Any) -> str:
    model.save_pretrained(where)
    return str(where)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", BASES)
def test_a_model_from_a_folder_is_taken_apart_and_the_whole_one_still_speaks(
    family: str, dtype: str, tmp_path: Any
) -> None:
    folder, prompt = _folder(tiny(family), tmp_path), ids(9)
    target = proved(load_model(folder, dtype=dtype, device="cpu"))
    model: Any = target.loaded.model
    assert target.is_lean
    layers = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    assert layers
    assert all(layer.weight.numel() == 0 for layer in layers)

    engine = sequoia.load(folder, tree="kary:2x3", dtype=dtype, device="cpu")
    whole = engine.target_model
    assert target.whole_model is not model
    assert engine.target_model is whole  # loaded once
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=engine.target.loaded.dtype)
    assert torch.equal(linear(whole, [prompt]), linear(expected, [prompt]))
    tokens = _generated(whole, prompt)
    assert tokens == _generated(expected, prompt)
    if dtype == "fp32":
        params = sequoia.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        assert list(engine.generate(prompt, params).token_ids) == tokens


def _generated(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 9), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    tokens: list[int] = output[0, 9:].tolist()
    return tokens


def test_asking_for_the_whole_model_before_it_is_settled_keeps_no_part_of_it(tmp_path: Any) -> None:
    found = CausalLM(load_model(_folder(tiny("llama"), tmp_path), dtype="fp32", device="cpu"))
    assert found.whole_model is found.loaded.model
    found.settle()
    assert torch.equal(linear(found.whole_model, [ids(9)]), linear(tiny("llama"), [ids(9)]))
