"""Where output goes: answers on stdout, byte for byte; everything for people on stderr."""

from __future__ import annotations

import os
import sys
from io import StringIO
from typing import TYPE_CHECKING, Any, TextIO

from sequoia.errors import FileError

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 100  # of tables and drawings that go to a file or a pipe
_ENDLESS = 10_000  # tables have found their width before they are printed


def prepare_streams() -> None:
    """Streams that take any text: closed ones swallow it, narrow encodings show a mark for what they lack."""
    sys.stdout = _prepared(sys.stdout)
    sys.stderr = _prepared(sys.stderr)


def _prepared(stream: Any) -> Any:
    if stream is None:  # the caller closed it: `sequoia … >&-`
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return stream


def write_out(text: str) -> None:
    """Write to stdout at once and unchanged.

    Raises:
        BrokenPipeError: nobody reads any more.
        FileError: it cannot be written, for example on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_streams()
        raise FileError(f"cannot write to standard output: {error.strerror or error}.") from error


def print_out(content: Any, style: str | None = None) -> None:
    """On stdout: text as it is, colours only on a terminal and without NO_COLOR, nothing wrapped or cut."""
    from rich.console import Console

    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    drawn = StringIO()
    console = Console(
        file=drawn,
        force_terminal=sys.stdout.isatty() or None,
        color_system=colours,
        markup=False,
        highlight=False,
        emoji=False,
        width=_ENDLESS,
    )
    console.print(content, style=style, soft_wrap=True)
    write_out("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines()))


def flush_all() -> None:
    """Find out now, not after the exit code is settled, whether everything could be written."""
    write_out("")
    sys.stderr.flush()


def discard_streams() -> None:
    """Drop what stdout could not write, which the interpreter would try again on its way out."""
    try:
        sys.stdout.flush()
    except OSError:
        _point_nowhere(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        _point_nowhere(sys.stderr)


def _point_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console() -> Console:
    """For people, on stderr: text as it is, colours only on a terminal and without NO_COLOR."""
    from rich.console import Console

    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    width = None if sys.stderr.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(stderr=True, color_system=colours, markup=False, highlight=False, emoji=False, width=width)


def note(text: str, style: str = "") -> None:
    """A line on stderr, never wrapped or cut."""
    console().print(text, style=style or None, soft_wrap=True)


def print_error(message: str) -> None:
    """`error: message` as one line on stderr."""
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", " ".join(message.split()))
    console().print(line, soft_wrap=True)


def terminal_width() -> int:
    """Columns of the terminal that stdout goes to, or a usual width for files and pipes."""
    from shutil import get_terminal_size

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return get_terminal_size().columns
    return _PLAIN_WIDTH
