"""The front door in Python: `load` a pair of models, then `Engine.stream` or `Engine.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch

from sequoia.draft.model_draft import ModelDraft, draft_numbers
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.errors import UsageError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.gguf_cache import cache_folder
from sequoia.model.loading import load_model, shared_token_count
from sequoia.model.placement import Numbers
from sequoia.model.probe import proved
from sequoia.params import SamplingParams
from sequoia.speculate.growth import require_fit
from sequoia.speculate.session import FinishReason, Proposer, Session, TokenLogprobs
from sequoia.speculate.stats import Stats
from sequoia.speculate.verify import Verifier, verifier_named
from sequoia.text import Detokenizer, StopStrings, encode_prompt
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape
from sequoia.tree.specs import TREE_FORMS, parse_tree

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as it is, token ids, or chat messages (`{"role": …, "content": …}`) for the tokenizer's template."""


class Draft(Protocol):
    """What proposes trees; `start` makes a proposer for one request."""

    def start(self) -> Proposer: ...


@dataclass(frozen=True)
class Chunk:
    """What one round added. The text may lag behind the tokens while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Generation:
    """A finished answer; prints as its text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def __str__(self) -> str:
        return self.text

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text)


class Engine:
    """A target, a draft, a tree and a verifier, ready to generate.

    Requests keep no state in the engine: streams may be abandoned, or read side by side.
    """

    def __init__(self, target: CausalLM, draft: Draft, tree: Tree, verifier: Verifier) -> None:
        require_fit(tree, verifier.draws)
        self.target = target
        self.draft = draft
        self.tree = tree
        self.verifier = verifier
        self.stats = Stats()
        """Of the latest request, live while it streams."""

    def __repr__(self) -> str:
        target, verifier = self.target.loaded.name, self.verifier.name
        return f"Engine(target={target}, draft={type(self.draft).__name__}, tree={self.tree!r}, verifier={verifier})"

    @property
    def tokenizer(self) -> Any:
        """The target's transformers tokenizer, or None for a bare model object."""
        return self.target.loaded.tokenizer

    @property
    def target_model(self) -> Any:
        """The target as a transformers model; loaded once more where the engine took its own apart."""
        return self.target.whole_model

    @property
    def _models(self) -> Sequence[CausalLM]:
        """Those that were loaded here."""
        drafting = getattr(self.draft, "model", None)
        return [self.target, drafting] if isinstance(drafting, CausalLM) else [self.target]

    def wait_until_compiled(self) -> None:
        """Wait for what `load` was asked to compile, if anything."""
        for model in self._models:
            model.wait_until_compiled()

    def with_tree(
        self,
        tree: str | Path | Tree,
        verifier: str = "auto",
        profile: AcceptanceProfile | str | Path | None = None,
    ) -> Engine:
        """The same models with another tree; arguments and errors as for `load`."""
        kind = "ngram" if isinstance(self.draft, NgramDraft) else self.draft
        resolved = _tree(tree, profile, kind)
        return Engine(self.target, self.draft, resolved, _verifier(verifier, resolved))

    def session(self, prompt: Sequence[int], params: SamplingParams, *, request: int = 0) -> Session:
        """One request as rounds of tokens, without text: see `Session.step`.

        Raises:
            UsageError: the prompt is empty or too long for the context, or its ids are out of range.
        """
        return Session(
            self.target,
            self.draft.start(),
            self.tree,
            self.verifier,
            prompt,
            params,
            self.target.loaded.eos_ids,
            request,
        )

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, request: int = 0) -> Iterator[Chunk]:
        """Generate round by round.

        Args:
            prompt: see `Prompt`.
            params: defaults to `SamplingParams()`.
            request: number of the request under the same seed; no two share noise.

        Raises:
            UsageError: the prompt is empty, too long for the context, or not understood.
            ModelError: a model's logits are no distribution.
        """
        return self._start(prompt, params, request)[0]

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, request: int = 0) -> Generation:
        """`stream`, collected."""
        chunks, stats = self._start(prompt, params, request)
        return collect(list(chunks), stats)

    def _start(self, prompt: Prompt, params: SamplingParams | None, request: int) -> tuple[Iterator[Chunk], Stats]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params are SamplingParams, not {params!r:.80}. SamplingParams.from_dict reads a dict.")
        if request < 0:
            raise UsageError(f"request must be an integer of at least 0, not {request}.")
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer. Load the target as a (model, tokenizer) pair.")
        token_ids = encode_prompt(self.tokenizer, prompt, self.target.vocab_size)
        session = self.session(token_ids, params, request=request)
        self.stats = stats = Stats()
        return _chunks(session, stats, _TextOut(self.tokenizer, params.stop)), stats


def collect(chunks: Sequence[Chunk], stats: Stats) -> Generation:
    """Join the chunks of a finished stream."""
    logprobs = None
    if chunks[-1].logprobs is not None:
        logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs or ())
    return Generation(
        "".join(chunk.text for chunk in chunks),
        tuple(token for chunk in chunks for token in chunk.token_ids),
        chunks[-1].finish_reason or "length",
        stats,
        logprobs,
    )


def load(
    target: Any = None,
    draft: Any = "ngram",
    tree: str | Path | Tree = "optimal:16x4",
    verifier: str = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    draft_dtype: str | torch.dtype = "auto",
    profile: AcceptanceProfile | str | Path | None = None,
    compile: bool = False,
    notice: Callable[[str], None] | None = None,
) -> Engine:
    """Load models and check that speculation with them is exact.

    Args:
        target: a path, a hub name, a transformers model object or a (model, tokenizer) pair; None is
            SmolLM2-135M-Instruct.
        draft: "ngram"; a smaller model of the same vocabulary, given like the target and moved to its device; or an
            object of your own with the method of `Draft`.
        tree: a `TreeShape`, a `DynamicTree`, a shape file, or a form of `TREE_FORMS`.
        verifier: "sequoia", "specinfer", "spectr" or "sampler_match"; "auto" is "sequoia", or "sampler_match" for a
            dynamic tree, whose children no other verifies.
        dtype: "auto", "bf16", "fp16", "fp32" or a torch dtype; or "int8", on CPUs: linear layers in 8-bit integers,
            each row of activations quantised as it comes. The target is then the quantised model, and the output is
            lossless with respect to that.
        device: "auto", "cpu", "cuda" or a torch device.
        draft_dtype: the same for a draft that is a model, which can change the speed only and never the output's
            distribution; "auto" is int8 where this CPU has exact kernels for it, else the target's. A draft given as
            an object is never quantised.
        profile: acceptance rates that `optimal:` trees are planned for; by default rates shipped for the kind of draft.
        compile: have the small operations of passes compiled on a CPU, which needs a C++ compiler. That takes a minute
            once for each size of model and a few seconds later, in the background: passes run as they are until then,
            and where it fails. `Engine.wait_until_compiled` waits.
        notice: called with a line of text before something slow, and where nothing can be compiled.

    Raises:
        UsageError: an argument is out of range.
        FileError: a file is missing or damaged.
        ModelError: a model cannot be loaded or cannot follow a tree exactly.
        VocabularyError: draft and target do not share their token ids.
    """
    resolved = _tree(tree, profile, draft)
    chosen = _verifier(verifier, resolved)
    loaded = load_model(target, dtype=dtype, device=device, notice=notice)
    model = proved(loaded)
    proposing = _draft(draft, model, draft_numbers(draft, draft_dtype, dtype, model.device), notice)
    engine = Engine(model, proposing, resolved, chosen)
    if compile:
        for own in engine._models:
            own.compile(cache_folder("kernels"), notice or (lambda text: None))
    return engine


def _verifier(name: str, tree: Tree) -> Verifier:
    if name == "auto":
        name = "sampler_match" if isinstance(tree, DynamicTree) else "sequoia"
    verifier = verifier_named(name)
    require_fit(tree, verifier.draws)
    return verifier


def _tree(tree: str | Path | Tree, profile: AcceptanceProfile | str | Path | None, draft: Any) -> Tree:
    if not isinstance(tree, (str, PathLike, TreeShape, DynamicTree)):
        raise UsageError(f"tree is a TreeShape, a shape file or one of {TREE_FORMS}, not {tree!r:.80}.")
    if profile is not None and not (isinstance(tree, str) and tree.startswith("optimal:")):
        raise UsageError(f'a profile plans optimal trees, and tree is {tree!r}. Use tree="optimal:SIZExDEPTH".')
    if not isinstance(profile, (str, PathLike, AcceptanceProfile, type(None))):
        raise UsageError(f"profile is an AcceptanceProfile or a profile file, not {profile!r:.80}.")
    if isinstance(tree, (TreeShape, DynamicTree)):
        return tree
    if isinstance(tree, PathLike):
        return TreeShape.load(tree)
    planned_for = profile if isinstance(profile, AcceptanceProfile) else AcceptanceProfile.for_draft(draft, profile)
    return parse_tree(tree, planned_for)


def _draft(
    draft: Any,
    target: CausalLM,
    dtype: str | torch.dtype | Numbers,
    notice: Callable[[str], None] | None,
) -> Draft:
    if isinstance(draft, str) and draft == "ngram":
        return NgramDraft(target.loaded.token_count)
    if hasattr(draft, "start"):
        own: Draft = draft
        return own
    loaded = load_model(draft, dtype=dtype, device=target.device, notice=notice)
    return ModelDraft(proved(loaded), shared_token_count(target.loaded, loaded))


def _chunks(session: Session, stats: Stats, text: _TextOut) -> Iterator[Chunk]:
    while session.finish_reason is None and not text.stopped:
        started = time.perf_counter()
        round_ = session.step()
        stats.add(round_)
        stats.seconds += time.perf_counter() - started
        if stats.rounds == 1:
            stats.first_round_seconds = stats.seconds
        piece, count = text.add(round_.token_ids, last=session.finish_reason is not None)
        stats.cut(len(round_.token_ids) - count)
        logprobs = None if round_.logprobs is None else round_.logprobs[:count]
        finish: FinishReason | None = "stop" if text.stopped else session.finish_reason
        yield Chunk(piece, round_.token_ids[:count], finish, logprobs)


class _TextOut:
    """Token ids → text that is certain, up to a stop string."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop = StopStrings(stop)
        self.stopped = False

    def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int]:
        """The text now certain, and how many of `tokens` it took to reach a stop string (all without one)."""
        if self._detokenizer is None:
            return "", len(tokens)
        pieces: list[str] = []
        for count, token in enumerate(tokens, start=1):
            if self._feed(self._detokenizer.add([token]), pieces):
                return "".join(pieces), count
        if last and not self._feed(self._detokenizer.flush(), pieces):
            pieces.append(self._stop.flush())
        return "".join(pieces), len(tokens)

    def _feed(self, piece: str, pieces: list[str]) -> bool:
        released = self._stop.add(piece)
        pieces.append(released.text)
        self.stopped = released.stop is not None
        return self.stopped
