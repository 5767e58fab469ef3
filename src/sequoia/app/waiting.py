"""Something moves while people wait."""

from __future__ import annotations

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
