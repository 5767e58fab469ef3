"""Layers from a host's memory into a ring on a GPU, by a stream of its own beside the one that calculates.

Neither waits for the host: a copy waits for what last used its slot, and a layer's passes for its copy, by events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Device(Protocol):
    """What copies beside calculating. An event is a moment in the work of either."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Begin a copy once the event `after` has come (None: at once), behind the copies begun earlier.

        Returns:
            The event of its end.
        """

    def wait(self, event: Any) -> None:
        """What is calculated from now on begins after the event."""

    def mark(self) -> Any:
        """The event that all that was to be calculated so far is done."""

    def finish_copies(self) -> None:
        """Wait until all copies begun are done."""


class CudaDevice:
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._copies = cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """See `Device.copy`; the source is pinned."""
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self._copies.record_event()

    def wait(self, event: Any) -> None:
        """See `Device.wait`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def mark(self) -> Any:
        """See `Device.mark`."""
        return torch.cuda.current_stream(self._device).record_event()

    def finish_copies(self) -> None:
        """See `Device.finish_copies`."""
        self._copies.synchronize()


class CopyLink:
    """See `Link`.

    Args:
        layers: the bytes of each in the host's memory.
        ring: the slots' bytes on the device, each as long as the longest layer.
    """

    def __init__(self, device: Device, layers: Sequence[Tensor], ring: Sequence[Tensor]) -> None:
        self.slots, self.ring = len(ring), ring
        self.bytes_moved = 0
        """Of the layers begun so far."""
        self._device, self._layers = device, layers
        self._copied: list[Any] = [None] * len(ring)
        self._used: list[Any] = [None] * len(ring)

    def begin(self, layer: int, slot: int) -> None:
        """See `Link.begin`."""
        source = self._layers[layer]
        self.bytes_moved += len(source)
        self._copied[slot] = self._device.copy(source, self.ring[slot][: len(source)], self._used[slot])

    def wait(self, slot: int) -> None:
        """See `Link.wait`."""
        self._device.wait(self._copied[slot])

    def used(self, slot: int) -> None:
        """See `Link.used`."""
        self._used[slot] = self._device.mark()

    def cancel(self) -> None:
        """See `Link.cancel`; what a pass that was left off has begun on the device goes on, and is waited for."""
        self._used = [self._device.mark()] * self.slots
        self._device.finish_copies()

    def close(self) -> None:
        """See `Link.close`."""
        self._device.finish_copies()
        self._layers = ()
