"""8-bit linear layers: the same bits for a row alone and among others, and near the exact product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sequoia.model.lean import int8
from sequoia.model.lean.decoder import LayerNorm, Norm, RMSNorm
from sequoia.model.lean.int8 import Int8Rows, Int8Weight, quantised
from sequoia.model.lean.linear import Gated, Linear, quantise_modules

_IN, _OUT = 96, 80
_FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=["kernels", "kernels without signs", "fallback"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With oneDNN's kernels, as this machine takes them and as those without AMX do, and without any."""
    if request.param == "kernels without signs":
        monkeypatch.setattr(int8, "_takes_signs", lambda: False)
    if request.param == "fallback":
        monkeypatch.setattr(int8, "has_kernels", lambda: False)
    elif not int8.has_kernels():
        pytest.skip("this machine has no exact integer kernels")
    return str(request.param)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rows(count: int, dtype: torch.dtype) -> Tensor:
    rows = _random(count, _IN, seed=1)
    rows[:, 3] *= 200  # a column that is always large
    rows[-1] = 0
    return rows.to(dtype)


def _module(dtype: torch.dtype, bias: bool, seed: int = 0) -> nn.Linear:
    module = nn.Linear(_IN, _OUT, bias=bias, dtype=dtype).requires_grad_(False)
    module.weight.copy_(_random(_OUT, _IN, seed=seed))
    return module


def _linear(dtype: torch.dtype, bias: bool, seed: int = 0) -> tuple[nn.Linear, Linear]:
    module = _module(dtype, bias, seed)
    linear = Linear([module])
    linear.quantise(release=False)
    return module, linear


@_FORMATS
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_gives_the_same_bits_alone_and_among_others(dtype: torch.dtype, bias: bool, kernels: str) -> None:
    _, linear = _linear(dtype, bias)
    rows, other = _rows(37, dtype), _random(37, _OUT).to(dtype)
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [lambda r, o: linear(r), linear.plus]
    for call in calls:
        together = call(rows, other)
        for count in (1, 2, 5, 16):
            parts = zip(rows.split(count), other.split(count), strict=True)
            assert torch.equal(torch.cat([call(row, rest) for row, rest in parts]), together)


@_FORMATS
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_near_the_exact_one(dtype: torch.dtype, bias: bool, kernels: str) -> None:
    module, linear = _linear(dtype, bias)
    rows, other = _rows(9, dtype), _random(9, _OUT).to(dtype)
    exact = nn.functional.linear(rows.double(), module.weight.double(), module.bias.double() if bias else None)
    assert _error(linear(rows), exact) < 0.01
    assert _error(linear.plus(rows, other), exact + other.double()) < 0.01


def test_kernels_and_fallback_are_one_function(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = _random(_OUT, _IN), _rows(9, torch.float32)
    fast = Int8Weight(weight, None)(quantised(rows))
    monkeypatch.setattr(int8, "has_kernels", lambda: False)
    slow = Int8Weight(weight, None)(quantised(rows))
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-5)


def test_sums_stay_exact_beyond_what_32_bit_floats_count(kernels: str) -> None:
    inputs = 1 << 14
    weight, rows = torch.full((_OUT, inputs), 127.0), torch.full((3, inputs), 127.0)
    weight[0, ::2], weight[1, 0] = -127, -127
    found = Int8Weight(weight, None)(quantised(rows))
    expected = (rows.double() @ weight.double().T).float()
    if kernels == "fallback":
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(found, expected)


@_FORMATS
def test_gate_and_up_share_their_rows(dtype: torch.dtype, kernels: str) -> None:
    gate, up, rows = _module(dtype, True), _module(dtype, False, seed=2), _rows(5, dtype)
    gated = Gated(Linear([gate]), Linear([up]))
    gated.quantise(release=False)
    exact = nn.functional.silu(gate.double()(rows.double())) * up.double()(rows.double())
    found = gated.activated(rows, "silu")
    assert isinstance(found, Int8Rows)
    first, rest = found.values.float().chunk(2)
    assert _error((first + rest / 128) * found.scale, exact) < 0.02


def test_values_stay_within_8_bits_and_rows_of_zeros_stay_zero() -> None:
    rows = torch.cat([_rows(200, torch.bfloat16), torch.full((1, _IN), 3e38).bfloat16()])
    found = quantised(rows)
    assert found.values.dtype == torch.int8
    first, rest = found.values.float().chunk(2)
    assert float(first.abs().max()) == 127
    assert float(rest.abs().max()) <= 64
    torch.testing.assert_close((first + rest / 128) * found.scale.float(), rows.float(), rtol=0, atol=3e38 / 15000)
    assert not found.values[199].any()


@_FORMATS
@pytest.mark.parametrize("norm", [RMSNorm(_random(_IN), 1e-5), LayerNorm(_random(_IN), _random(_IN, seed=2), 1e-5)])
def test_norms_quantise_what_they_give(norm: Norm, dtype: torch.dtype) -> None:
    rows = _rows(9, dtype)
    found = norm.quantised(rows)
    first, rest = found.values.float().chunk(2)
    torch.testing.assert_close((first + rest / 128) * found.scale, norm(rows.float()), rtol=0, atol=2e-3)
    alone = [norm.quantised(row).scale for row in rows.split(1)]
    assert torch.equal(torch.cat(alone), found.scale)


def test_what_is_no_number_does_not_become_one(kernels: str) -> None:
    _, linear = _linear(torch.float32, bias=False)
    rows = _rows(3, torch.float32)
    rows[0, 5], rows[1, 5] = float("nan"), float("inf")
    found = linear(rows)
    assert not found[:2].isfinite().any()
    assert found[2].isfinite().all()


def test_kernels_that_stop_at_16_bit_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(values: Tensor, packed: Tensor, *rest: object) -> Tensor:
        return (values.float() @ values.float().T).clamp(-32768, 32767)

    monkeypatch.setattr(int8, "_pack", lambda values: values)
    monkeypatch.setattr(int8, "_multiplied", saturating)
    assert not int8.has_kernels.__wrapped__()


def test_missing_operators_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(int8, "_multiplied", missing)
    assert not int8.has_kernels.__wrapped__()


def test_modules_of_unknown_families_are_replaced_and_their_weights_released() -> None:
    model = nn.Sequential(nn.Linear(_IN, _OUT), nn.ReLU(), nn.Linear(_OUT, 4)).requires_grad_(False)
    rows = _random(2, 3, _IN)
    expected = model(rows).double()
    first = model[0]
    quantise_modules(model)
    assert model(rows).shape == (2, 3, 4)
    assert _error(model(rows), expected) < 0.02
    assert isinstance(first, nn.Linear)
    assert first.weight.numel() == 0


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt() / exact.std())
