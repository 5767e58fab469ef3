"""A pair of toy models whose passes move a clock by what they are said to cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sequoia.draft.model_draft import ModelDraft, ModelProposer
from sequoia.measure.toy import ToyModel
from sequoia.speculate.verify import verifier_named

Cost = Callable[[int], float]
"""Rows of a pass → seconds."""


class ScriptedClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.speed = 1.0  # seconds that a second of work takes

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += self.speed * seconds


class CostlyModel:
    """A toy model whose passes take time; it remembers their rows."""

    def __init__(self, model: ToyModel, clock: ScriptedClock, cost: Cost) -> None:
        self._model, self._clock, self._cost = model, clock, cost
        self.vocab_size, self.context_length, self.device = model.vocab_size, model.context_length, model.device
        self.new_cache = model.new_cache
        self.passes: list[int] = []

    def forward(self, tokens: Any, cache: Any, block: Any = None, last: int | None = None) -> Any:
        self._clock.work(self._cost(len(tokens)))
        self.passes.append(len(tokens))
        return self._model.forward(tokens, cache, block, last)


class CostlyDraft(ModelDraft):
    """Keeping a path takes time too, which stands for all that is neither a pass nor a level."""

    def __init__(self, model: Any, proposable: int, clock: ScriptedClock, overhead: float) -> None:
        super().__init__(model, proposable)
        self.clock, self.overhead = clock, overhead

    def start(self) -> ModelProposer:
        return _CostlyProposer(self)


class _CostlyProposer(ModelProposer):
    def __init__(self, draft: CostlyDraft) -> None:
        super().__init__(draft)
        self._draft = draft

    def keep(self, path: Sequence[int]) -> None:
        self._draft.clock.work(self._draft.overhead)
        super().keep(path)


def scripted_engine(
    clock: ScriptedClock,
    target: Cost,
    draft: Cost,
    overhead: float = 0.0,
    vocab: int = 12,
    context: int | None = None,
) -> Any:
    """What timing asks of an engine."""
    law = ToyModel.random(vocab, seed=1)
    law.context_length = context
    toys = CostlyModel(law, clock, target), CostlyModel(law.blended(ToyModel.random(vocab, 2), 0.3), clock, draft)
    return SimpleNamespace(
        target=toys[0], draft=CostlyDraft(toys[1], vocab, clock, overhead), verifier=verifier_named("sequoia")
    )
