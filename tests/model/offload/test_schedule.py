"""The ring's order: every layer in its turn, never a slot in use, and the link always has something to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequoia.model.offload.schedule import Schedule


class FakeLink:
    """Records what it is told, and insists on the rules of a ring."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.log: list[tuple[str, int, int]] = []
        self.holds: dict[int, int] = {}
        self.in_use: set[int] = set()
        self.fails_at: int | None = None

    def begin(self, layer: int, slot: int) -> None:
        assert slot not in self.in_use
        self.holds[slot] = layer
        self.log.append(("begin", layer, slot))

    def wait(self, slot: int) -> None:
        if self.holds[slot] == self.fails_at:
            raise OSError("as asked for")
        self.in_use.add(slot)
        self.log.append(("wait", self.holds[slot], slot))

    def used(self, slot: int) -> None:
        self.in_use.remove(slot)
        self.log.append(("used", self.holds[slot], slot))

    def cancel(self) -> None:
        self.in_use.clear()
        self.log.append(("cancel", 0, 0))

    def close(self) -> None:
        pass


def a_pass(schedule: Schedule, link: FakeLink, layers: int) -> list[int]:
    """The layers it gives."""
    schedule.start_pass()
    found = []
    for _ in range(layers):
        found.append(link.holds[schedule.take()])
        schedule.give_back()
    return found


@given(st.integers(1, 7), st.integers(2, 5))
def test_layers_come_in_order_pass_after_pass(layers: int, slots: int) -> None:
    link = FakeLink(slots)
    schedule = Schedule(link, layers)
    for _ in range(3):
        assert a_pass(schedule, link, layers) == list(range(layers))
    assert all(word != "cancel" for word, *_ in link.log)


def test_the_link_has_work_all_the_time() -> None:
    """A slot that is free is begun at once: before the next layer is waited for, and beyond the end of the pass."""
    link = FakeLink(3)
    schedule = Schedule(link, 4)
    a_pass(schedule, link, 4)
    words = [(word, layer) for word, layer, _ in link.log]
    assert words[:4] == [("begin", 0), ("begin", 1), ("begin", 2), ("wait", 0)]
    assert words[4:7] == [("used", 0), ("begin", 3), ("wait", 1)]
    assert words[-2:] == [("used", 3), ("begin", 2)]
    assert [layer for word, layer in words if word == "begin"] == [0, 1, 2, 3, 0, 1, 2]


@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 5), st.booleans())
def test_a_pass_left_off_anywhere_is_followed_by_a_whole_one(
    layers: int, slots: int, until: int, while_taken: bool
) -> None:
    link = FakeLink(slots)
    schedule = Schedule(link, layers)
    schedule.start_pass()
    for _ in range(min(until, layers)):
        schedule.take()
        schedule.give_back()
    if while_taken:
        schedule.take()
    for _ in range(2):
        assert a_pass(schedule, link, layers) == list(range(layers))


def test_an_error_is_raised_in_its_turn_and_the_next_pass_tries_anew() -> None:
    link = FakeLink(2)
    schedule = Schedule(link, 4)
    link.fails_at = 2
    with pytest.raises(OSError, match="as asked for"):
        a_pass(schedule, link, 4)
    link.fails_at = None
    assert a_pass(schedule, link, 4) == [0, 1, 2, 3]


@given(st.integers(0, 40), st.integers(2, 4))
def test_an_interruption_anywhere_leaves_a_ring_that_works(moment: int, slots: int) -> None:
    """KeyboardInterrupt may come in any call of the link."""
    link = FakeLink(slots)
    schedule = Schedule(link, 3)
    calls = 0

    def interrupting(name: str) -> None:
        real = getattr(link, name)

        def call(*arguments: int) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            real(*arguments)

        setattr(link, name, call)

    for name in ("begin", "wait", "used", "cancel"):
        interrupting(name)
    for _ in range(4):
        try:
            a_pass(schedule, link, 3)
        except KeyboardInterrupt:
            break
    calls = moment + 1
    assert a_pass(schedule, link, 3) == [0, 1, 2]
