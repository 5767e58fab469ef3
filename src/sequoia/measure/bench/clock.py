"""The stopwatch of all methods, which also sees the target's passes whatever a method says about them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from sequoia.model.causal_lm import CausalLM


class PassClock:
    """Counts passes over the target's weights, its own and those of the transformers model that it came from.

    Open it as a context manager, which takes its hooks off again. The prefill ends with the pass that brings the rows
    read so far to the prompt's length; passes count from that one on. Nothing is kept per pass, so that the clock costs
    all methods the same few microseconds.
    """

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self._hooks = ExitStack()
        self._watched: list[Any] = []
        self.start(0)

    def __enter__(self) -> PassClock:
        if self._target.is_lean:
            self._target.on_pass.append(self.record)
            self._hooks.callback(self._target.on_pass.remove, self.record)
        if isinstance(self._target.loaded.model, torch.nn.Module):  # and no outline of one
            self.watch(self._target.loaded.model)
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.clear()
        self._hooks.close()

    def watch(self, model: Any) -> None:
        """Count the passes of this copy of the target too, a torch module called with `input_ids`."""
        if all(model is not watched for watched in self._watched):
            self._watched.append(model)
            self._hooks.callback(model.register_forward_hook(self._passed, with_kwargs=True).remove)

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
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
