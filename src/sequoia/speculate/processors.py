"""Logits → probabilities: one function for target and draft, exact at every node with the node's own prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sequoia.errors import ModelError, UsageError
from sequoia.params import SamplingParams

_NUCLEUS_GUESS = 1024  # tokens sorted before falling back to a full sort for top-p


class Processors:
    """The processors of one request, with the tokens they have seen so far.

    Order and meanings as in transformers; the repetition penalty counts the prompt, the other two the output only.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        beyond = [token for token in params.logit_bias if token >= vocab_size]
        if beyond:
            raise UsageError(f"logit_bias names token {beyond[0]}, but the vocabulary has {vocab_size} tokens.")
        self.params = params
        self._bias: Tensor | None = None
        if params.logit_bias:
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), device=device)
        self._repeats = params.repetition_penalty != 1.0
        self._counts_output = bool(params.presence_penalty or params.frequency_penalty)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._seen[list(prompt)] = True
        self._counts = torch.zeros(vocab_size, device=device)  # occurrences in the output

    def observe(self, tokens: Iterable[int]) -> None:
        """Add emitted tokens to the context of everything that follows."""
        if not self.read_paths:
            return
        for token in tokens:
            self._seen[token] = True
            self._counts[token] += 1

    @property
    def read_paths(self) -> bool:
        """Whether a node's own prefix changes its distribution beyond its logits."""
        return self._repeats or self._counts_output

    def scores(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        candidates: Tensor | None = None,
        model: str = "target",
    ) -> Tensor:
        """Logits after bias and penalties.

        Args:
            logits: [rows, candidates].
            paths: for each row, the tokens that follow the emitted ones, up to and including the row's own.
            candidates: [candidates] the token ids that the columns stand for; None for the whole vocabulary.
            model: whose logits these are, for the error.

        Returns:
            [rows, candidates] in 32 bit.

        Raises:
            ModelError: a row is no distribution (NaN, +inf, or nothing but -inf).
            UsageError: the bias bans every token.
        """
        scores = logits.float()
        if not torch.isfinite(scores.amax(-1)).all():
            raise ModelError(
                f"the {model}'s logits are no distribution (NaN or infinite). Check its weights and dtype."
            )
        if self._bias is not None:
            scores = _biased(scores, _columns(self._bias, candidates), model)
        if self.read_paths:
            counts = _path_counts(paths, len(self._seen), scores.device)
            if self._repeats:
                scores = self._penalise_repetition(scores, _columns(self._seen | (counts > 0), candidates))
            if self._counts_output:
                scores = self._penalise_output(scores, _columns(self._counts + counts, candidates))
        return scores

    def probs(self, scores: Tensor) -> Tensor:
        """[rows, vocab] scores → probabilities in 32 bit: temperature, top-k, top-p, min-p."""
        params = self.params
        if params.temperature == 0:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        if params.temperature != 1:
            # The maximum goes first, so that no temperature, however small, overflows.
            scores = scores.sub(scores.amax(-1, keepdim=True)).div_(params.temperature)
        if params.top_k is not None and params.top_k < scores.shape[-1]:
            kth = scores.topk(params.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if params.top_p < 1:
            scores = _nucleus(scores, params.top_p)
        probs = scores.softmax(-1)
        if params.min_p > 0:
            scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
            probs = scores.softmax(-1)
        return probs

    def _penalise_repetition(self, scores: Tensor, seen: Tensor) -> Tensor:
        penalty = self.params.repetition_penalty
        return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)

    def _penalise_output(self, scores: Tensor, counts: Tensor) -> Tensor:
        return scores - self.params.frequency_penalty * counts - self.params.presence_penalty * (counts > 0)


def _biased(scores: Tensor, bias: Tensor, model: str) -> Tensor:
    """A draft that knows only banned tokens proposes them all alike, to be rejected."""
    biased = scores + bias
    banned = biased.amax(-1, keepdim=True) == -torch.inf
    if model == "draft":
        return biased.masked_fill(banned, 0.0)
    if bool(banned.any()):
        raise UsageError("logit_bias bans every token that the target can give. Leave it at least one.")
    return biased


def _columns(values: Tensor, candidates: Tensor | None) -> Tensor:
    """[..., vocab] → [..., candidates]"""
    return values if candidates is None else values[..., candidates]


def _path_counts(paths: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """[rows, vocab] occurrences of each token in each row's path."""
    counts = torch.zeros(len(paths), vocab_size, device=device)
    rows = torch.tensor([row for row, path in enumerate(paths) for _ in path], dtype=torch.long, device=device)
    tokens = torch.tensor([token for path in paths for token in path], dtype=torch.long, device=device)
    return counts.index_put_((rows, tokens), torch.ones((), device=device), accumulate=True)


def _nucleus(scores: Tensor, mass: float) -> Tensor:
    """Keep the fewest most probable tokens whose mass reaches `mass`; the one that crosses it stays."""
    probs = scores.softmax(-1)
    count = min(_NUCLEUS_GUESS, scores.shape[-1])
    top, tokens = probs.topk(count, dim=-1)
    if count < scores.shape[-1] and bool((top.sum(-1, dtype=torch.float64) < mass).any()):
        top, tokens = probs.sort(dim=-1, descending=True, stable=True)
    before = top.double().cumsum(-1) - top
    dropped = before >= mass
    dropped[..., 0] = False
    kept = scores.gather(-1, tokens).masked_fill(dropped, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, kept)
