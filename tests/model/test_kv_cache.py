"""The cache against plain lists: what is in it, and what is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from sequoia.model.kv_cache import KVCache

_HEADS, _KEY_SIZE, _VALUE_SIZE = 2, 3, 5


def _rows(marks: Sequence[float], layer: int, size: int) -> Tensor:
    """[1, heads, rows, size] with numbers that tell mark, layer, head and column apart."""
    heads, columns = torch.arange(_HEADS)[:, None, None], torch.arange(size)
    return (torch.tensor(list(marks))[:, None] * 100 + layer * 50 + heads * 10 + columns)[None].float()


def _write(cache: KVCache, marks: Sequence[float], layers: int) -> list[tuple[Tensor, Tensor]]:
    """What a model's forward does, short of `append`; returns what its attention modules were shown."""
    return [
        cache.update(_rows(marks, layer, _KEY_SIZE), _rows(marks, layer, _VALUE_SIZE), layer) for layer in range(layers)
    ]


def _check(cache: KVCache, marks: Sequence[float], layers: int) -> None:
    """The cache holds exactly `marks`: a further forward is shown them and its own row."""
    assert cache.length == len(marks)
    for layer, (keys, values) in enumerate(_write(cache, [-1.0], layers)):
        assert torch.equal(keys, _rows([*marks, -1.0], layer, _KEY_SIZE))
        assert torch.equal(values, _rows([*marks, -1.0], layer, _VALUE_SIZE))


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of forwards, broken forwards, keeps and truncations; the model is a list of marks."""

    @initialize(layers=st.integers(1, 3))
    def start(self, layers: int) -> None:
        self.cache, self.layers = KVCache(), layers
        self.marks: list[float] = []
        self.next_mark = 0

    def fresh(self, count: int) -> list[float]:
        self.next_mark += count
        return [float(mark) for mark in range(self.next_mark - count, self.next_mark)]

    @rule(count=st.one_of(st.integers(1, 8), st.integers(200, 600)))
    def forward(self, count: int) -> None:
        marks = self.fresh(count)
        _write(self.cache, marks, self.layers)
        self.cache.append(count)
        self.marks += marks

    @rule(count=st.integers(1, 300), data=st.data())
    def interrupted_forward(self, count: int, data: st.DataObject) -> None:
        _write(self.cache, self.fresh(count), data.draw(st.integers(0, self.layers)))

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.marks)))
        slots = sorted(
            data.draw(st.sets(st.integers(start, len(self.marks) - 1), max_size=20)) if start < len(self.marks) else []
        )
        if not self.marks:
            return
        self.cache.keep(start, slots)
        self.marks[start:] = [self.marks[slot] for slot in slots]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.marks)))
        self.cache.truncate(length)
        del self.marks[length:]

    @invariant()
    def contents(self) -> None:
        _check(self.cache, self.marks, self.layers)


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
test_any_sequence_of_operations = CacheMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_keep_at_arbitrary_increasing_slots(data: st.DataObject) -> None:
    """Fault 14: kept rows follow the prefix in order, in every layer, keys and values alike."""
    length = data.draw(st.integers(1, 40))
    start = data.draw(st.integers(0, length - 1))
    slots = sorted(data.draw(st.sets(st.integers(start, length - 1))))
    cache, marks = KVCache(), [float(mark) for mark in range(length)]
    _write(cache, marks, 2)
    cache.append(length)
    cache.keep(start, slots)
    _check(cache, marks[:start] + [marks[slot] for slot in slots], 2)


def test_growth_over_many_steps_keeps_the_contents() -> None:
    cache, marks = KVCache(), list[float]()
    for count in (1, 254, 1, 1, 255, 300, 7, 1024):
        new = [float(len(marks) + index) for index in range(count)]
        _write(cache, new, 2)
        cache.append(count)
        marks += new
        _check(cache, marks, 2)


def test_an_exception_in_the_middle_of_a_forward_leaves_the_cache_as_it_was() -> None:
    cache, marks = KVCache(), [0.0, 1.0, 2.0]
    _write(cache, marks, 2)
    cache.append(3)

    def forward() -> None:
        cache.update(_rows([7.0] * 400, 0, _KEY_SIZE), _rows([7.0] * 400, 0, _VALUE_SIZE), 0)
        raise MemoryError

    with pytest.raises(MemoryError):
        forward()
    assert cache.length == 3
    _check(cache, marks, 2)


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_to_a_length_it_does_not_have_is_refused(length: int) -> None:
    cache = KVCache()
    _write(cache, [0.0, 1.0, 2.0], 1)
    cache.append(3)
    with pytest.raises(ValueError, match="cannot truncate a cache of 3 slots"):
        cache.truncate(length)
    assert cache.length == 3


def test_update_returns_views_not_copies() -> None:
    cache = KVCache()
    first, _ = cache.update(_rows([0.0], 0, _KEY_SIZE), _rows([0.0], 0, _VALUE_SIZE), 0)
    cache.append(1)
    second, _ = cache.update(_rows([1.0], 0, _KEY_SIZE), _rows([1.0], 0, _VALUE_SIZE), 0)
    assert first.data_ptr() == second.data_ptr()


def test_it_names_its_size() -> None:
    cache = KVCache()
    _write(cache, [0.0], 2)
    cache.append(1)
    assert repr(cache) == "KVCache(length=1, layers=2)"
