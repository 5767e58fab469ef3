"""Something moves while people wait."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from sequoia.app.output import console, note

_PATIENCE_SECONDS = 1.0


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr once this has lasted a second; yields what tells people about something slow.

    Where stderr is no terminal nothing moves, and what is told becomes a line.
    """
    if not sys.stderr.isatty():
        yield note
        return
    from rich.text import Text

    status = console().status(Text(text))
    timer = Timer(_PATIENCE_SECONDS, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda line: status.update(Text(line))
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports alone: no search for garbage, of which they make none, and no later one among what they made."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if searching:
            gc.enable()
