"""Layers from weight files into a ring in memory, by threads that read without holding the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from queue import SimpleQueue
from threading import Event, Lock, Thread

import torch
from torch import Tensor

from sequoia.errors import FileError
from sequoia.model.offload.files import WeightFile, aligned_buffer, as_tensor
from sequoia.model.offload.layout import PIECE, Copy, LayerLayout, Piece

THREADS = 4
"""Reads in flight."""

STAGING = PIECE + (1 << 13)
"""Bytes of a thread's own buffer, for what is written anew: a piece, and what alignment adds at its ends."""

_TOGETHER = 1 << 15  # numbers copied at once: torch uses one thread for so few, and others would be in the passes' way


class Fill:
    """A layer on its way into a slot, in pieces that come in any order."""

    def __init__(self, pieces: int) -> None:
        self.error: str | None = None
        """What went wrong first, as text: an exception would hold on to whoever met it."""
        self.is_cancelled = False
        self._left = pieces
        self._lock = Lock()
        self._done = Event()

    def piece_done(self, error: str | None = None) -> None:
        """After the first error the rest is not read."""
        with self._lock:
            if error is not None and self.error is None:
                self.error, self.is_cancelled = error, True
            self._left -= 1
            if self._left == 0:
                self._done.set()

    def wait(self) -> None:
        """Until no thread writes any more."""
        self._done.wait()


_Job = tuple[Fill, Piece, int]


class DiskLink:
    """See `Link`.

    Args:
        files: closed with the link.
        layouts: of the layers.
        dtype: of the numbers in the ring.
        slots: how many layers the ring holds.
    """

    def __init__(
        self, files: Sequence[WeightFile], layouts: Sequence[LayerLayout], dtype: torch.dtype, slots: int
    ) -> None:
        self.slots = slots
        self._dtype = dtype
        size = max(layout.size for layout in layouts)
        self._buffers = [aligned_buffer(size) for _ in range(slots)]
        self.ring = [as_tensor(buffer) for buffer in self._buffers]
        """The slots' bytes."""
        self.bytes_moved = 0
        """Of the layers begun so far."""
        self._by_path, self._layouts = {file.path: file for file in files}, layouts
        self._views = [memoryview(buffer) for buffer in self._buffers]
        self._fills: list[Fill | None] = [None] * slots
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [Thread(target=self._work, name=f"weights {number}", daemon=True) for number in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, layer: int, slot: int) -> None:
        """See `Link.begin`.

        Raises:
            FileError: the link is closed.
        """
        if not self._threads:
            raise FileError("the model's files are closed. Load the model again.")
        layout = self._layouts[layer]
        fill = self._fills[slot] = Fill(len(layout.pieces))
        self.bytes_moved += layout.read_bytes
        for piece in layout.pieces:
            self._jobs.put((fill, piece, slot))

    def wait(self, slot: int) -> None:
        """See `Link.wait`."""
        fill = self._fills[slot]
        assert fill is not None
        fill.wait()
        if fill.error is not None:
            raise FileError(fill.error)

    def used(self, slot: int) -> None:
        """Nothing to do: passes on a CPU have ended when they return."""

    def cancel(self) -> None:
        """See `Link.cancel`."""
        fills = [fill for fill in self._fills if fill is not None]
        for fill in fills:
            fill.is_cancelled = True
        for fill in fills:
            fill.wait()

    def close(self) -> None:
        """See `Link.close`; a second time does nothing."""
        if not self._threads:
            return
        self.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        for file in self._by_path.values():
            file.close()

    def _work(self) -> None:
        staging = aligned_buffer(STAGING)
        while (job := self._jobs.get()) is not None:
            fill, piece, slot = job
            try:
                if not fill.is_cancelled:
                    self._bring(piece, slot, staging)
                fill.piece_done()
            except FileError as error:
                fill.piece_done(str(error))
            except BaseException as error:  # whoever waits must not wait for ever
                fill.piece_done(f"cannot read {piece.names}: {type(error).__name__}: {error}")

    def _bring(self, piece: Piece, slot: int, staging: mmap) -> None:
        """One read, and what follows it."""
        file = self._by_path[piece.file]
        if piece.target is None:
            buffer = memoryview(staging)[: piece.length]
        else:
            buffer = self._views[slot][piece.target : piece.target + piece.length]
        file.read_into(buffer, piece.start, piece.needed, piece.names)
        file.check()
        if piece.copy is not None:
            _copy(as_tensor(staging), self.ring[slot], piece.copy, self._dtype)


@torch.inference_mode()
def _copy(source: Tensor, slot: Tensor, copy: Copy, dtype: torch.dtype) -> None:
    raw = source[copy.start : copy.start + copy.numbers * copy.dtype.itemsize]
    if copy.start % copy.dtype.itemsize:  # a file whose header ends where no number may lie
        raw = raw.clone()
    target = slot[copy.target : copy.target + copy.numbers * dtype.itemsize].view(dtype)
    pairs = zip(torch.split(target, _TOGETHER), torch.split(raw.view(copy.dtype), _TOGETHER), strict=True)
    for part, numbers in pairs:
        part.copy_(numbers)
