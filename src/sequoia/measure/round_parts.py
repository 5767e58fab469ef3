"""A real round, timed in its parts: the target's pass, the draft's levels, and all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sequoia.engine import Engine
from sequoia.errors import UsageError
from sequoia.model.language_model import Block, Cache, LanguageModel
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Frontier, Growth, LevelLogits
from sequoia.speculate.session import FeatureReader, Proposer, Session
from sequoia.speculate.token_tree import TokenTree
from sequoia.tree.shape import TreeShape

Clock = Callable[[], float]
"""Seconds from some moment on."""


def clock_of(device: torch.device) -> Clock:
    """A clock that waits for what the device is still at."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized


@dataclass(frozen=True)
class Parts:
    """Seconds of one round."""

    target: float  # the target's pass over the tree
    levels: tuple[tuple[int, float], ...]  # (width, seconds) of each draft level, the root's first
    total: float


class TimedRequest:
    """One request at a place in a text, whose rounds run in any shape, as they would in a session of their own.

    The parts are seen from inside the round, so they are what they are between drafts and verifications, with caches as
    these leave them. A level lasts from its call for logits to the next level's, so drawing its children is part of it.
    The text grows as it does in a session; where that gets too far from its place the request begins anew.

    Args:
        text: token ids up to the place.
        reach: tokens from there that rounds are measured on.

    Raises:
        UsageError: the text leaves no room in the context.
    """

    def __init__(self, engine: Engine, params: SamplingParams, text: Sequence[int], reach: int, clock: Clock) -> None:
        self._engine, self._text, self._reach, self._clock = engine, list(text), reach, clock
        self._params = replace(params, max_tokens=_ENDLESS, ignore_eos=True, logprobs=None)
        self._target = _TimedTarget(engine.target, clock)
        self._cache: Cache | None = None
        self._begun = 0
        self._begin()

    def measure(self, shape: TreeShape) -> Parts:
        """One round with the tree `shape`.

        Raises:
            UsageError: so large a tree does not fit the context.
        """
        if len(self._session.tokens) + shape.depth + 1 > len(self._text) + self._reach:
            self._begin()
        self._session.tree = shape
        started = self._clock()
        round_ = self._session.step()
        total = self._clock() - started
        if round_.tree.shape.size != shape.size:
            raise UsageError(f"a tree of depth {shape.depth} does not fit the context after {len(self._text)} tokens.")
        return Parts(self._target.seconds, tuple(self._proposer.levels if shape.size > 1 else ()), total)

    def _begin(self) -> None:
        """A new session, which takes over what the target has read of the text, and its first round, which is slow."""
        self._proposer = _TimedProposer(self._engine.draft.start(), self._clock)
        self._session = Session(
            self._target,
            self._proposer,
            TreeShape.chain(1),
            self._engine.verifier,
            self._text,
            self._params,
            request=self._begun,
        )
        if self._cache is not None:
            self._cache.truncate(len(self._text) - 1)
            self._session.cache = self._cache
        self._cache, self._begun = self._session.cache, self._begun + 1
        self._session.step()


_ENDLESS = 1_000_000  # tokens; the context ends before


class _TimedTarget:
    """A `LanguageModel` that knows how long its latest pass took."""

    def __init__(self, model: LanguageModel, clock: Clock) -> None:
        self.vocab_size, self.context_length, self.device = model.vocab_size, model.context_length, model.device
        self.new_cache = model.new_cache
        self.seconds = 0.0
        self._model, self._clock = model, clock

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        started = self._clock()
        logits = self._model.forward(tokens, cache, block, last)
        self.seconds = self._clock() - started
        return logits


class _TimedProposer:
    """A `Proposer` that knows how long the levels of its latest tree took."""

    def __init__(self, proposer: Proposer, clock: Clock) -> None:
        self.proposable, self.context_length = proposer.proposable, proposer.context_length
        self.keep = proposer.keep
        if isinstance(proposer, FeatureReader):
            self.taps, self.follow = proposer.taps, proposer.follow
        self.levels: list[tuple[int, float]] = []
        self._proposer, self._clock = proposer, clock

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        self.levels = []
        given = {field.name: getattr(growth, field.name) for field in fields(Growth)}
        return self._proposer.propose(tokens, _TimedGrowth(**given, clock=self._clock, levels=self.levels))


@dataclass(frozen=True)
class _TimedGrowth(Growth):
    clock: Clock
    levels: list[tuple[int, float]]

    def run(self, root: int, support: Tensor, level_logits: LevelLogits) -> TokenTree:
        widths: list[int] = []
        starts: list[float] = []

        def timed(frontier: Frontier) -> Tensor:
            widths.append(len(frontier.tokens))
            starts.append(self.clock())
            return level_logits(frontier)

        tree = super().run(root, support, timed)
        ends = [*starts[1:], self.clock()]
        self.levels.extend((width, end - start) for width, start, end in zip(widths, starts, ends, strict=True))
        return tree
