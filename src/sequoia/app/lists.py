"""Options that take several values, with commas between them."""

from __future__ import annotations

from sequoia.errors import UsageError


def numbers(name: str, text: str) -> tuple[float, ...]:
    """The numbers in `text`, each once. UsageError, naming the option, where there is anything else."""
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{name} takes numbers with commas between them, such as 0,0.6, not {text!r}.") from None


def integers(name: str, text: str) -> tuple[int, ...]:
    """The integers in `text`, each once. UsageError, naming the option, where there is anything else."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{name} takes integers with commas between them, such as 1,4,16, not {text!r}.") from None
