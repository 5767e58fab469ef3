"""Fused, packed and side by side, a linear layer computes what its modules do, from one copy of their weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CellType, ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BASES, TreeRun, assert_close, ids, layer_linears, linear, tiny
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import sequoia
from sequoia.model import causal_lm
from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean import linear as linear_module
from sequoia.model.lean.linear import ACTIVATIONS, Gated, Linear, PackedModule, can_pack, pack_modules
from sequoia.model.loading import load_model
from sequoia.model.probe import proved

_CPU = torch.device("cpu")
_IN, _OUT = 48, (32, 16, 20)
needs_packing = pytest.mark.skipif(not can_pack(torch.bfloat16, _CPU), reason="no packed bf16 kernels here")


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _modules(kind: str, count: int, bias: bool) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for index, out in enumerate(_OUT[:count]):
        module = nn.Linear(_IN, out, bias=bias) if kind == "linear" else Conv1D(out, _IN)
        module.weight.data = _random(*module.weight.shape, seed=index) / _IN**0.5
        if module.bias is not None:
            module.bias.data = _random(out, seed=10 + index) if bias else torch.zeros(out)
        modules.append(module.requires_grad_(False))
    return modules


# name → (dtype, how it is settled: not at all, as one matrix, packed; tolerance)
_FORMS = {
    "fp32, unsettled": (torch.float32, None, 1e-5),
    "fp32, settled": (torch.float32, False, 1e-5),
    "fp16, settled": (torch.float16, False, 4e-3),
    "bf16, unsettled": (torch.bfloat16, None, 2e-2),
    "bf16, settled": (torch.bfloat16, False, 2e-2),
    "bf16, packed": (torch.bfloat16, True, 2e-2),
}
_each_form = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=needs_packing if "packed" in form else ()) for form in _FORMS]
)
_each_layer = pytest.mark.parametrize(
    ("kind", "count", "bias"),
    [(kind, count, bias) for kind in ("linear", "conv1d") for count in (1, 2, 3) for bias in (True, False)],
)


class _Case:
    """A layer in one form, and its modules in 32 bit with the same weights."""

    def __init__(self, form: str, kind: str, count: int, bias: bool) -> None:
        self.dtype, packed, self.tolerance = _FORMS[form]
        self.modules = [module.to(self.dtype) for module in _modules(kind, count, bias)]
        self.layer = Linear(self.modules)
        if packed is not None:
            self.layer.settle(packed, release=False)
        self.exact = [module.float() for module in _modules(kind, count, bias)]
        for module, exact in zip(self.modules, self.exact, strict=True):
            exact.load_state_dict(module.state_dict())

    def rows(self, count: int, size: int = _IN, seed: int = 20) -> Tensor:
        return _random(count, size, seed=seed).to(self.dtype)

    def expected(self, rows: Tensor) -> Tensor:
        return torch.cat([module(rows.float()) for module in self.exact], dim=-1)

    def check(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == self.dtype
        torch.testing.assert_close(found.float(), expected, rtol=self.tolerance, atol=self.tolerance)


@_each_form
@_each_layer
@pytest.mark.parametrize("count_of_rows", [1, 2, 17, 64, 512])
def test_a_plain_layer(form: str, kind: str, count: int, bias: bool, count_of_rows: int) -> None:
    case = _Case(form, kind, count, bias)
    rows = case.rows(count_of_rows)
    case.check(case.layer(rows), case.expected(rows))


@_each_form
@_each_layer
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_with_an_activation(form: str, kind: str, count: int, bias: bool, activation: str) -> None:
    """Those of transformers."""
    case = _Case(form, kind, count, bias)
    rows = case.rows(5)
    case.check(case.layer.activated(rows, activation), ACT2FN[activation](case.expected(rows)))


@_each_form
@_each_layer
def test_times_and_plus(form: str, kind: str, count: int, bias: bool) -> None:
    case = _Case(form, kind, count, bias)
    for rows in (case.rows(1), case.rows(5)):
        other = case.rows(len(rows), sum(_OUT[:count]), seed=30)
        before, exact = other.clone(), case.expected(rows)
        case.check(case.layer.times(rows, other), exact * before.float())
        case.check(case.layer.plus(rows, other), exact + before.float())
        assert torch.equal(other, before)


@_each_form
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated(form: str, activation: str) -> None:
    gate, up = _Case(form, "linear", 1, bias=False), _Case(form, "linear", 1, bias=True)
    rows = gate.rows(5)
    found = Gated(gate.layer, up.layer).activated(rows, activation)
    gate.check(found, ACT2FN[activation](gate.expected(rows)) * up.expected(rows))


@_each_form
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_wide_gate_of_many_rows_in_pieces(form: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no plain matrix stays whole; the last piece is smaller."""
    monkeypatch.setattr(linear_module, "PIECE", 5)
    pieces: list[int] = []
    some = Linear.some
    monkeypatch.setattr(Linear, "some", lambda layer, rows, part: pieces.append(part.start) or some(layer, rows, part))
    gate, up = _Case(form, "linear", 1, bias=False), _Case(form, "linear", 1, bias=True)
    for count in (31, 32):
        rows = gate.rows(count)
        found = Gated(gate.layer, up.layer).activated(rows, activation)
        gate.check(found, ACT2FN[activation](gate.expected(rows)) * up.expected(rows))
    assert pieces == ([start for start in range(0, 32, 5) for _ in "gu"] if form.endswith(", settled") else [])


@_each_form
@pytest.mark.parametrize("with_bias", [0, 1, 2])
def test_a_bias_of_one_module_is_not_another_ones(form: str, with_bias: int) -> None:
    dtype, packed, tolerance = _FORMS[form]
    modules = _modules("linear", 3, bias=True)
    for index, module in enumerate(modules):
        module.to(dtype)
        if index != with_bias:
            module.bias = None  # type: ignore[assignment]
    layer = Linear(modules)
    if packed is not None:
        layer.settle(packed, release=False)
    rows = _random(5, _IN, seed=20).to(dtype)
    expected = torch.cat([module(rows) for module in modules], dim=-1)
    torch.testing.assert_close(layer(rows), expected, rtol=tolerance, atol=tolerance)


@_each_form
def test_rows_that_do_not_lie_side_by_side(form: str) -> None:
    case = _Case(form, "linear", 2, bias=True)
    rows = case.rows(_IN, 6).T
    assert not rows.is_contiguous()
    case.check(case.layer(rows), case.expected(rows))


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_released_modules_hold_no_weights_and_the_layer_goes_on(kind: str, packed: bool) -> None:
    make = nn.Linear if kind == "linear" else Conv1D
    modules: list[Any] = [make(64, 64).bfloat16() for _ in range(3)]  # packed layouts are padded to 64
    layer, rows = Linear(modules), _random(5, 64, seed=20).bfloat16()
    expected = torch.cat([module(rows) for module in modules], dim=-1)
    layer.settle(packed, release=True)
    assert [module.weight.numel() for module in modules] == [0, 0, 0]
    assert not any(module.weight.requires_grad for module in modules)
    assert _bytes(layer) == 3 * (64 * 64 + 64) * 2
    torch.testing.assert_close(layer(rows), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
@pytest.mark.parametrize(("kind", "count"), [("linear", 1), ("linear", 3), ("conv1d", 1)])
def test_modules_that_are_not_released_go_on_too(kind: str, count: int, packed: bool) -> None:
    case = _Case("bf16, unsettled", kind, count, bias=True)
    before = [(module.weight, module.weight.clone()) for module in case.modules]  # type: ignore[operator]
    case.layer.settle(packed, release=False)
    for module, (weight, values) in zip(case.modules, before, strict=True):
        assert module.weight is weight
        assert torch.equal(weight, values)
    assert case.layer.modules == ()


def test_a_single_matrix_is_not_copied_where_it_need_not_be_packed() -> None:
    for kind in ("linear", "conv1d"):
        (module,) = _modules(kind, 1, bias=False)
        layer = Linear([module])
        pointer = module.weight.data_ptr()  # type: ignore[operator]
        layer.settle(packed=False, release=True)
        assert layer._weight is not None
        assert layer._weight.data_ptr() == pointer


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.float32, "cpu"), (torch.float16, "cpu"), (torch.float64, "cpu"), (torch.bfloat16, "cuda")],
)
def test_only_bf16_on_a_cpu_is_packed(dtype: torch.dtype, device: str) -> None:
    assert not can_pack(dtype, torch.device(device))


@pytest.mark.parametrize("operator", ["_reorder_linear_weight", "_linear_pointwise"])
@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError])
def test_nothing_is_packed_without_the_operators(
    operator: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(torch.ops.mkldnn, operator, missing)
    assert not can_pack(torch.bfloat16, _CPU)


def test_nothing_is_packed_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert not can_pack(torch.bfloat16, _CPU)


@needs_packing
def test_a_folder_in_bf16_is_packed_and_an_object_is_not(tmp_path: Path) -> None:
    model = tiny("llama").bfloat16()
    model.save_pretrained(tmp_path)
    for source, packed in ((str(tmp_path), True), (model, False)):
        found = CausalLM(load_model(source, dtype="bf16", device="cpu"))
        found.settle()
        layers = _layers(found)
        assert [layer._packed is not None for layer in layers] == [packed] * len(layers)


@pytest.mark.parametrize("family", BASES)
def test_a_folder_in_bf16_runs_without_packing_too(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(family).save_pretrained(tmp_path)
    run, loaded = TreeRun(13), load_model(str(tmp_path), dtype="bf16", device="cpu")
    expected = linear(loaded.model, run.texts).float()
    monkeypatch.setattr(causal_lm, "can_pack", lambda dtype, device: False)
    found = CausalLM(loaded)
    found.settle()
    error = (run.logits(found).float() - expected).square().mean().sqrt() / expected.std()
    assert error < 0.05


def _layers(model: CausalLM) -> list[Linear]:
    assert model._decoder is not None
    recipe = model._decoder.recipe
    return [*layer_linears(recipe), recipe.head]


# --- models of other families ---------------------------------------------------------------------------------------

_COMMON = {
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
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
# name → (settings, linear layers)
_OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "Phi3": ({"num_key_value_heads": 2}, 9),
    "Gemma2": ({"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}, 14),  # its head is the embedding
    "StableLm": ({"num_key_value_heads": 2}, 15),
    "GPTNeoX": ({}, 9),
    "Qwen3Moe": (_EXPERTS | {"head_dim": 8}, 9),
}


def _other(name: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**_COMMON | _OTHERS[name][0] | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.3 * torch.randn(weight.shape))
    return model.eval()


@needs_packing
@pytest.mark.parametrize("name", _OTHERS)
def test_other_families_run_in_packed_modules(name: str, tmp_path: Path) -> None:
    _other(name).save_pretrained(tmp_path)
    run = TreeRun(13)
    engine = sequoia.load(str(tmp_path), tree="kary:2x3", dtype="bf16", device="cpu")
    assert not engine.target.is_lean
    model = engine.target.loaded.model
    assert sum(isinstance(module, PackedModule) for module in model.modules()) == _OTHERS[name][1]
    left = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert left == ([model.lm_head] if model.config.tie_word_embeddings else [])

    unpacked = load_model(str(tmp_path), dtype="bf16", device="cpu")
    assert_close(run.logits(engine.target), run.logits(CausalLM(unpacked)))
    texts = [ids(9)]
    assert_close(linear(model, texts), linear(unpacked.model, texts))

    whole = engine.target_model
    assert not any(isinstance(module, PackedModule) for module in whole.modules())
    prompt = torch.tensor(texts)
    output = whole.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, pad_token_id=0
    )
    assert output.shape == (1, 17)


@pytest.mark.parametrize("name", _OTHERS)
def test_other_families_are_left_whole_in_32_bit(name: str, tmp_path: Path) -> None:
    _other(name).save_pretrained(tmp_path)
    engine = sequoia.load(str(tmp_path), tree="kary:2x3", dtype="fp32", device="cpu")
    assert not any(isinstance(module, PackedModule) for module in engine.target.loaded.model.modules())
    assert engine.target_model is engine.target.loaded.model  # and not loaded again


def test_a_model_object_of_another_family_is_left_whole() -> None:
    model = _other("Phi3").bfloat16()
    sequoia.load(model, tree="kary:2x3", device="cpu")
    assert not any(isinstance(module, PackedModule) for module in model.modules())


class _Bare(nn.ModuleList):
    """As much of a model as packing looks at."""

    def get_input_embeddings(self) -> None:
        return None

    def get_output_embeddings(self) -> None:
        return None


@needs_packing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # a router may keep 32 bit in a model of 16
@pytest.mark.parametrize("shape", [(_IN,), (1, _IN), (2, 3, _IN), (0, _IN), (2, 0, _IN)])
def test_a_packed_module_takes_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = _modules("linear", 1, bias=True)[0].to(dtype)
    rows = _random(*shape, seed=20).to(dtype)
    expected = module(rows)
    parent = _Bare([module])
    pack_modules(parent)
    assert isinstance(parent[0], PackedModule)
    torch.testing.assert_close(parent[0](rows), expected, rtol=2e-2, atol=2e-2)


@needs_packing
def test_layers_of_other_kinds_are_not_packed() -> None:
    class Own(nn.Linear):
        pass

    parent = _Bare([Own(8, 8), Conv1D(8, 8), nn.Embedding(8, 8)]).bfloat16()
    before = list(parent)
    pack_modules(parent)
    assert list(parent) == before
    assert all(module.weight.numel() == 64 for module in parent)


# --- memory ---------------------------------------------------------------------------------------------------------


def _tensors(root: Any) -> Iterator[Tensor]:
    """Every tensor that `root` keeps alive, once."""
    seen, waiting = set[int](), [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (dict, list, tuple, set, partial, CellType)):
            waiting += gc.get_referents(item)
        else:  # objects, bound methods, and functions without their globals
            waiting += [getattr(item, name, None) for name in ("__dict__", "__self__", "__closure__")]


def _bytes(root: Any) -> int:
    """Of all storages; packed weights have none to look at, and tell their bytes, padding included."""
    plain, packed = {}, 0
    for tensor in _tensors(root):
        if tensor.layout is torch.strided:
            plain[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        else:
            packed += torch.ops.mkldnn._nbytes(tensor)
    return sum(plain.values()) + packed


def _in_folder(model: Any, folder: Path) -> int:
    """Save the model in bf16; returns the bytes of its weights."""
    model.bfloat16().save_pretrained(folder)
    return sum(weight.nbytes for weight in model.parameters())


def test_the_count_of_bytes_sees_all_there_are() -> None:
    shared = torch.zeros(100)
    module = nn.Linear(10, 10, bias=False)
    assert _bytes([shared, {"a": (shared[:50], shared.view(10, 10))}]) == 400
    assert _bytes(lambda: module(shared)) == 800
    assert _bytes(module.forward) == 400
    assert _bytes(partial(print, shared)) == 400
    if can_pack(torch.bfloat16, _CPU):
        layer = Linear([nn.Linear(64, 64, bias=False).bfloat16()])
        layer.settle(packed=True, release=True)
        assert _bytes(layer) == 64 * 64 * 2


_LARGE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), _LARGE),
    "qwen3": _LARGE | {"head_dim": 32},
    "gemma3_text": _LARGE | {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"n_embd": 128, "n_layer": 4},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", BASES)
def test_no_weight_is_held_twice(family: str, dtype: str, tmp_path: Path) -> None:
    size = _in_folder(tiny(family, _SIZES[family]), tmp_path) * (2 if dtype == "fp32" else 1)
    engine = sequoia.load(str(tmp_path), tree="off", dtype=dtype, device="cpu")
    assert size <= _bytes(engine.target) < 1.1 * size


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_nor_where_the_head_is_the_embedding(family: str, tmp_path: Path) -> None:
    size = _in_folder(tiny(family, _SIZES[family] | {"tie_word_embeddings": True, "vocab_size": 1000}), tmp_path)
    found = proved(load_model(str(tmp_path), dtype="bf16", device="cpu"))
    embedding = found.loaded.model.get_input_embeddings().weight
    assert size <= _bytes(found) < 1.1 * size
    assert _layers(found)[-1]._weight.data_ptr() == embedding.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", _OTHERS)
def test_nor_in_packed_modules(name: str, tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_key_value_heads": 4}
    model = _other(name, **sizes, tie_word_embeddings=tied, vocab_size=6000 if tied else 128)
    size = _in_folder(model, tmp_path)
    found = sequoia.load(str(tmp_path), tree="off", dtype="bf16", device="cpu").target
    assert size <= _bytes(found) < 1.1 * size
