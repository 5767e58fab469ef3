"""The stopwatch of all methods, which also sees the target's passes whatever a method says about them."""

from __future__ import annotations

import time
from typing import Any

import torch


class PassClock:
    """Counts passes by a hook on the model; open it as a context manager, which takes the hook off again.

    The prefill ends with the pass that brings the rows read so far to the prompt's length; passes count from that one
    on. Nothing is kept per pass, so that the clock costs all methods the same few microseconds.

    Args:
        model: a torch module, called with `input_ids` or `inputs_embeds`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hook: Any = None
        self.start(0)

    def __enter__(self) -> PassClock:
        self._hook = self._model.register_forward_hook(self._passed, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def start(self, prompt_tokens: int) -> None:
        """A request begins: time and counts start anew."""
        self._prompt_tokens = prompt_tokens
        self._all_rows = 0
        self.seen = 0
        """Passes, those over the prompt's beginning included."""
        self.passes = 0
        """From the one that reads the prompt's end."""
        self.prefill_seconds: float | None = None
        self._synchronize()
        self._started = time.perf_counter()

    def now(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self._started

    @property
    def rows(self) -> int:
        """Of all passes together, the prompt's not counted."""
        return max(0, self._all_rows - self._prompt_tokens)

    def record(self, rows: int) -> None:
        """A pass over `rows` rows has ended; methods that run a model of their own call this themselves."""
        self.seen += 1
        self._all_rows += rows
        if self.passes or self._all_rows >= self._prompt_tokens:
            self.passes += 1
        if self.passes == 1:
            self._synchronize()
            self.prefill_seconds = self.now()

    def _passed(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        given = args[0] if args else kwargs.get("input_ids")
        self.record(kwargs["inputs_embeds"].shape[:2].numel() if given is None else given.numel())

    def _synchronize(self) -> None:
        """Where a GPU works behind the host's back, wait for it."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
