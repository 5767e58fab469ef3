"""Many texts at once through a lean decoder, a token of each per pass: what a model's own texts are written with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sequoia.model.features import Features
from sequoia.model.lean.decoder import LeanDecoder

_STEP = 128  # slots added at a time; products of whole tensors are faster than those of parts
_SLIDING = "sliding_attention"


class SideBySide(LeanDecoder):
    """A settled decoder each of whose rows is a text of its own.

    Args:
        decoder: whose weights run; not quantised.
        texts: how many.
        window: of sliding attention, in tokens, if there is any.
        features: which are kept of a pass; see `Features`.
    """

    def __init__(self, decoder: LeanDecoder, texts: int, window: int | None, features: Features) -> None:
        vars(self).update(vars(decoder))
        self._window = window
        heads = self.recipe.heads
        shape = (len(self.recipe.layers), 2, texts, heads.keys, heads.size, 0)
        self._slots = _Slots(torch.empty(shape, dtype=self._dtype, device=self._device), features)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each text.

        Args:
            tokens, positions: [texts]; at position 0 a text begins anew.

        Returns:
            [texts, vocab] logits, and [texts, taps, size]: the features.
        """
        self._slots.make_room()
        masks = {layer.kind: self._mask(layer.kind, positions) for layer in self.recipe.layers}
        slots: Any = self._slots  # what a pass asks of a cache
        logits = self.forward(tokens, positions, masks, slots)
        return logits, self._slots.features.read(0, len(tokens)).clone()

    def _mask(self, kind: str, positions: Tensor) -> Tensor:
        """[texts · key heads, queries per key, slots], additive: a text at position p sees its last p + 1 slots."""
        reach = positions if kind != _SLIDING or self._window is None else positions.clamp(max=self._window - 1)
        age = self._slots.filled - torch.arange(self._slots.capacity, device=positions.device)
        hidden = (age < 0) | (age > reach[:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
        mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
        return mask.repeat_interleave(self.recipe.heads.keys, 0)[:, None].repeat(1, self.queries_per_key, 1)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        # As batched products: torch's fused attention takes twice as long for so few queries of so many texts.
        heads = self.recipe.heads
        grouped = queries.view(heads.keys, -1, queries.shape[1], heads.size).permute(2, 0, 1, 3).flatten(0, 1)
        assert mask is not None
        weights = torch.bmm(grouped * scale, keys.flatten(0, 1)).add_(mask).softmax(-1)
        attended = torch.bmm(values.flatten(0, 1), weights.transpose(1, 2))  # [texts · key heads, size, queries]
        by_key = attended.view(-1, heads.keys, *attended.shape[1:])
        return by_key.permute(1, 3, 0, 2).reshape(heads.queries, -1, heads.size)


class _Slots:
    """Keys and values as `LeanCache` hands them out, one slot of each text per pass.

    Slots come last, [layers, keys or values, texts, heads, head size, slots]: products are fastest so.
    """

    length = 0  # where a pass's features go: in the place of the last one's

    def __init__(self, empty: Tensor, features: Features) -> None:
        self._slots, self.features, self.filled = empty, features, 0

    @property
    def capacity(self) -> int:
        return self._slots.shape[-1]

    def make_room(self) -> None:
        """For one more."""
        if self.filled == self.capacity:
            self._slots = functional.pad(self._slots, (0, _STEP))

    def rows(self, count: int) -> tuple[Any, ...]:
        """By layer: keys and values, [texts, heads, head size, slots], and the new ones, [heads, texts, head size]."""
        new = self._slots[..., self.filled].transpose(2, 3)
        return (*(part.unbind() for part in self._slots.unbind(1)), *(part.unbind() for part in new.unbind(1)))

    def append(self, count: int) -> None:
        self.filled += 1
