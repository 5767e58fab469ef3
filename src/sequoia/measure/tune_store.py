"""What a tuning has finished, kept in the user's cache until all of it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sequoia.errors import FileError
from sequoia.measure.lock import locked
from sequoia.tree.checks import require_keys
from sequoia.tree.records import load_record, save_record

_ABOUT = "about.json"
_FORGOTTEN_SECONDS = 14 * 24 * 3600.0  # after which nobody goes on with it


def tunings_folder() -> Path:
    """$XDG_CACHE_HOME or ~/.cache, then sequoia/tunings."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sequoia" / "tunings"


@contextmanager
def kept_parts(about: Mapping[str, Any], notice: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """A folder for the finished parts of the tuning that `about` describes, which is plain data.

    After an error or Ctrl-C the folder stays, and the next tuning of the same finds it. Once all is done it goes.

    Raises:
        FileError: it cannot be written, or another process tunes the same.
    """
    key = json.dumps(about, sort_keys=True)
    folder = tunings_folder() / hashlib.sha256(key.encode()).hexdigest()[:16]
    with locked(folder, "Wait for it."):
        _forget_old(folder)
        if not _is_of(folder, about):
            if any(folder.iterdir()):
                notice(f"{folder} is damaged, so this tuning starts anew")
            _empty(folder)
            save_record(folder / _ABOUT, {"about": about})
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(folder: Path, about: Mapping[str, Any]) -> bool:
    """Whether it holds parts of this tuning, by its own account."""
    plain = json.loads(json.dumps(about))  # tuples are lists once they were in a file
    try:
        return bool(
            load_record(folder / _ABOUT, lambda record: require_keys("it", record, ["about"])["about"]) == plain
        )
    except FileError:
        return False


def _empty(folder: Path) -> None:
    try:
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except OSError as error:
        raise FileError(f"cannot empty {folder}: {error.strerror or error}. Delete it.") from error


def _forget_old(folder: Path) -> None:
    """Drop what was left long ago."""
    for other in folder.parent.iterdir():
        with suppress(OSError):
            if other != folder and time.time() - _touched(other) > _FORGOTTEN_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _touched(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
