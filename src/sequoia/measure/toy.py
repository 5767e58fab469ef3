"""A language model small enough to know its law exactly: logits looked up by the last two tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sequoia.model.language_model import Block


class ToyCache:
    """One token per slot."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def keep(self, start: int, slots: Sequence[int]) -> None:
        self.tokens[start:] = [self.tokens[slot] for slot in slots]

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class ToyModel:
    """A `LanguageModel` whose logits are a table over pairs of tokens.

    It reads the pair through the block's mask and positions, as attention would, so a wrong mask, position or kept
    slot changes its logits.

    Args:
        table: [vocab, vocab, vocab] logits after (token before the last, last token).
    """

    device = torch.device("cpu")

    def __init__(self, table: Tensor, context_length: int | None = None) -> None:
        self.table = table
        self.vocab_size = table.shape[-1]
        self.context_length = context_length

    @classmethod
    def random(cls, vocab_size: int, seed: int, spread: float = 1.5) -> ToyModel:
        """Logits drawn from a normal distribution of standard deviation `spread`."""
        generator = torch.Generator().manual_seed(seed)
        return cls(spread * torch.randn(vocab_size, vocab_size, vocab_size, generator=generator))

    def blended(self, other: ToyModel, share: float) -> ToyModel:
        """A draft of this model: its table with `share` of another's."""
        return ToyModel((1 - share) * self.table + share * other.table, self.context_length)

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def forward(self, tokens: Tensor, cache: ToyCache, block: Block | None = None, last: int | None = None) -> Tensor:
        """See `LanguageModel.forward`."""
        count = len(tokens)
        block = block or Block.linear(cache.length, count, self.device)
        cache.tokens += tokens.tolist()
        start = cache.length - len(block.positions)
        positions, visible = block.positions.tolist(), block.visible.tolist()
        pairs = [self._pair(cache.tokens, start, positions, row) for row in visible[-(last or count) :]]
        return self.table[[pair[0] for pair in pairs], [pair[1] for pair in pairs]]

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """[vocab] logits after a plain sequence."""
        before, last = ([0, *tokens])[-2:]
        return self.table[before, last]

    def _pair(self, tokens: list[int], start: int, positions: list[int], visible: list[bool]) -> tuple[int, int]:
        """The last two tokens that a row sees, by position; token 0 stands before the first."""
        seen = sorted((positions[i], tokens[start + i]) for i, sees in enumerate(visible) if sees)
        tail = [token for _, token in seen[-2:]]
        if len(tail) < 2:
            tail = [tokens[start - 1] if start else 0, *tail]
        return tail[0], tail[1]
