"""What all methods find in torch, and must leave as it was: else the next ones run under other conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sequoia.errors import UsageError

_SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
}


@contextmanager
def left_alone(who: str) -> Iterator[None]:
    """Put back what `who` changes inside.

    Raises:
        UsageError: it changed something.
    """
    before = {name: get() for name, (get, _) in _SHARED.items()}
    try:
        yield
    finally:
        after = {name: get() for name, (get, _) in _SHARED.items()}
        for name in _changed(before, after):
            _SHARED[name][1](before[name])
    for name in _changed(before, after):
        raise UsageError(
            f"{who} changes torch's {name} from {before[name]} to {after[name]}, which the other methods would run "
            "with. Leave it as it is."
        )


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]
