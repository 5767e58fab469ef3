"""A target's own texts as training data: their tokens, and the features that its passes had on the way.

Texts are written side by side. What a shard of them holds depends on the seed and its number alone, not on what was
written before, so that a run that was interrupted goes on with the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random

import torch
from torch import Tensor

from sequoia.model.causal_lm import CausalLM
from sequoia.training.frame import Openings

_ANSWERING = (0.0, 0.6, 1.0)  # temperatures
_ASKING = 0.75
_ALMOST_0 = 1e-3  # a temperature that takes the most probable token
_LONGEST_REQUEST = 192
_ENDING = 0.6  # share of answers that end a text; after the others another request follows


@dataclass(frozen=True)
class Shard:
    """Rows of texts end to end; a text is cut where the row or the target's context ends."""

    tokens: Tensor  # [rows, tokens] int32
    positions: Tensor  # [rows, tokens] int32, from 0 in each text
    leads: Tensor  # [rows, tokens] bool: true for the first tokens that all texts share
    features: Tensor  # [rows, tokens, taps, size]

    def to(self, device: torch.device) -> Shard:
        return Shard(*(getattr(self, field.name).to(device) for field in fields(self)))


def write_shard(
    target: CausalLM,
    openings: Openings,
    taps: tuple[int, ...],
    rows: int,
    length: int,
    seed: str,
    tick: Callable[[int], None],
) -> Shard:
    """Write `rows` rows of `length` tokens.

    Args:
        taps: which features are kept; see `Features`.
        tick: told of tokens as they are written.
    """
    random = Random(seed)
    dice = _Dice(rows, target.vocab_size, random.getrandbits(63))
    decoder = target.side_by_side(rows, taps)
    longest = length if target.context_length is None else min(length, target.context_length)
    writers = [_Writer(openings, target.loaded.eos_ids, longest, random) for _ in range(rows)]
    shard = Shard(
        torch.zeros(rows, length, dtype=torch.int32),
        torch.zeros(rows, length, dtype=torch.int32),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.empty(rows, length, len(taps), target.hidden_size, dtype=target.loaded.dtype),
    )
    drawn = [0] * rows
    for step in range(length):
        tokens, positions, leads = zip(*(map(_Writer.read, writers, drawn)), strict=True)
        now = torch.tensor(tokens)
        shard.tokens[:, step], shard.positions[:, step] = now, torch.tensor(positions)
        shard.leads[:, step] = torch.tensor(leads)
        logits, features = decoder.step(now.to(target.device), shard.positions[:, step].to(target.device, torch.long))
        shard.features[:, step] = features
        drawn = dice.draw(logits, [writer.temperature for writer in writers]).tolist()
        tick(rows)
    return shard


class _Writer:
    """A text after another, a token at a time: forced where the frame has it, else what the model draws."""

    def __init__(self, openings: Openings, eos_ids: frozenset[int], longest: int, random: Random) -> None:
        self._openings, self._eos_ids, self._longest, self._random = openings, eos_ids, longest, random
        self._begin()

    def read(self, drawn: int) -> tuple[int, int, bool]:
        """The next token, its position, and whether all texts have it; `drawn` is what the model would go on with."""
        if self._position + 1 == self._longest:
            self._begin()
        elif not self._forced:
            self._go_on(drawn)
        token = self._forced.pop(0) if self._forced else drawn
        self._position += 1
        return token, self._position, self._position < self._lead

    def _begin(self) -> None:
        opening = self._openings.draw(self._random)
        self._forced, self._lead, self._is_request = list(opening.tokens), opening.lead, opening.is_request
        self._position, self._written = -1, 0
        self.temperature = self._next_temperature()

    def _go_on(self, drawn: int) -> None:
        self._written += 1
        too_long = self._is_request and self._written > _LONGEST_REQUEST
        if drawn not in self._eos_ids and not too_long:
            return
        frame = self._openings.frame
        if frame is None or (not self._is_request and self._random.random() < _ENDING):
            self._begin()
            return
        self._forced = list(frame.to_answer if self._is_request else frame.to_request)
        self._is_request, self._written = not self._is_request, 0
        self.temperature = self._next_temperature()

    def _next_temperature(self) -> float:
        return _ASKING if self._is_request else self._random.choice(_ANSWERING)


class _Dice:
    """Draws a token for each text, in buffers that are used again."""

    _BLOCK = 128  # tokens whose weights are summed first, so that few sums are accumulated

    def __init__(self, texts: int, vocab: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._scaled = torch.empty(texts, -(-vocab // self._BLOCK) * self._BLOCK)

    def draw(self, logits: Tensor, temperatures: list[float]) -> Tensor:
        """[texts] tokens from [texts, vocab] logits."""
        scaled, count = self._scaled, len(self._scaled)
        factors = 1 / torch.tensor(temperatures).clamp(min=_ALMOST_0)
        torch.mul(logits.to(scaled.device), factors[:, None], out=scaled[:, : logits.shape[1]])
        scaled[:, logits.shape[1] :] = -torch.inf
        blocks = scaled.sub_(scaled.amax(1, keepdim=True)).exp_().view(count, -1, self._BLOCK)
        block, coins = _invert(blocks.sum(-1), torch.rand(count, 1, generator=self._generator))
        within, _ = _invert(blocks[torch.arange(count), block], coins)
        return block * self._BLOCK + within


def _invert(weights: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Where each coin, [texts, 1] in [0, 1), falls on [texts, n] weights: [texts] places, and where within."""
    sums = weights.double().cumsum(-1)
    at = coins * sums[:, -1:]
    found = torch.searchsorted(sums, at, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, found).double()
    rest = (at - (sums.gather(1, found) - weight)) / weight
    return found[:, 0], rest.clamp_(0, 1 - 1e-12)
