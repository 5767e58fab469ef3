"""Weight files read around the page cache, and watched: a short read or a changed file is an error that names it."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from sequoia.errors import FileError
from sequoia.model.tensor_files import TensorPlace

BLOCK = 4096
"""Direct reads begin, end and land at multiples of this."""

Read = Callable[[int, list[memoryview], int], int]
"""As `os.preadv`: (descriptor, where to, offset) → bytes read, 0 at the file's end."""

_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned_buffer(size: int) -> mmap.mmap:
    """Zeroed memory that begins with a page and takes none until it is written to."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, max(size, BLOCK))
    # Fewer pages to pin for each read; shared memory, which is Python's default, has no large ones.
    buffer = mmap.mmap(-1, max(size, BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def as_tensor(buffer: mmap.mmap) -> Tensor:
    """Its bytes, [size], which keep it alive."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


class WeightFile:
    """A file open for reading; its reads may come from several threads.

    Args:
        read: in place of `os.preadv`.

    Raises:
        FileError: it cannot be opened.
    """

    def __init__(self, path: Path, read: Read = os.preadv) -> None:
        self.path = path
        self._read = read
        self._descriptor, self.is_direct = _opened(path)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._stamp = self._stamp_now()
        self.size = self._stamp[0]

    def read_into(self, buffer: memoryview, start: int, needed: int, names: str) -> None:
        """Fill the buffer from byte `start` on.

        Args:
            buffer: as long as is read at most; at a multiple of `BLOCK`, as is `start`.
            needed: bytes without which the read has failed; what lies behind them fills the last block.
            names: of the tensors, for errors.

        Raises:
            FileError: the file ends early, or the disk fails.
        """
        done = 0
        while done < needed:
            try:
                count = self._read(self._descriptor, [buffer[done:]], start + done)
            except OSError as error:
                raise FileError(
                    f"cannot read {names} from {self.path} (byte {start + done}): {error.strerror or error}. "
                    "Check the disk and load the model again."
                ) from error
            done += count
            # Direct reads go on from a block's beginning; one that ends elsewhere has met the end of the file.
            if done < needed and (count == 0 or (self.is_direct and done % BLOCK)):
                raise FileError(
                    f"{self.path} ends at byte {start + done}, and {names} goes on to byte {start + needed}. "
                    "The file was cut short: download or save the model again."
                )
        if not self.is_direct:
            self._drop_pages(start, done)

    def check(self) -> None:
        """Raises:
        FileError: the file is no longer what it was when it was opened.
        """
        if self._stamp_now() != self._stamp:
            raise FileError(f"{self.path} has changed since it was loaded. Load the model again.")

    def close(self) -> None:
        """Nothing can be read any more."""
        self._close()

    def _stamp_now(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _drop_pages(self, start: int, count: int) -> None:
        """Pages that are read once a pass would push out others that are of use."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_DONTNEED)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether its reads are direct."""
    try:
        if _DIRECT:
            with suppress(_DirectReadsError):
                return _opened_directly(path), True
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
    except OSError as error:
        raise FileError(f"cannot open {path}: {error.strerror or error}.") from error


class _DirectReadsError(Exception):
    pass


def _opened_directly(path: Path) -> int:
    """A descriptor that has read a block; some file systems open a file for direct reads and then refuse these."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
        with aligned_buffer(BLOCK) as block:
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno == errno.EINVAL:
            raise _DirectReadsError from error
        raise
    return descriptor


def read_tensor(file: WeightFile, place: TensorPlace, dtype: torch.dtype) -> Tensor:
    """A whole tensor, once, for keeps.

    Raises:
        FileError: see `WeightFile.read_into`; or it holds no floats.
    """
    raw = torch.empty(place.shape, dtype=place.dtype)
    staging = aligned_buffer(_STAGING)
    view, bytes_ = memoryview(staging), raw.view(-1).view(torch.uint8)
    for start in range(place.start // BLOCK * BLOCK, place.end, _STAGING):
        end = min(start + _STAGING, place.end)
        file.read_into(view, start, end - start, place.name)
        first = max(start, place.start)
        bytes_[first - place.start : end - place.start] = as_tensor(staging)[first - start : end - start]
    return raw.to(dtype)


_STAGING = 1 << 22  # bytes
