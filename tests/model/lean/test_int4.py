"""4-bit linear layers: what their integers stand for, and products that are those of what they stand for."""

from __future__ import annotations

import pytest
import torch
from tiny_models import restored, tiny
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from sequoia.errors import UsageError
from sequoia.model.lean import int4
from sequoia.model.lean.fused import PLAIN
from sequoia.model.lean.int4 import GROUP, Int4Weight, rounded
from sequoia.model.lean.int8 import Int8Rows
from sequoia.model.lean.linear import Gated, Linear, PackedModule, quantise_modules

_IN, _OUT = 2 * GROUP, 48
_FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _module(inputs: int = _IN, outputs: int = _OUT, seed: int = 0) -> nn.Linear:
    module = nn.Linear(inputs, outputs).requires_grad_(False)
    module.weight.copy_(_random(outputs, inputs, seed=seed))
    return module


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_weights_come_closer_than_by_even_steps_over_their_range() -> None:
    weight = _random(_OUT, _IN)
    groups = weight.view(_OUT, -1, GROUP)
    least, most = groups.aminmax(dim=2, keepdim=True)
    step = (most - least) / 15
    even = ((groups - least) / step).round() * step + least
    moved = (rounded(weight).restored() - weight).view_as(groups)
    assert moved.square().mean() < 0.95 * (even - groups).square().mean()
    assert (moved.abs() <= 1.5 * step).all()


def test_weights_of_sixteen_even_steps_come_back() -> None:
    steps = torch.randint(0, 16, (_OUT, _IN), generator=torch.Generator().manual_seed(0))
    steps[:, ::GROUP], steps[:, 1::GROUP] = 0, 15
    weight = (steps - 8).bfloat16() * 0.25
    assert torch.equal(rounded(weight).restored(), weight.float())


@pytest.mark.parametrize("value", [0.0, 0.75, -3.0])
@_FORMATS
def test_groups_of_one_number_come_back(value: float, dtype: torch.dtype) -> None:
    weight = torch.full((1, GROUP), value, dtype=dtype)
    torch.testing.assert_close(rounded(weight).restored(), weight.float(), rtol=1e-6, atol=1e-6)


@_FORMATS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(_IN, _OUT), (GROUP - 14, 37), (GROUP + 6, 5)])
def test_products_are_those_of_the_rounded_weights(dtype: torch.dtype, bias: bool, sizes: tuple[int, int]) -> None:
    weight, rows = _random(*reversed(sizes)).to(dtype), _random(9, sizes[0], seed=1).to(dtype)
    added = _random(sizes[1], seed=2).to(dtype) if bias else None
    found = Int4Weight(weight, added)(rows)
    assert found.dtype == dtype
    expected = functional.linear(rows.float(), restored(weight), None if added is None else added.float())
    assert _error(found, expected) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]


@_FORMATS
def test_a_row_gives_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    whole, rows = Int4Weight(_random(_OUT, _IN).to(dtype), None), _random(37, _IN, seed=1).to(dtype)
    assert torch.equal(whole(rows), torch.cat([whole(row[None]) for row in rows]))


def test_it_takes_four_and_a_half_bits_for_a_weight() -> None:
    size = 16 * GROUP
    assert Int4Weight(_random(size, size).bfloat16(), None).bytes == size * size * (4 + 32 / GROUP) / 8


def test_missing_operators_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(int4, "_multiplied", missing)
    assert not int4.has_kernels.__wrapped__(torch.float32, "cpu")
    monkeypatch.setattr(int4, "has_kernels", lambda dtype, device: False)
    with pytest.raises(UsageError, match="int4 weights need a kernel that this torch has not"):
        Int4Weight(_random(_OUT, _IN), None)


def test_kernels_with_another_meaning_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int4.has_kernels.__wrapped__(torch.float32, "cpu")
    right = int4._multiplied
    monkeypatch.setattr(int4, "_multiplied", lambda rows, packed, scales: right(rows, packed, scales.flip(2)))
    assert not int4.has_kernels.__wrapped__(torch.float32, "cpu")


def test_unknown_devices_have_no_kernels() -> None:
    assert not int4.has_kernels(torch.float32, "meta")


@pytest.mark.parametrize("released", [False, True])
def test_every_form_of_a_linear_layer(released: bool) -> None:
    module, rows, other = _module(), _random(5, _IN, seed=1), _random(5, _OUT, seed=2)
    plain = functional.linear(rows, restored(module.weight), module.bias)
    linear = Linear([module])
    linear.quantise(release=released, bits=4)
    torch.testing.assert_close(linear(rows), plain, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear.plus(rows, other), plain + other, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear.times(rows, other), plain * other, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear.activated(rows, "silu"), functional.silu(plain), rtol=1e-5, atol=1e-4)
    assert (module.weight.numel() == 0) == released


def test_layers_side_by_side_and_transposed_weights() -> None:
    first, second, rows = Conv1D(_OUT, _IN).requires_grad_(False), _module(seed=3), _random(5, _IN, seed=1)
    first.weight.copy_(_random(_IN, _OUT, seed=4))
    linear = Linear([first, second])
    linear.quantise(release=False, bits=4)
    weights, biases = [first.weight.T, second.weight], [first.bias, second.bias]
    expected = [functional.linear(rows, restored(w), b) for w, b in zip(weights, biases, strict=True)]
    torch.testing.assert_close(linear(rows), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_layer_leaves_the_other_as_it_was(bits: int) -> None:
    module, rows = _module(), _random(5, _IN, seed=1)
    linear = Linear([module])
    expected = linear(rows)
    twin = linear.rounded(bits)
    assert torch.equal(linear(rows), expected)
    assert 0 < _error(twin(rows), expected) < {4: 0.15, 8: 0.02}[bits]
    quantised = Linear([module])
    quantised.quantise(release=True, bits=bits)
    assert torch.equal(twin(rows), quantised(rows))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_gate_leaves_the_other_as_it_was(bits: int) -> None:
    gate, up, rows = _module(), _module(seed=5), _random(5, _IN, seed=1)
    gated = Gated(Linear([gate]), Linear([up]))
    expected = gated.activated(rows, "silu")
    twin = gated.rounded(bits)
    assert isinstance(expected, Tensor)
    assert torch.equal(gated.activated(rows, "silu"), expected)
    found = twin.activated(rows, "silu", PLAIN)
    if isinstance(found, Int8Rows):
        first, second = found.values.float().chunk(2)
        assert _error((first + second / 128) * found.scale, expected) < 0.02
    else:
        gates, ups = (functional.linear(rows, restored(m.weight), m.bias) for m in (gate, up))
        torch.testing.assert_close(found, functional.silu(gates) * ups, rtol=1e-5, atol=1e-4)


def test_of_modules_the_head_stays_as_it_is() -> None:
    model = tiny("llama", {"tie_word_embeddings": False})
    quantise_modules(model, bits=4)
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedModule)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight.numel() > 0
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()
