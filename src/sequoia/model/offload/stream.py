"""A decoder's layers for a pass: some are resident, the others take their weights from the ring."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from sequoia.model.lean.decoder import Layer
from sequoia.model.lean.linear import Linear
from sequoia.model.offload.layout import Matrix
from sequoia.model.offload.schedule import Link, Schedule
from sequoia.model.placement import return_freed_memory


@dataclass(frozen=True)
class Bound:
    """A linear layer, and where in a slot its weight lies."""

    linear: Linear
    weight: Matrix


class LayerStream:
    """The layers of one pass after another. When it is forgotten its threads and files go with it.

    Args:
        layers: all of them.
        streamed: of the ones that are not resident, by number: what is bound to a slot.
        link: brings these, in their order.
        ring: the slots' bytes.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        streamed: Mapping[int, Sequence[Bound]],
        link: Link,
        ring: Sequence[Tensor],
    ) -> None:
        self._layers = layers
        self._schedule = Schedule(link, len(streamed))
        self._streamed = {
            number: [[(part.linear, part.weight.view(slot)) for part in parts] for slot in ring]
            for number, parts in streamed.items()
        }
        self._lock = Lock()
        self.close = weakref.finalize(self, link.close)

    @contextmanager
    def a_pass(self) -> Iterator[Iterator[Layer]]:
        """The layers in order, each ready until the next is asked for; one pass at a time.

        Raises:
            FileError: a layer could not be read, or the stream is closed. The next pass tries anew.
        """
        with self._lock:
            return_freed_memory()  # of logits and trees: what is kept for later is not in the budget
            self._schedule.start_pass()
            yield self._in_order()

    def _in_order(self) -> Iterator[Layer]:
        for number, layer in enumerate(self._layers):
            by_slot = self._streamed.get(number)
            if by_slot is None:
                yield layer
                continue
            for linear, weight in by_slot[self._schedule.take()]:
                linear.bind(weight)
            yield layer
            self._schedule.give_back()
