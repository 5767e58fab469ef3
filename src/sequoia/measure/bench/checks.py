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

HELD_BACK = 0.25
"""Of all passes, at most this share more may come before the first emission than that holds of the tokens."""


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
        read = "without a pass of engine.target_model" + (" over all of the prompt" if result.rows else "")
        yield finding(result, "reused answer", f"{len(result.token_ids)} tokens came {read}")
    elif result.drafted_tokens is not None and result.passes != len(result.counts):
        detail = f"{len(result.counts)} rounds were emitted, but the target made {result.passes} passes"
        yield finding(result, "passes do not add up", detail)
    if _is_held_back(result):
        detail = (
            f"{result.first_token_passes} of {result.passes} passes were made before the first {result.counts[0]} of "
            f"{len(result.token_ids)} tokens came, so that the others look faster than they are"
        )
        yield finding(result, "tokens held back", detail)


def _is_held_back(result: Result) -> bool:
    """The first pass is the prompt's, and its tokens are not counted into the speed: those of other passes must be."""
    if not result.passes or not result.first_token_passes:
        return False
    waited = (result.first_token_passes - 1) / result.passes
    return waited - result.counts[0] / len(result.token_ids) > HELD_BACK


def _excess(token_ids: Sequence[int], limits: Limits) -> str | None:
    end = next((place for place, token in enumerate(token_ids, 1) if token in limits.eos_ids), len(token_ids))
    if end < len(token_ids):
        return f"{len(token_ids) - end} tokens came after end-of-text"
    return f"{len(token_ids)} tokens came, {limits.max_tokens} were asked for" if end > limits.max_tokens else None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part; None where one is the beginning of the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (our, their) in pairs if our != their), None)


def against(result: Result, reference: Result, logits_from: Callable[[int], Tensor], epsilon: float) -> Finding | None:
    """A greedy answer held against the one it must repeat; past a near tie, against what the target then says.

    Args:
        logits_from: number of tokens of the answer → [rows, vocab] the target's logits before the next one and, if
            they are to be looked at, before those that follow it in the answer.
        epsilon: of the number format that the methods calculate in.
    """
    ours, theirs = result.token_ids, reference.token_ids
    if ours == theirs:
        return None
    place = first_difference(ours, theirs)
    if place is None:
        detail = f"{len(ours)} tokens, where {reference.method} has {len(theirs)} that begin or go on the same"
        return finding(result, "wrong tokens", detail)
    logits = logits_from(place)
    our, their = logits[0, [ours[place], theirs[place]]].tolist()
    spacings = _spacings(our, their, epsilon)
    detail = (
        f"token {place + 1} is {ours[place]} where {reference.method} has {theirs[place]}; "
        f"their logits {our:.5g} and {their:.5g} lie {abs(our - their):.2g} apart, {spacings:.1f} spacings"
    )
    if spacings > TIE_SPACINGS:
        return finding(result, "wrong tokens", detail)
    later = _unlikely(ours, place + 1, logits[1:], epsilon)
    return finding(result, NEAR_TIE, detail) if later is None else finding(result, "wrong tokens", f"{later}; {detail}")


def _unlikely(token_ids: Sequence[int], start: int, logits: Tensor, epsilon: float) -> str | None:
    """The first token from `start` on that does not even tie with the likeliest, of those that `logits` are of."""
    for place, row in enumerate(logits, start):
        best, own = row.max().item(), row[token_ids[place]].item()
        spacings = _spacings(best, own, epsilon)
        if spacings > TIE_SPACINGS:
            return f"token {place + 1} is {token_ids[place]}, {spacings:.1f} spacings below the likeliest"
    return None


def _spacings(first: float, second: float, epsilon: float) -> float:
    return abs(first - second) / (epsilon * max(abs(first), abs(second), 1e-30))


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
