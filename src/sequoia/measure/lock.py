"""One process at a time in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sequoia.errors import FileError


@contextmanager
def locked(folder: Path, remedy: str) -> Iterator[None]:
    """No other process works in the folder meanwhile, where the system can tell; a killed one leaves no lock.

    Args:
        folder: created where it is missing.
        remedy: what to do where another process does, as a sentence.

    Raises:
        FileError: another one does, or the folder cannot be made.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise FileError(f"cannot make {folder}: {error.strerror or error}. Choose another folder.") from error
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileError(f"{folder} is in use by another run. {remedy}") from error
        yield
    finally:
        os.close(opened)
