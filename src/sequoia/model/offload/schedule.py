"""Which layer goes into which slot of the ring next, so that the link is at work all the time.

Layers are wanted in the same order in every pass. As soon as a slot is free the next layer is begun, the first ones of
the next pass while this one is at its end: the link works on while the draft does.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Link(Protocol):
    """What brings layers into slots, in the order in which they are begun."""

    @property
    def slots(self) -> int: ...

    def begin(self, layer: int, slot: int) -> None:
        """Start to bring a layer into a slot, as soon as what last used it is done."""

    def wait(self, slot: int) -> None:
        """What is computed from now on finds in the slot what was begun last.

        Raises:
            FileError: it could not be read.
        """

    def used(self, slot: int) -> None:
        """What was computed so far is all that needs the slot's contents."""

    def cancel(self) -> None:
        """Forget everything begun; afterwards nothing is written to any slot."""

    def close(self) -> None:
        """The same for good, and nothing is held any more."""


class Schedule:
    """The ring.

    Invariant between passes: no slot is taken, and those being filled hold the first layers in their order.

    Args:
        layers: how many there are; they are 0, 1, … in each pass.
    """

    def __init__(self, link: Link, layers: int) -> None:
        self._link, self._layers = link, layers
        self._free = deque(range(link.slots))
        self._filling: deque[tuple[int, int]] = deque()  # layer and slot, in the order they were begun
        self._taken: int | None = None
        self._next = 0

    def start_pass(self) -> None:
        """To be called before a pass; after one that was left off the ring begins anew."""
        first = self._filling[0][0] if self._filling else self._next
        if self._taken is not None or first != 0 or not self._is_whole():
            self._link.cancel()
            self._free = deque(range(self._link.slots))
            self._filling.clear()
            self._taken, self._next = None, 0
        self._fill()

    def take(self) -> int:
        """The slot that holds the next layer, until `give_back`.

        Raises:
            FileError: the layer could not be read.
        """
        _, slot = self._filling[0]
        self._taken = slot
        self._link.wait(slot)
        self._filling.popleft()
        return slot

    def give_back(self) -> None:
        """The slot taken last may be filled again."""
        slot = self._taken
        assert slot is not None
        self._link.used(slot)
        self._free.append(slot)
        self._taken = None
        self._fill()

    def _fill(self) -> None:
        while self._free:
            slot = self._free.popleft()
            self._link.begin(self._next, slot)
            self._filling.append((self._next, slot))
            self._next = (self._next + 1) % self._layers

    def _is_whole(self) -> bool:
        """Whether no slot was lost to an interruption."""
        return sorted([*self._free, *(slot for _, slot in self._filling)]) == list(range(self._link.slots))
