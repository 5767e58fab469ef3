"""How a command ends when it does not end well: one line on stderr and an exit code."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import typer

from sequoia.app.output import discard_streams, print_error
from sequoia.errors import SequoiaError

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_PIPE_CLOSED = 141  # 128 + SIGPIPE
# click's UsageError, which typer takes from click or has a copy of, depending on its release.
_COMMAND_LINE_ERROR: Any = typer.BadParameter.__mro__[1]


@dataclass
class Run:
    """What is known about this run besides its arguments."""

    debug: bool = False
    interrupted: bool = False


@contextmanager
def watched_interrupts(run: Run) -> Iterator[None]:
    """Note Ctrl-C before raising KeyboardInterrupt: libraries that are loading may turn that into another error."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    # An ignored signal (nohup, a shell's background job) stays ignored.
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        run.interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_code_of(error: BaseException, run: Run) -> int:
    """Tell the user about `error`, if there is anything to tell, and return the exit code."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if run.interrupted or isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        discard_streams()
        return _PIPE_CLOSED
    if isinstance(error, SystemExit):
        raise error
    if run.debug:
        traceback.print_exception(error)
    message, code = _explained(error)
    print_error(message)
    return code


def _explained(error: BaseException) -> tuple[str, int]:
    """The line to print and the exit code."""
    if isinstance(error, SequoiaError):
        return str(error), error.exit_code
    if isinstance(error, _COMMAND_LINE_ERROR):
        return _command_line_message(error), 2
    if _is_out_of_memory(error):
        return "out of memory. Choose a smaller model, a smaller tree or a shorter prompt.", 1
    described = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{described} (a bug: run with --debug for the traceback)", 1


def _command_line_message(error: Any) -> str:
    message = error.format_message().rstrip()
    message = message[:1].lower() + message[1:]
    dot = "" if message.endswith((".", "?", "!")) else "."
    place = error.ctx.command_path if error.ctx is not None else "sequoia"
    return f"{message}{dot} See {place} --help."


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # if it was never imported, it did not raise this
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
