"""Keep the libraries' log lines and progress bars off the user's terminal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import huggingface_hub.utils
import transformers.utils.logging

_hub: Any = huggingface_hub.utils
_transformers: Any = transformers.utils.logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and huggingface_hub inside the block, and restore their settings after it."""
    with ExitStack() as undo:
        undo.callback(_transformers.set_verbosity, _transformers.get_verbosity())
        undo.callback(_hub.logging.set_verbosity, _hub.logging.get_verbosity())
        if _transformers.is_progress_bar_enabled():
            undo.callback(_transformers.enable_progress_bar)
        if not _hub.are_progress_bars_disabled():
            undo.callback(_hub.enable_progress_bars)
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        _transformers.set_verbosity(logging.CRITICAL)
        _hub.logging.set_verbosity(logging.CRITICAL)
        _transformers.disable_progress_bar()
        _hub.disable_progress_bars()
        yield
