"""The joint law of several tokens: sampled through the real loop, held against the law of the target's own logits.

A fault between rounds (noise used twice, a stale cache, a penalty counted once) leaves every single token right and the
tokens together wrong, so the law compared is that of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch

from sequoia.draft.copying import CopyingDraft
from sequoia.draft.model_draft import ModelDraft
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.engine import Engine, load
from sequoia.measure.distance import Ints
from sequoia.measure.random_head import save_random_head
from sequoia.measure.reference import Floats, joint_law
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.measure.toy import ToyModel
from sequoia.model.causal_lm import CausalLM
from sequoia.params import SamplingParams
from sequoia.speculate.sampling import Draws
from sequoia.speculate.session import Session
from sequoia.speculate.verify import VERIFIERS, Verifier
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.shape import TreeShape

VOCAB = 4
LENGTH = 3
PROMPT = (0, 2, 1, 0, 2)
TEMPERATURES = (0.0, 0.6, 1.0, 1.5)
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 2.0, "presence_penalty": 0.8, "frequency_penalty": 1.2},
    "bias": {"logit_bias": {0: 1.0, 3: float("-inf")}},
    "all": {
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.8,
        "logit_bias": {0: 0.7, 3: -0.5},
    },
}
# Most are of depth 1, so that three tokens take at least two rounds.
SHAPES: dict[str, Tree] = {
    "star 2": TreeShape((-1, 0, 0)),
    "tree 6": TreeShape((-1, 0, 0, 1, 1, 2)),
    "star 3": TreeShape((-1, 0, 0, 0)),
    "chain 1": TreeShape.chain(1),
    "chain 2": TreeShape.chain(2),
}
# For verifiers that take chosen children; sizes larger than what the draft's support fills among them.
DYNAMIC_TREES: dict[str, Tree] = {
    "dynamic 3x1": DynamicTree(3, 1),
    "dynamic 7x2": DynamicTree(7, 2),
    "dynamic 6x3x1": DynamicTree(6, 3, width=1),
    "dynamic 2x2": DynamicTree(2, 2),
    "dynamic 12x1": DynamicTree(12, 1),
}
DRAFTS = ("model", "padded model", "n-gram", "copying model")


class Sampled(Protocol):
    """A law, and a way to sample it."""

    @property
    def name(self) -> str: ...

    @property
    def greedy(self) -> bool:
        """Whether the law has one outcome."""

    @property
    def effort(self) -> float:
        """How many samples to take of it, to one of an ordinary law."""

    def law(self) -> Floats:
        """[vocab] * length, from the target's logits alone."""

    def sample(self, request: int) -> Sequence[int]:
        """The tokens of one request; no two share noise."""


class _Setting:
    """What the processors and the noise of a case follow from."""

    processors: str
    temperature: float
    seed: int

    @property
    def greedy(self) -> bool:
        """See `Sampled.greedy`."""
        return self.temperature == 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=LENGTH,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
            **PROCESSORS[self.processors],
        )


@dataclass(frozen=True)
class Case(_Setting):
    """One setting of everything: what the loop is run with."""

    verifier: Verifier
    processors: str
    temperature: float
    seed: int
    tree: str
    draft: str
    target: ToyModel
    draft_model: ToyModel
    run: Run
    effort: float = 1.0

    @property
    def name(self) -> str:
        temperature = f"temperature {self.temperature:g}"
        return f"{self.verifier.name}, {temperature}, {self.processors}, {self.tree}, {self.draft} draft"

    def law(self) -> Floats:
        """See `Sampled.law`."""
        return joint_law(lambda tokens: self.target.logits_after(tokens).numpy(), self.params, PROMPT, LENGTH)

    def sample(self, request: int) -> Sequence[int]:
        """See `Sampled.sample`."""
        return self.run(self, request)

    def proposer(self) -> Any:
        """The draft at work on a new request."""
        if self.draft == "n-gram":
            return NgramDraft(proposable=VOCAB).start()
        draft = ModelDraft(self.draft_model, proposable=VOCAB - (self.draft == "padded model"))
        return (CopyingDraft(draft) if self.draft == "copying model" else draft).start()


Run = Callable[[Case, int], Sequence[int]]
"""(case, request) → the tokens of one request."""


def run_session(case: Case, request: int) -> Sequence[int]:
    """One request through the loop as it is."""
    session = Session(
        case.target,
        case.proposer(),
        (SHAPES | DYNAMIC_TREES)[case.tree],
        case.verifier,
        PROMPT,
        case.params,
        frozenset(),
        request=request,
    )
    while session.finish_reason is None:
        session.step()
    return session.tokens[len(PROMPT) :]


def count_outcomes(samples: Sequence[Sequence[int]]) -> Ints:
    """How often each sequence of tokens came, [vocab] * length."""
    counts: Ints = np.zeros((VOCAB,) * LENGTH, dtype=np.int64)
    for tokens in samples:
        counts[tuple(tokens)] += 1
    return counts


def cases(verifier: Verifier, seed: int, run: Run = run_session, trees: Mapping[str, Tree] = SHAPES) -> Iterator[Case]:
    """Every temperature with every processor, where trees and drafts take turns beside them; and one law to sample
    at length, whose draft is so wrong that most rounds end in a residual."""
    for index, (temperature, processors) in enumerate(product(TEMPERATURES, PROCESSORS)):
        tree, draft = list(trees)[index % len(trees)], DRAFTS[index % len(DRAFTS)]
        target = _toy(2 * index)
        draft_model = _overconfident(2 * index + 1) if index % 2 else target.blended(_toy(2 * index + 1), share=0.3)
        yield Case(verifier, processors, temperature, seed, tree, draft, target, draft_model, run)
    flat = ToyModel.random(VOCAB, seed=1, spread=0.3)
    yield Case(verifier, "none", 1.0, seed, _shallowest(trees), "wrong model", flat, _overconfident(2), run, effort=4)


def _shallowest(trees: Mapping[str, Tree]) -> str:
    return min(trees, key=lambda name: (trees[name].depth, trees[name].size))


def _toy(seed: int) -> ToyModel:
    """A model that tends to repeat itself, so that penalties matter."""
    model = ToyModel.random(VOCAB, seed)
    return ToyModel(model.table + torch.eye(VOCAB))


def _overconfident(seed: int) -> ToyModel:
    """A draft that is sure of tokens of its own: rejected often, it leaves much to the next token."""
    return ToyModel(3 * ToyModel.random(VOCAB, seed).table)


@dataclass(frozen=True)
class EngineCase(_Setting):
    """The whole engine with transformers models, on the device that a user's models would run on."""

    verifier: str
    processors: str
    temperature: float
    seed: int
    tree: str
    draft: str
    device: str
    effort = 1 / 3  # for each request takes longer

    @property
    def name(self) -> str:
        return (
            f"{self.verifier}, temperature {self.params.temperature:g}, {self.processors}, engine, {self.tree}, "
            f"{self.draft} draft"
        )

    @property
    def engine(self) -> Engine:
        return _engine(self.tree, self.verifier, self.draft, self.device)

    def law(self) -> Floats:
        """See `Sampled.law`."""
        return joint_law(self._logits_after, self.params, PROMPT, LENGTH)

    def sample(self, request: int) -> Sequence[int]:
        """See `Sampled.sample`."""
        return self.engine.generate(PROMPT, self.params, request=request).token_ids

    @torch.inference_mode()
    def _logits_after(self, tokens: Sequence[int]) -> Floats:
        model = self.engine.target_model
        logits = model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0, -1]
        values: Floats = logits.double().cpu().numpy()
        return values


@lru_cache(maxsize=16)
def _engine(tree: str, verifier: str, draft: str, device: str) -> Engine:
    target, shape = tiny_llama(VOCAB, seed=3, device=device), (SHAPES | DYNAMIC_TREES)[tree]
    if draft.endswith("head"):
        with TemporaryDirectory(prefix="sequoia-", ignore_cleanup_errors=True) as folder:
            save_random_head(Path(folder), CausalLM(target), draft_vocab_size=VOCAB - 1)
            name = f"{folder}+ngram" if draft == "copying head" else folder
            return load(target.model, name, shape, verifier, draft_dtype="fp32")
    small = "ngram" if draft == "n-gram" else tiny_llama(VOCAB, 3, blur=0.3, device=device).model
    return load(target.model, small, shape, verifier)


def engine_cases(verifier: str, seed: int, device: str) -> Iterator[EngineCase]:
    """Plain settings with trees of a model and a head, and all processors with n-grams; dynamic trees where they are
    exact."""
    settings = [
        ("none", 1.0, "tree 6", "model"),
        ("all", 1.5, "star 2", "n-gram"),
        ("none", 0.6, "tree 6", "head"),
        ("none", 1.0, "tree 6", "copying head"),
    ]
    if VERIFIERS[verifier].draws is Draws.TOP_K:
        settings.append(("none", 1.0, "dynamic 7x2", "model"))
    for processors, temperature, tree, draft in settings:
        yield EngineCase(verifier, processors, temperature, seed, tree, draft, device)
