"""The algorithm: draft → verify → keep. No text, no clocks, no printing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.model.language_model import Cache, LanguageModel, TappedCache, TappedModel, read_ahead
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Growth, require_fit
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Noise, Purpose
from sequoia.speculate.token_tree import TokenTree, layout_of
from sequoia.speculate.verify import GREEDY, Verdict, Verifier, verify
from sequoia.tree.dynamic import Tree
from sequoia.tree.shape import TreeShape

FinishReason = Literal["stop", "length"]


class Proposer(Protocol):
    """A draft at work on one request."""

    @property
    def proposable(self) -> int:
        """Token ids from here on are never proposed."""

    @property
    def context_length(self) -> int | None: ...

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """Catch up on `tokens` and grow a tree from the last of them."""

    def keep(self, path: Sequence[int]) -> None:
        """The nodes of the last tree that became part of the text; everything else of it is forgotten."""


class Draft(Protocol):
    """What proposes trees; `start` makes a proposer for one request."""

    def start(self) -> Proposer: ...


@runtime_checkable
class FeatureReader(Protocol):
    """What a proposer has besides, where it goes by features of the target."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Which features; see `sequoia.model.features`."""

    def follow(self, cache: TappedCache) -> None:
        """Where they are from now on: the target's cache, which has them of every slot it holds. It may hold fewer than
        all tokens but the last, as before the first round, and then the proposer may propose nothing."""


def new_target_cache(target: LanguageModel, proposer: Proposer) -> Cache:
    """An empty cache of the target's, with what this proposer goes by."""
    if isinstance(proposer, FeatureReader):
        return cast(TappedModel, target).new_cache(proposer.taps)
    return target.new_cache()


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the target's own probabilities, before any processor."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable tokens with theirs, as many as asked for


@dataclass(frozen=True)
class Round:
    """What one round emitted, and the tree it came from."""

    token_ids: tuple[int, ...]
    tree: TokenTree
    verdict: Verdict
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None


class TargetRows:
    """The target's logits over a token tree, turned into distributions only at the nodes asked for."""

    def __init__(self, logits: Tensor, tree: TokenTree, processors: Processors) -> None:
        self._logits = logits  # [size, vocab]
        self._tree = tree
        self._processors = processors

    def __call__(self, nodes: Sequence[int]) -> Tensor:
        paths = self._tree.layout.paths(nodes, self._tree.tokens) if self._processors.read_paths else []
        return self._processors.probs(self._processors.scores(self._logits[list(nodes)], paths))

    def logprobs(self, node: int, token: int, count: int) -> TokenLogprobs:
        """Of `token` after `node`, with the `count` most probable alternatives."""
        logs = self._logits[node].double().log_softmax(-1)
        top = logs.topk(min(count, len(logs)))
        return TokenLogprobs(
            token, logs[token].item(), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        )


class Session:
    """One request: its tokens, caches and noise.

    Invariant between rounds: the target's cache holds `tokens[:-1]`; the last token is the root of the next tree.

    Raises:
        UsageError: the prompt is empty, holds an id outside the vocabulary, or leaves no room in the context; or the
            tree has more siblings than the draft has tokens to propose, or is dynamic and the verifier needs draws.
    """

    def __init__(
        self,
        target: LanguageModel,
        proposer: Proposer,
        tree: Tree,
        verifier: Verifier,
        prompt: Sequence[int],
        params: SamplingParams,
        eos_ids: frozenset[int] = frozenset(),
        request: int = 0,
    ) -> None:
        _check_prompt(prompt, target)
        self.tokens = list(prompt)
        self.cache = new_target_cache(target, proposer)
        self.finish_reason: FinishReason | None = None
        self._target, self._proposer = target, proposer
        self._reader = proposer if isinstance(proposer, FeatureReader) else None
        self._verifier = GREEDY if params.temperature == 0 else verifier
        self.tree = tree
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._processors = Processors(params, prompt, target.vocab_size, target.device)
        self._noise = Noise(params.seed, request, target.device)
        self._rounds = 0
        room = params.max_tokens if target.context_length is None else target.context_length - len(prompt)
        self._most_tokens = len(prompt) + min(params.max_tokens, room)

    @property
    def tree(self) -> Tree:
        """What the next round's token tree is grown by. Another may be set between rounds: as long as the choice rests
        on past rounds alone, the output's distribution stays the target's.

        Raises:
            UsageError: the draft or the verifier cannot serve it.
        """
        return self._tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        _check_tree(tree, self._proposer)
        require_fit(tree, self._verifier.draws)
        self._tree = tree

    @torch.inference_mode()
    def step(self) -> Round:
        """One round: draft, verify, keep. Emits at least one token; not to be called once `finish_reason` is set."""
        root = len(self.tokens) - 1
        tree = self._propose(self._limited_tree(root))
        logits = self._logits(root, tree)
        target_probs = TargetRows(logits, tree, self._processors)
        verdict = verify(tree, target_probs, self._verifier, self._noise.generator(self._rounds, Purpose.VERIFY))
        emitted = self._cut([*tree.tokens[list(verdict.path)].tolist(), verdict.next_token])
        self._keep(root, tree, verdict.path[: len(emitted) - 1])
        self._extend(emitted)
        return Round(tuple(emitted), tree, verdict, self.finish_reason, self._logprobs(target_probs, verdict, emitted))

    def _logits(self, root: int, tree: TokenTree) -> Tensor:
        """[size, vocab] the target's logits over the tree, in one pass with what is left of the prompt."""
        self.cache.truncate(min(self.cache.length, root))  # a round that was interrupted leaves its tree
        pending = read_ahead(self._target, self.tokens[:root], self.cache)
        block = tree.layout.block(root, len(pending))
        return self._target.forward(torch.cat([pending, tree.tokens]), self.cache, block, last=tree.shape.size)

    def _limited_tree(self, root: int) -> Tree:
        """No deeper than tokens may still be emitted and both models have positions."""
        depth = self._most_tokens - len(self.tokens) - 1
        if self._proposer.context_length is not None:
            depth = min(depth, self._proposer.context_length - root)
        return self._tree.limit(max(depth, 0))

    def _propose(self, tree: Tree) -> TokenTree:
        device = self._target.device
        if tree.size == 1:
            return TokenTree.root_only(layout_of(TreeShape.root_only(), device), self.tokens[-1])
        generator = self._noise.generator(self._rounds, Purpose.DRAFT)
        draws, proposable = self._verifier.draws, self._proposer.proposable
        growth = Growth(tree, self._processors, draws, proposable, generator, device)
        if self._reader is not None:
            self._reader.follow(cast(TappedCache, self.cache))
        return self._proposer.propose(self.tokens, growth)

    def _cut(self, emitted: list[int]) -> list[int]:
        """End at the first end-of-text token or at the length limit, wherever in the path it falls."""
        emitted = emitted[: self._most_tokens - len(self.tokens)]
        for index, token in enumerate(emitted):
            if token in self._eos_ids:
                self.finish_reason = "stop"
                return emitted[: index + 1]
        if len(self.tokens) + len(emitted) == self._most_tokens:
            self.finish_reason = "length"
        return emitted

    def _keep(self, root: int, tree: TokenTree, path: tuple[int, ...]) -> None:
        self.cache.keep(root, [root + node for node in (0, *path)])
        if tree.shape.size > 1:
            self._proposer.keep(path)

    def _extend(self, emitted: list[int]) -> None:
        self._processors.observe(emitted)
        self.tokens += emitted
        self._rounds += 1

    def _logprobs(self, rows: TargetRows, verdict: Verdict, emitted: list[int]) -> tuple[TokenLogprobs, ...] | None:
        count = self._params.logprobs
        if count is None:
            return None
        return tuple(
            rows.logprobs(node, token, count) for node, token in zip((0, *verdict.path), emitted, strict=False)
        )


def _check_tree(tree: Tree, proposer: Proposer) -> None:
    if isinstance(tree, TreeShape) and tree.max_children > proposer.proposable:
        raise UsageError(
            f"the tree has a node with {tree.max_children} children, but the draft has only "
            f"{proposer.proposable} tokens to propose. Choose a narrower tree."
        )


def _check_prompt(prompt: Sequence[int], target: LanguageModel) -> None:
    if not prompt:
        raise UsageError("the prompt is empty: at least one token is needed to start from.")
    strange = [token for token in prompt if not 0 <= token < target.vocab_size]
    if strange:
        raise UsageError(
            f"the prompt holds token id {strange[0]}, but the target has ids 0 to {target.vocab_size - 1}."
        )
    if target.context_length is not None and len(prompt) >= target.context_length:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens and the target's context {target.context_length}, which leaves no "
            "room for an answer. Shorten the prompt."
        )
