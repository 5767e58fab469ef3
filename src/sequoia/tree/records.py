"""Versioned JSON records on disk: written whole or not at all, read strictly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from sequoia.errors import FileError, UsageError

T = TypeVar("T")


def check_record(record: object, kind: str, version: int, keys: Iterable[str]) -> Mapping[str, Any]:
    """Return `record` if it is a mapping of this kind and version with exactly these further keys.

    Raises:
        UsageError: it is something else; the message names what is wrong.
    """
    if not isinstance(record, Mapping):
        raise UsageError(f"a {kind} record must be a JSON object, not {type(record).__name__}.")
    if record.get("format") != kind:
        raise UsageError(f"format must be {kind!r}, not {record.get('format')!r}: this is another kind of record.")
    if record.get("version") != version or isinstance(record["version"], bool):
        raise UsageError(f"version must be {version}, not {record.get('version')!r}: written by another release.")
    known = {"format", "version", *keys}
    if unknown := sorted(map(str, record.keys() - known)):
        raise UsageError(f"unknown key {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
    if missing := sorted(known - record.keys()):
        raise UsageError(f"key {missing[0]!r} is missing. Needed: {', '.join(sorted(known))}.")
    return record


def save_record(path: str | os.PathLike[str], record: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write `record` as JSON; a reader never sees half a file, and a failure leaves nothing behind.

    Raises:
        UsageError: the record holds something JSON cannot.
        FileError: the file cannot be written.
    """
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"
        data = text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot be saved as JSON: {error}.") from error
    save_bytes(path, data)


def save_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all. FileError if it cannot be written."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        try:
            part.write_bytes(data)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}.") from error


def load_record(path: str | os.PathLike[str], read: Callable[[Any], T]) -> T:
    """Parse the JSON file at `path` and build an object from it with `read`.

    Raises:
        FileError: the file is missing, is not JSON, or `read` refuses what it holds; the path is named.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not valid JSON: {error}. Write it again.") from error
    return build(path, record, read)


def build(path: str | os.PathLike[str], record: Any, read: Callable[[Any], T]) -> T:
    """What `read` makes of the `record` that `path` holds. FileError, naming the path, if it refuses it."""
    try:
        return read(record)
    except UsageError as error:
        raise FileError(f"{path}: {error}") from error
