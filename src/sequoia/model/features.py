"""What the target's layers made of each token, for drafts that go by it: kept slot by slot, as keys and values are.

Feature i of a token is the residual stream after i decoder layers: 0 is the embedding, n (the number of layers) is what
the final norm reads, and n + 1 what that makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sequoia.errors import ModelError

_STEP = 256  # slots added at a time


class Features:
    """Some features of each slot of a cache, which says how many slots count and tells of slots that move.

    Args:
        taps: which features, in the order that `read` gives them.
        size: of a feature.
    """

    def __init__(self, taps: Sequence[int], size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.taps = tuple(taps)
        self._slots = torch.empty(0, len(self.taps), size, dtype=dtype, device=device)

    def write(self, tap: int, start: int, rows: Tensor) -> None:
        """Feature `tap` of the slots from `start` on, [rows, size]; one that is not kept is passed over."""
        if tap not in self.taps:
            return
        end = start + len(rows)
        if end > len(self._slots):
            self._grow(end, start)
        for place, kept in enumerate(self.taps):
            if kept == tap:
                self._slots[start:end, place] = rows

    def read(self, start: int, end: int) -> Tensor:
        """[end - start, taps, size]"""
        return self._slots[start:end]

    def move(self, start: int, slots: Sequence[int]) -> None:
        """Move `slots` to follow slot `start - 1`."""
        index = torch.tensor(slots, device=self._slots.device)
        self._slots[start : start + len(slots)] = self._slots.index_select(0, index)

    def _grow(self, slots: int, filled: int) -> None:
        capacity = -(-slots // _STEP) * _STEP
        grown = self._slots.new_empty(capacity, *self._slots.shape[1:])
        grown[:filled] = self._slots[:filled]
        self._slots = grown


@contextmanager
def listening(model: Any, features: Features, start: int) -> Iterator[None]:
    """Write the features of one pass of transformers' modules, whose first row is slot `start`.

    Raises:
        ModelError: the model has no list of decoder layers to listen at.
    """
    layers = _decoder_layers(model)
    with ExitStack() as hooks:

        def write(tap: int, rows: Any) -> None:
            features.write(tap, start, (rows if isinstance(rows, Tensor) else rows[0])[0])

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            write(0, args[0] if args else kwargs["hidden_states"])

        def after(depth: int) -> Callable[..., None]:
            return lambda module, args, output: write(depth, output)

        def last(module: nn.Module, args: Any, output: Any) -> None:
            write(len(layers) + 1, output[0])

        hooks.callback(layers[0].register_forward_pre_hook(before, with_kwargs=True).remove)
        for depth, layer in enumerate(layers, start=1):
            hooks.callback(layer.register_forward_hook(after(depth)).remove)
        hooks.callback(model.base_model.register_forward_hook(last).remove)
        yield


def _decoder_layers(model: Any) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(
        f"{type(model).__name__} has no list of {count} decoder layers whose features a draft could go by. Choose a "
        'draft that is a model, or draft="ngram".'
    )
