"""Starting a results file, or going on with one: only where what is compared, and on what, is still the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sequoia.errors import UsageError
from sequoia.measure.bench.records import Results, ResultsFile, RunEntry


def open_results(file: ResultsFile, run: RunEntry) -> Results:
    """What the file holds already; a new one begins with `run`.

    Raises:
        UsageError: it holds another run; the first difference is named.
        FileError: it is damaged or cannot be written.
    """
    if not file.path.exists():
        file.create(run)
        return Results(run)
    results = file.load()
    change = next(changes(results.run, run), None)
    if change is not None and not results.results:  # a start that failed before anything was measured
        file.create(run)
        return Results(run)
    if change is not None:
        raise UsageError(
            f"{file.path.parent} holds a run that differs: {change}. Go on with it as it was, or start another with "
            f"--out {_another(file.path.parent)}."
        )
    file.mend()
    return results


def changes(before: RunEntry, now: RunEntry) -> Iterator[str]:
    """What differs, settings first, as "name was this and is now that"."""
    yield from _changes("", _plain(before), _plain(now))


def _plain(run: RunEntry) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(run)))  # tuples are lists once they were in a file
    return plain


def _changes(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from _changes(f"{name} {key}".strip(), before.get(key), now.get(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True), start=1):
            yield from _changes(f"{name} {number}", *pair)
    elif before != now:
        yield f"{name} was {_short(before)} and is now {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "not given" if value is None else str(value)


def _another(folder: Path) -> str:
    """A folder beside this one that is not there yet."""
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return str(other)
