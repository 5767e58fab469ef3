"""What the harness asks of a method: tokens, as they are decided. It counts and times them itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sequoia.errors import UsageError
from sequoia.measure.bench.records import MethodEntry
from sequoia.params import SamplingParams
from sequoia.speculate.session import Round

PLAIN = "plain"
"""The method that all speedups are over and that lossless ones must repeat."""

LOOKUP_TOKENS = 10
"""Tokens that a peer's prompt lookup proposes at most."""

Emit = Callable[["Sequence[int] | Round"], None]
"""Called with the token ids of each step, or with the `Round` they came from, as soon as they are decided."""

Generate = Callable[[Sequence[int], SamplingParams, Emit], None]
"""(prompt's token ids, params with a seed of their own, emit): generate up to `params.max_tokens` or end-of-text."""


def _nothing_to_prepare(most_tokens: int) -> None:
    pass


@dataclass(frozen=True)
class Method:
    """A way to generate."""

    name: str
    generate: Generate
    same_as: str | None = PLAIN  # the method whose greedy output this one must repeat; None claims nothing
    tree_size: int | None = None
    tree_kind: str | None = None
    spec: str = ""
    own_model: bool = False  # runs another model than the engine's target, whose passes the clock cannot see
    prepare: Callable[[int], None] = _nothing_to_prepare
    """Called once before measuring, with the most tokens a request can have, its prompt's included."""

    @property
    def entry(self) -> MethodEntry:
        return MethodEntry(self.name, self.same_as, self.tree_size, self.tree_kind, self.spec)


def require_mapped(name: str, params: SamplingParams, *fields: str) -> None:
    """Refuse parameters that a peer has no equal of.

    Raises:
        UsageError: one of `fields` is not at its default.
    """
    default = SamplingParams()
    asked = next((field for field in fields if getattr(params, field) != getattr(default, field)), None)
    if asked is not None:
        raise UsageError(f"{name} has nothing that means what {asked} does here. Leave {asked} or the method out.")
