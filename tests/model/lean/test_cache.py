"""What is the lean cache's alone; the contract that both caches share is in tests/model/test_kv_cache.py."""

from __future__ import annotations

import pytest
import torch

from sequoia.model.lean.cache import LeanCache

_LAYERS, _HEADS, _SIZE = 2, 3, 4


def _cache(dtype: torch.dtype = torch.float32) -> LeanCache:
    return LeanCache(_LAYERS, _HEADS, _SIZE, dtype, torch.device("cpu"))


def _fill(cache: LeanCache, count: int) -> torch.Tensor:
    """Write random rows; returns them, [keys or values, layers, heads, count, size]."""
    rows = torch.randn(2, _LAYERS, _HEADS, count, _SIZE, generator=torch.Generator().manual_seed(count))
    _, _, *new = cache.rows(count)
    for parts, views in zip(rows, new, strict=True):
        for part, view in zip(parts, views, strict=True):
            view.copy_(part)
    cache.append(count)
    return rows


def _held(cache: LeanCache) -> torch.Tensor:
    keys, values, *_ = cache.rows(0)
    return torch.stack([torch.stack([part[0] for part in parts]) for parts in (keys, values)])


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("length", [0, 1, 255, 256])
def test_views_have_the_shapes_that_attention_takes(length: int, count: int) -> None:
    cache = _cache(torch.bfloat16)
    if length:
        _fill(cache, length)
    keys, values, new_keys, new_values = cache.rows(count)
    for seen, new in ((keys, new_keys), (values, new_values)):
        assert len(seen) == len(new) == _LAYERS
        assert {part.shape for part in seen} == {(1, _HEADS, length + count, _SIZE)}
        assert {part.shape for part in new} == {(_HEADS, count, _SIZE)}
        assert {part.dtype for part in (*seen, *new)} == {torch.bfloat16}


def test_what_is_written_into_the_new_rows_is_seen() -> None:
    cache = _cache()
    _fill(cache, 3)
    keys, values, new_keys, new_values = cache.rows(2)
    for new, mark in ((new_keys, 1.0), (new_values, 2.0)):
        for layer in range(_LAYERS):
            new[layer].fill_(mark + 10 * layer)
    for seen, mark in ((keys, 1.0), (values, 2.0)):
        for layer in range(_LAYERS):
            assert torch.equal(seen[layer][0, :, 3:], torch.full((_HEADS, 2, _SIZE), mark + 10 * layer))
    assert cache.length == 3


def test_it_grows_past_one_step_at_once_and_only_when_it_is_full() -> None:
    cache = _cache()
    first = _fill(cache, 5)
    place = cache.rows(250)[0][0].data_ptr()
    assert cache.rows(251)[0][0].data_ptr() == place  # 256 slots
    assert cache.rows(252)[0][0].data_ptr() != place
    second = _fill(cache, 700)
    assert torch.equal(_held(cache), torch.cat([first, second], dim=3))


def test_keep_with_gaps_moves_every_layers_keys_and_values() -> None:
    cache = _cache()
    rows = _fill(cache, 9)
    cache.keep(3, [4, 5, 8])
    assert torch.equal(_held(cache), rows[..., [0, 1, 2, 4, 5, 8], :])
    assert cache.length == 6


def test_keep_of_what_lies_in_place_moves_nothing() -> None:
    cache = _cache()
    rows = _fill(cache, 6)
    cache.keep(2, [2, 3])
    assert torch.equal(_held(cache), rows[..., :4, :])
    cache.keep(4, [])
    assert cache.length == 4


def test_rows_after_a_keep_follow_the_kept_ones() -> None:
    cache = _cache()
    rows = _fill(cache, 9)
    cache.keep(3, [8])
    later = _fill(cache, 2)
    assert torch.equal(_held(cache), torch.cat([rows[..., [0, 1, 2, 8], :], later], dim=3))


def test_truncating_to_nothing_and_beginning_anew() -> None:
    cache = _cache()
    _fill(cache, 9)
    cache.truncate(0)
    assert _held(cache).shape == (2, _LAYERS, _HEADS, 0, _SIZE)
    rows = _fill(cache, 4)
    assert torch.equal(_held(cache), rows)
