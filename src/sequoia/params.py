"""What a request asks for: one frozen record, validated when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from sequoia.errors import UsageError

_LARGE = 1e30  # what 32-bit logits can still be scaled or moved by


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Applied to target and draft alike, at every node of the tree.

    Processors run in this order, as in transformers: logit bias, repetition penalty, frequency and presence
    penalties, temperature, top-k, top-p, min-p.

    Raises:
        UsageError: a value is out of its range; the message names the field, the range and the value.
    """

    max_tokens: int = 128
    """Most tokens to generate, at least 1."""
    temperature: float = 1.0
    """0 always takes the most probable token."""
    top_k: int | None = None
    """Keep the k most probable tokens; None or 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches p; the token that crosses p is kept."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output once per occurrence."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id to an amount added to its logit; -inf bans the token."""
    seed: int | None = None
    """Repeats a run exactly; None draws fresh noise each time."""
    stop: tuple[str, ...] = ()
    """Text at which to stop; the output ends before it."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text token."""
    logprobs: int | None = None
    """Report each token's log-probability under the target's own distribution, before any processor, and those of this
    many most probable tokens."""

    def __post_init__(self) -> None:
        _require_integer("max_tokens", self.max_tokens, least=1)
        _require_real("temperature", self.temperature, 0.0, _LARGE)
        if 0 < self.temperature < 1 / _LARGE:
            raise UsageError(f"temperature must be 0 or at least {1 / _LARGE:g}, not {self.temperature!r}.")
        if self.top_k is not None:
            _require_integer("top_k", self.top_k, least=0)
            object.__setattr__(self, "top_k", self.top_k or None)
        _require_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_real("min_p", self.min_p, 0.0, 1.0)
        _require_real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _require_real("presence_penalty", self.presence_penalty, -_LARGE, _LARGE)
        _require_real("frequency_penalty", self.frequency_penalty, -_LARGE, _LARGE)
        if self.seed is not None:
            _require_integer("seed", self.seed, least=0)
        if self.logprobs is not None:
            _require_integer("logprobs", self.logprobs, least=0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    def __reduce__(self) -> tuple[Any, ...]:
        # The read-only view that guards `logit_bias` can be neither pickled nor copied.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self).from_dict, (values | {"logit_bias": dict(self.logit_bias)},)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain data; unknown keys are refused."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown sampling parameter {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
        return cls(**values)


def _require_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name} must be an integer of at least {least}, not {value!r}.")


def _require_real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    above = number > low if open_low else number >= low
    if not (above and number <= high):
        lower = f"above {low:g}" if open_low else f"of at least {low:g}"
        raise UsageError(f"{name} must be a number {lower} and at most {high:g}, not {value!r}.")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise UsageError(f"stop must be a non-empty string or a list of them, not {stop!r}.")
    if any(_has_surrogate(string) for string in strings):
        raise UsageError("stop holds half a character (a lone surrogate), which no text ever does. Leave it out.")
    return tuple(strings)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _logit_bias(bias: object) -> Mapping[int, float]:
    if bias is None:
        return MappingProxyType({})
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, not {bias!r}.")
    for token, amount in bias.items():
        _require_integer("a token id in logit_bias", token, least=0)
        if amount != -math.inf:
            _require_real(f"logit_bias[{token}]", amount, -_LARGE, _LARGE)
    return MappingProxyType({int(token): float(amount) for token, amount in bias.items()})
