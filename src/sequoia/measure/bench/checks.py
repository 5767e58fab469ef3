"""What can be wrong with an answer: each check is a function of the answers, and of logits where they decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia.measure.bench.records import NEAR_TIE, Finding, Result, Setting

TIE_SPACINGS = 8.0
"""Two logits tie if at most this many spacings of the number format (its epsilon times the larger one) lie between
them: passes of another number of rows add up in another order, and round differently."""

SHORTEST_REUSE = 8
"""Tokens from which on an answer that comes twice may be called reused; shorter ones come twice by themselves."""

SURPRISE = 1e-6
"""A sampled answer of a smaller probability does not come twice by itself."""


@dataclass(frozen=True)
class Limits:
    """What every answer must keep to."""

    vocab_size: int
    eos_ids: frozenset[int]
    max_tokens: int


def alone(result: Result, limits: Limits) -> Iterator[Finding]:
    """What is wrong with an answer whatever the others say."""
    if not result.token_ids:
        yield finding(result, "no token", "nothing was emitted")
        return
    strange = [token for token in result.token_ids if not 0 <= token < limits.vocab_size]
    if strange:
        detail = f"token id {strange[0]} is none of the target's, which are 0 to {limits.vocab_size - 1}"
        yield finding(result, "beyond the vocabulary", detail)
    excess = _excess(result.token_ids, limits)
    if excess is not None:
        yield finding(result, "too many tokens", excess)
    if result.finish == "early":
        detail = f"{len(result.token_ids)} of {limits.max_tokens} tokens came, and the last does not end the text"
        yield finding(result, "early end", detail)
    if result.passes == 0:
        read = "no pass of the target" if not result.rows else "no pass of the target over all of the prompt"
        yield finding(result, "reused answer", f"{len(result.token_ids)} tokens came from {read}")
    elif result.drafted_tokens is not None and result.passes != len(result.counts):
        detail = f"{len(result.counts)} rounds were emitted, but the target made {result.passes} passes"
        yield finding(result, "passes do not add up", detail)


def _excess(token_ids: Sequence[int], limits: Limits) -> str | None:
    end = next((place for place, token in enumerate(token_ids, 1) if token in limits.eos_ids), len(token_ids))
    if end < len(token_ids):
        return f"{len(token_ids) - end} tokens came after end-of-text"
    return f"{len(token_ids)} tokens came, {limits.max_tokens} were asked for" if end > limits.max_tokens else None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part; None where one is the beginning of the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (our, their) in pairs if our != their), None)


def against(result: Result, reference: Result, logits_after: Callable[[int], Tensor], epsilon: float) -> Finding | None:
    """A greedy answer held against the one it must repeat.

    Args:
        logits_after: number of tokens of the answer → [vocab] the target's logits after the prompt and them.
        epsilon: of the number format that the methods calculate in.
    """
    ours, theirs = result.token_ids, reference.token_ids
    if ours == theirs:
        return None
    place = first_difference(ours, theirs)
    if place is None:
        detail = f"{len(ours)} tokens, where {reference.method} has {len(theirs)} that begin or go on the same"
        return finding(result, "wrong tokens", detail)
    our, their = (logits_after(place)[[ours[place], theirs[place]]]).tolist()
    spacings = abs(our - their) / (epsilon * max(abs(our), abs(their), 1e-30))
    kind = NEAR_TIE if spacings <= TIE_SPACINGS else "wrong tokens"
    detail = (
        f"token {place + 1} is {ours[place]} where {reference.method} has {theirs[place]}; "
        f"their logits {our:.5g} and {their:.5g} lie {abs(our - their):.2g} apart, {spacings:.1f} spacings"
    )
    return finding(result, kind, detail)


def log_probability(logits: Tensor, token_ids: Sequence[int], setting: Setting) -> float:
    """At least the natural logarithm of the answer's probability: top-p can raise a token's by 1/p at most.

    Args:
        logits: [tokens, vocab] before each token of the answer.
    """
    logs = (logits.double() / setting.temperature).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(token_ids, device=logs.device)[:, None])
    return chosen.sum().item() - len(token_ids) * math.log(setting.top_p)


def finding(result: Result, kind: str, detail: str) -> Finding:
    return Finding(result.method, result.setting, result.prompt, result.repeat, kind, detail)
