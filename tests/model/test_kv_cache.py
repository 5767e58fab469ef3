"""Both caches against plain lists: what is in them, and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from sequoia.model.kv_cache import KVCache
from sequoia.model.lean.cache import LeanCache

_HEADS = 2


def _rows(marks: Sequence[float], layer: int, size: int) -> Tensor:
    """[1, heads, rows, size] with numbers that tell mark, layer, head and column apart."""
    heads, columns = torch.arange(_HEADS)[:, None, None], torch.arange(size)
    return (torch.tensor(list(marks))[:, None] * 100 + layer * 50 + heads * 10 + columns)[None].float()


class Writer(Protocol):
    """How a model uses one kind of cache. Values are the negative of what keys of their size would be."""

    key_size: int
    value_size: int

    def new(self, layers: int) -> Any: ...

    def write(self, cache: Any, marks: Sequence[float], layers: int) -> list[tuple[Tensor, Tensor]]:
        """What a forward does in the first `layers`, short of `append`; returns what their attention was shown."""


class _Modules:
    """transformers' modules, layer by layer."""

    key_size, value_size = 3, 5

    def new(self, layers: int) -> KVCache:
        return KVCache()

    def write(self, cache: KVCache, marks: Sequence[float], layers: int) -> list[tuple[Tensor, Tensor]]:
        return [cache.update(_rows(marks, layer, 3), -_rows(marks, layer, 5), layer) for layer in range(layers)]


class _Lean:
    """The lean decoder, with views for all layers at once."""

    key_size = value_size = 4

    def new(self, layers: int) -> LeanCache:
        return LeanCache(layers, _HEADS, 4, torch.float32, torch.device("cpu"))

    def write(self, cache: LeanCache, marks: Sequence[float], layers: int) -> list[tuple[Tensor, Tensor]]:
        keys, values, new_keys, new_values = cache.rows(len(marks))
        for layer in range(layers):
            new_keys[layer].copy_(_rows(marks, layer, 4)[0])
            new_values[layer].copy_(-_rows(marks, layer, 4)[0])
        return list(zip(keys, values, strict=True))[:layers]


_WRITERS: dict[str, Writer] = {"modules": _Modules(), "lean": _Lean()}


@pytest.fixture(params=_WRITERS)
def writer(request: pytest.FixtureRequest) -> Writer:
    return _WRITERS[request.param]


def _check(writer: Writer, cache: Any, marks: Sequence[float], layers: int) -> None:
    """The cache holds exactly `marks`: a further forward is shown them and its own row."""
    assert cache.length == len(marks)
    shown = writer.write(cache, [-1.0], layers)
    assert len(shown) == layers
    for layer, (keys, values) in enumerate(shown):
        assert torch.equal(keys, _rows([*marks, -1.0], layer, writer.key_size))
        assert torch.equal(values, -_rows([*marks, -1.0], layer, writer.value_size))


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of forwards, broken forwards, keeps and truncations; the model is a list of marks."""

    writer: Writer

    @initialize(layers=st.integers(1, 3))
    def start(self, layers: int) -> None:
        self.cache, self.layers = self.writer.new(layers), layers
        self.marks: list[float] = []
        self.next_mark = 0

    def fresh(self, count: int) -> list[float]:
        self.next_mark += count
        return [float(mark) for mark in range(self.next_mark - count, self.next_mark)]

    @rule(count=st.one_of(st.integers(1, 8), st.integers(200, 600)))
    def forward(self, count: int) -> None:
        marks = self.fresh(count)
        self.writer.write(self.cache, marks, self.layers)
        self.cache.append(count)
        self.marks += marks

    @rule(count=st.integers(1, 300), data=st.data())
    def interrupted_forward(self, count: int, data: st.DataObject) -> None:
        self.writer.write(self.cache, self.fresh(count), data.draw(st.integers(0, self.layers)))

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
        _check(self.writer, self.cache, self.marks, self.layers)


class ModulesMachine(CacheMachine):
    writer = _WRITERS["modules"]


class LeanMachine(CacheMachine):
    writer = _WRITERS["lean"]


_FEW = settings(max_examples=40, stateful_step_count=12, deadline=None)
ModulesMachine.TestCase.settings = LeanMachine.TestCase.settings = _FEW
test_any_sequence_of_operations = ModulesMachine.TestCase
test_any_sequence_of_operations_of_the_lean_cache = LeanMachine.TestCase


@pytest.mark.parametrize("kind", _WRITERS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_keep_at_arbitrary_increasing_slots(kind: str, data: st.DataObject) -> None:
    """Fault 14: kept rows follow the prefix in order, in every layer, keys and values alike."""
    writer = _WRITERS[kind]
    length = data.draw(st.integers(1, 40))
    start = data.draw(st.integers(0, length - 1))
    slots = sorted(data.draw(st.sets(st.integers(start, length - 1))))
    cache, marks = writer.new(2), [float(mark) for mark in range(length)]
    writer.write(cache, marks, 2)
    cache.append(length)
    cache.keep(start, slots)
    _check(writer, cache, marks[:start] + [marks[slot] for slot in slots], 2)


def test_growth_over_many_steps_keeps_the_contents(writer: Writer) -> None:
    cache, marks = writer.new(2), list[float]()
    for count in (1, 254, 1, 1, 255, 300, 7, 1024):
        new = [float(len(marks) + index) for index in range(count)]
        writer.write(cache, new, 2)
        cache.append(count)
        marks += new
        _check(writer, cache, marks, 2)


def test_an_exception_in_the_middle_of_a_forward_leaves_the_cache_as_it_was(writer: Writer) -> None:
    cache, marks = writer.new(2), [0.0, 1.0, 2.0]
    writer.write(cache, marks, 2)
    cache.append(3)

    def forward() -> None:
        writer.write(cache, [7.0] * 400, 1)
        raise MemoryError

    with pytest.raises(MemoryError):
        forward()
    assert cache.length == 3
    _check(writer, cache, marks, 2)


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_to_a_length_it_does_not_have_is_refused(writer: Writer, length: int) -> None:
    cache = writer.new(1)
    writer.write(cache, [0.0, 1.0, 2.0], 1)
    cache.append(3)
    with pytest.raises(ValueError, match="cannot truncate a cache of 3 slots"):
        cache.truncate(length)
    assert cache.length == 3
    _check(writer, cache, [0.0, 1.0, 2.0], 1)


def test_keeping_more_slots_than_there_are_is_refused(writer: Writer) -> None:
    cache = writer.new(1)
    writer.write(cache, [0.0, 1.0, 2.0], 1)
    cache.append(3)
    with pytest.raises(ValueError, match="cannot truncate a cache of 3 slots to 4"):
        cache.keep(2, [2, 3])


def test_a_forward_is_shown_views_not_copies(writer: Writer) -> None:
    cache = writer.new(1)
    ((first, first_values),) = writer.write(cache, [0.0], 1)
    cache.append(1)
    ((second, second_values),) = writer.write(cache, [1.0], 1)
    assert first.data_ptr() == second.data_ptr()
    assert first_values.data_ptr() == second_values.data_ptr()


@pytest.mark.parametrize(("kind", "name"), [("modules", "KVCache"), ("lean", "LeanCache")])
def test_it_names_its_size(kind: str, name: str) -> None:
    cache = _WRITERS[kind].new(2)
    _WRITERS[kind].write(cache, [0.0], 2)
    cache.append(1)
    assert repr(cache) == f"{name}(length=1, layers=2)"
