"""What the algorithm asks of a model: one forward over new rows, and a cache that can keep a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sequoia.model.features import Features


@dataclass(frozen=True)
class Block:
    """How the newest cache slots see each other; every slot before them is visible to every new row.

    The block covers the last m slots, of which the last n are the rows of this forward.
    """

    positions: Tensor  # [m] position of each slot of the block
    visible: Tensor  # [n, m] bool, True where a new row attends to a slot of the block

    @classmethod
    def linear(cls, start: int, count: int, device: torch.device) -> Block:
        """`count` rows that follow each other from position `start`."""
        positions = torch.arange(start, start + count, device=device)
        return cls(positions, torch.ones(count, count, dtype=torch.bool, device=device).tril())


PASS_ROWS = 512
"""Of one pass over a long prompt, where a model does not say otherwise; bounds the mask's memory."""


def read_ahead(model: LanguageModel, tokens: Sequence[int], cache: Cache) -> Tensor:
    """Bring the cache up to the last `pass_rows` of `tokens`, and return those it does not hold yet, [rows].

    A draft may have fewer tokens than its target; those it does not know are read as its last one.
    """
    pending = torch.tensor(tokens[cache.length :], dtype=torch.long).clamp_(max=model.vocab_size - 1).to(model.device)
    rows = getattr(model, "pass_rows", PASS_ROWS)
    while len(pending) > rows:
        model.forward(pending[:rows], cache, last=1)
        pending = pending[rows:]
    return pending


class Cache(Protocol):
    """Slots filled in order; between rounds slot i holds position i."""

    @property
    def length(self) -> int: ...

    def keep(self, start: int, slots: Sequence[int]) -> None:
        """Move `slots` to follow slot `start - 1` and forget everything else from `start` on."""

    def truncate(self, length: int) -> None: ...


class TappedCache(Cache, Protocol):
    """A cache that keeps features of the tokens in it."""

    @property
    def features(self) -> Features: ...


class TappedModel(Protocol):
    """A model that makes such caches."""

    def new_cache(self, taps: Sequence[int]) -> TappedCache:
        """A cache that keeps these; see `sequoia.model.features`."""


class LanguageModel(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int | None: ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self) -> Cache: ...

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        """Append rows to the cache and return their logits.

        Args:
            tokens: [n] token ids.
            cache: a cache made by `new_cache`; its length grows by n.
            block: how the newest slots see each other; None continues linearly.
            last: how many rows' logits are needed, counted from the end; None needs all.

        Returns:
            [n, vocab_size] logits, or [last, vocab_size].
        """
