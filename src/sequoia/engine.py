"""The front door in Python: `load` a pair of models, then `Engine.stream` or `Engine.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sequoia.draft.copying import CopyingDraft, without_copies
from sequoia.draft.head_files import head_folder
from sequoia.draft.heads import load_any_head
from sequoia.draft.model_draft import ModelDraft, bits_of_own_weights, draft_numbers
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.draft.shipped import shipped_head
from sequoia.errors import UsageError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.gguf_cache import cache_folder
from sequoia.model.loaded import shared_token_count
from sequoia.model.offload.budget import MemoryPlan
from sequoia.model.offload.fill import Beside, fill, used_memory
from sequoia.model.offload.request import OffloadRequest
from sequoia.model.placement import Numbers
from sequoia.model.probe import check_settled
from sequoia.model.ready import ready_model
from sequoia.params import SamplingParams
from sequoia.planning.finding import GivenPlan, PlanChoice
from sequoia.planning.named import AUTO, named_tree, verifier_for
from sequoia.planning.pair import draft_name, models_of, pair_of
from sequoia.planning.planned import Planned
from sequoia.planning.rounds import Clock, timed_rounds
from sequoia.speculate.growth import require_fit
from sequoia.speculate.session import Draft, FinishReason, Round, Session, TokenLogprobs
from sequoia.speculate.stats import Stats
from sequoia.speculate.verify import Verifier
from sequoia.text import TextStream, encode_prompt
from sequoia.tree.dynamic import Tree
from sequoia.tree.profile import AcceptanceProfile

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as it is, token ids, or chat messages (`{"role": …, "content": …}`) for the tokenizer's template."""


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

    Requests keep no state in the engine, but for what adapting plans learn: streams may be abandoned, or read side by
    side.

    Args:
        planned: what chooses each request's tree, in place of `tree`.
        clock: what rounds are timed with.
    """

    def __init__(
        self,
        target: CausalLM,
        draft: Draft,
        tree: Tree,
        verifier: Verifier,
        planned: Planned | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        require_fit(tree, verifier.draws)
        self.target = target
        self.draft = draft
        self.tree = tree
        self.verifier = verifier
        self.planned = planned
        self.clock = clock
        self.stats = Stats()
        """Of the latest request, live while it streams."""

    def __repr__(self) -> str:
        target, verifier = self.target.loaded.name, self.verifier.name
        tree = f"tree={self.tree!r}" if self.planned is None else f"plan={self.planned.name}"
        return f"Engine(target={target}, draft={draft_name(self.draft)}, {tree}, verifier={verifier})"

    @property
    def tokenizer(self) -> Any:
        """The target's transformers tokenizer, or None for a bare model object."""
        return self.target.loaded.tokenizer

    @property
    def target_model(self) -> Any:
        """The target as a transformers model; loaded once more where the engine took its own apart."""
        return self.target.whole_model

    @property
    def pair(self) -> dict[str, Any]:
        """What runs and how, as plan files name it."""
        return pair_of(self.target, self.draft)

    @property
    def memory(self) -> MemoryPlan | None:
        """How fast memory is divided; None where the weights are not streamed."""
        return self.target.memory

    def wait_until_compiled(self) -> None:
        """Wait for what `load` was asked to compile, if anything."""
        for model in models_of(self.target, self.draft):
            model.wait_until_compiled()

    def tree_for(self, params: SamplingParams) -> Tree:
        """The tree that a request with these parameters starts with."""
        return self.tree if self.planned is None else self.planned.plan(params).chosen.shape

    def with_tree(
        self,
        tree: str | Path | Tree,
        verifier: str = AUTO,
        profile: AcceptanceProfile | str | Path | None = None,
        plan: GivenPlan = None,
    ) -> Engine:
        """The same models with another tree; arguments and errors as for `load`. "auto" keeps a plan there is."""
        choice = PlanChoice.of(plan, tree, profile)
        planned = choice.planned(self.target, self.draft) if choice.file else self.planned if choice.search else None
        resolved = named_tree(tree, profile, "ngram" if isinstance(self.draft, NgramDraft) else self.draft)
        return Engine(self.target, self.draft, resolved, verifier_for(verifier, resolved), planned, self.clock)

    def session(self, prompt: Sequence[int], params: SamplingParams, *, request: int = 0) -> Session:
        """One request as a session, which times nothing and has no guard: see `Session.step`.

        Raises:
            UsageError: the prompt is empty or too long for the context, or its ids are out of range.
        """
        return Session(
            self.target,
            self.draft.start(),
            self.tree_for(params),
            self.verifier,
            prompt,
            params,
            self.target.loaded.eos_ids,
            request,
        )

    def rounds(self, prompt: Sequence[int], params: SamplingParams, *, request: int = 0) -> Iterator[Round]:
        """One request as rounds of tokens, without text: counted in `stats`, and guarded where there is a plan.

        Raises:
            UsageError: as for `session`.
        """
        return self._rounds(self.session(prompt, params, request=request), params)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request: int = 0, plain_first: int = 0
    ) -> Iterator[Chunk]:
        """Generate round by round.

        Args:
            prompt: see `Prompt`.
            params: defaults to `SamplingParams()`.
            request: number of the request under the same seed; no two share noise.
            plain_first: so many tokens after the first are decoded plainly, and `Stats.gain` tells what the others
                gained on them.

        Raises:
            UsageError: the prompt is empty, too long for the context, or not understood; a number is below 0.
            ModelError: a model's logits are no distribution.
        """
        return self._start(prompt, params, request, plain_first)[0]

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, request: int = 0) -> Generation:
        """`stream`, collected."""
        chunks, stats = self._start(prompt, params, request)
        return collect(list(chunks), stats)

    def _start(
        self, prompt: Prompt, params: SamplingParams | None, request: int, plain_first: int = 0
    ) -> tuple[Iterator[Chunk], Stats]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params are SamplingParams, not {params!r:.80}. SamplingParams.from_dict reads a dict.")
        if request < 0:
            raise UsageError(f"request must be an integer of at least 0, not {request}.")
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer. Load the target as a (model, tokenizer) pair.")
        token_ids = encode_prompt(self.tokenizer, prompt, self.target.vocab_size)
        session = self.session(token_ids, params, request=request)
        if plain_first < 0:
            raise UsageError(f"plain_first must be an integer of at least 0, not {plain_first}.")
        rounds, stats = self._rounds(session, params, plain_first)
        return _chunks(rounds, stats, TextStream(self.tokenizer, params.stop)), stats

    def _rounds(self, session: Session, params: SamplingParams, plain_first: int = 0) -> tuple[Iterator[Round], Stats]:
        self.stats = stats = Stats()
        if self.planned is None:
            return timed_rounds(session, stats, self.clock, plain_first=plain_first), stats
        return self.planned.rounds(session, params, stats, self.clock, plain_first), stats


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
    draft: Any = AUTO,
    tree: str | Path | Tree = AUTO,
    verifier: str = AUTO,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    draft_dtype: str | torch.dtype = "auto",
    profile: AcceptanceProfile | str | Path | None = None,
    plan: GivenPlan = None,
    guard: bool = True,
    adapt: bool = False,
    compile: bool = False,
    offload: str = "auto",
    memory_budget: str | int | None = None,
    context: int | None = None,
    notice: Callable[[str], None] | None = None,
) -> Engine:
    """Load models and check that speculation with them is exact.

    Args:
        target: a path, a hub name, a transformers model object or a (model, tokenizer) pair; None is
            SmolLM2-135M-Instruct.
        draft: "auto": the head that comes with the package for this target, with "+ngram", or "ngram" where there is
            none; "ngram", which copies what followed the same tokens earlier; a smaller model of the same vocabulary,
            given like the target and moved to its device; the folder of a head that was trained for the target;
            "self:int4" or "self:int8", the target's own weights in integers, which needs a target of a family with a
            lean decoder; or an object of your own with the method of `Draft`. A name or folder may end in "+ngram", for
            a draft that copies, too.
        tree: a `TreeShape`, a `DynamicTree`, a shape file, or a form of `TREE_FORMS`. "auto" goes by `plan`, or by the
            one that `sequoia tune` has kept for this pair; without any it is "optimal:16x4".
        verifier: "sequoia", "specinfer", "spectr" or "sampler_match"; "auto" is "sequoia", or "sampler_match" for a
            dynamic tree, whose children no other verifies.
        dtype: "auto", "bf16", "fp16", "fp32" or a torch dtype; "int8", on CPUs: linear layers in 8-bit integers,
            each row of activations quantised as it comes; or "int4": linear layers but the head in 4-bit integers, by
            groups of 64 weights, fast for few rows. The target is then the quantised model, and the output is
            lossless with respect to that.
        device: "auto", "cpu", "cuda" or a torch device.
        draft_dtype: the same for a draft that is a model or a head, which can change the speed only and never the
            output's distribution; "auto" is int8 where this CPU has exact kernels for it, else the target's. A draft
            given as an object is never quantised.
        profile: acceptance rates that `optimal:` trees are planned for; by default rates shipped for the kind of draft.
        plan: a plan for this pair, or its file.
        guard: with a plan, fall back to chain and plain decoding while they are measured to be faster.
        adapt: with a plan, plan anew between requests for the acceptance of those that finished.
        compile: have the small operations of passes compiled on a CPU, which needs a C++ compiler. That takes a minute
            once for each size of model and a few seconds later, in the background: passes run as they are until then,
            and where it fails. `Engine.wait_until_compiled` waits.
        offload: where the target's weights lie that do not fit: "disk", from where a CPU streams them in each pass;
            "host", which streams them to a GPU; or "off". "auto" is off where they fit the budget or the free memory.
        memory_budget: all the fast memory there is, such as "2GiB" or a number of bytes: on a CPU the process's own,
            libraries included. `Engine.memory` says how it is divided. None for what is free.
        context: most tokens of a prompt and its answer, which caches are planned for when weights are streamed; by
            default the model's own, and no more than 4096 when they are.
        notice: called with a line of text before something slow, and where nothing can be compiled.

    Raises:
        UsageError: an argument is out of range.
        FileError: a file is missing or damaged, or the plan is for another pair.
        ModelError: a model cannot be loaded or cannot follow a tree exactly.
        VocabularyError: draft and target do not share their token ids.
    """
    draft, copies = without_copies(draft)
    choice = PlanChoice.of(plan, tree, profile, guard, adapt)
    verifier_for(verifier, named_tree(tree, profile, draft))  # what cannot be is refused before anything is loaded
    request = OffloadRequest.of(offload, memory_budget, context)
    bits, twin, alone = bits_of_own_weights(draft, draft_dtype), list[CausalLM](), 0

    def on_whole(model: CausalLM) -> None:
        nonlocal alone
        alone = used_memory(model.device) if model.loaded.hollow else 0
        if bits is not None:
            twin.append(model.rounded(bits))

    model = ready_model(target, dtype=dtype, device=device, notice=notice, offload=request, on_whole=on_whole)
    if isinstance(draft, str) and draft == AUTO:
        shipped = shipped_head(model)
        draft, copies = shipped or "ngram", shipped is not None
    resolved = named_tree(tree, profile, draft)
    chosen = verifier_for(verifier, resolved)
    if twin:
        proposer: Draft = ModelDraft(twin[0], model.loaded.token_count)
    else:
        proposer = _draft(draft, model, draft_numbers(draft, draft_dtype, dtype, model.device), notice)
    if copies:
        proposer = CopyingDraft(proposer)
    if model.loaded.hollow is not None:
        beside = getattr(proposer, "model", None)
        drafts = [beside] if isinstance(beside, Beside) else []
        fill(model, drafts, request, alone, max(resolved.size, choice.most_nodes))
    for each in twin:  # it shares what the target has only now
        check_settled(each)
    if compile:
        for own in models_of(model, proposer):
            own.compile(cache_folder("kernels"), notice or (lambda text: None))
    return Engine(model, proposer, resolved, chosen, choice.planned(model, proposer, notice))


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
    head = head_folder(draft)
    if head is not None:
        return load_any_head(head, target, Numbers(target.loaded.dtype) if dtype == "auto" else dtype)
    hollow = target.loaded.hollow is not None
    model = ready_model(draft, dtype=dtype, device=target.device, notice=notice, mapped=not hollow)
    return ModelDraft(model, shared_token_count(target.loaded, model.loaded))


def _chunks(rounds: Iterator[Round], stats: Stats, text: TextStream) -> Iterator[Chunk]:
    for round_ in rounds:
        piece, count = text.add(round_.token_ids, last=round_.finish_reason is not None)
        stats.cut(len(round_.token_ids) - count)
        logprobs = None if round_.logprobs is None else round_.logprobs[:count]
        finish: FinishReason | None = "stop" if text.stopped else round_.finish_reason
        yield Chunk(piece, round_.token_ids[:count], finish, logprobs)
        if finish is not None:
            return
