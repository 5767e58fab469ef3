"""What decides a head's weights, beside the target and the prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer

_WRITING = 0.4  # of the hours


@dataclass(frozen=True)
class TrainSettings:
    """A training.

    Args:
        tokens: that the target writes; a shard of them is held out.
        epochs: how often the others are trained on.
        hours: for all of it, at most; the texts then may be fewer, and no two runs are the same.
        draft_vocab: ids that the head can propose, the most frequent ones.
        disk: bytes that texts and features may take.
        depth: steps of a chain, once half of the training is over, whose chains have one.
        batch: rows of a step, of `length` tokens each.
        rows, length: of a shard. Rows are texts end to end; none is longer than a row.
        learning_rate: of matrices, the highest.
    """

    tokens: int = 1_000_000
    epochs: int = 6
    hours: float | None = None
    draft_vocab: int = 8192
    disk: int = 16 * 2**30
    depth: int = 4
    batch: int = 4
    rows: int = 64
    length: int = 512
    learning_rate: float = 4e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "epochs", "draft_vocab", "disk", "depth", "batch", "rows"):
            require_integer(name, getattr(self, name), 1)
        require_integer("length", self.length, 128)
        require_integer("seed", self.seed, 0)
        if self.hours is not None and not self.hours > 0:
            raise UsageError(f"hours must be above 0, not {self.hours}.")
        if not self.learning_rate > 0:
            raise UsageError(f"the learning rate must be above 0, not {self.learning_rate}.")

    @property
    def writing_seconds(self) -> float:
        """For the texts, at most; a shard that was begun is finished."""
        return math.inf if self.hours is None else 3600 * self.hours * _WRITING

    @property
    def training_seconds(self) -> float:
        """For the steps."""
        return math.inf if self.hours is None else 3600 * self.hours * (1 - _WRITING)

    def shards(self, bytes_per_token: int) -> int:
        """How many shards are written, at least two, as many as the disk may hold at most.

        Raises:
            UsageError: it may hold no two.
        """
        tokens = self.rows * self.length
        fitting = self.disk // (tokens * bytes_per_token)
        if fitting < 2:
            least = 2 * tokens * bytes_per_token / 2**30
            raise UsageError(
                f"{2 * tokens} tokens, the fewest to train on, take {least:.2f} GiB with their features, and "
                f"{self.disk / 2**30:.2f} GiB are allowed. Allow more with --disk."
            )
        return max(2, min(-(-self.tokens // tokens), fitting))
