"""An independent smaller model of the same vocabulary, grown level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.model.language_model import LanguageModel, read_ahead
from sequoia.model.lean.int8 import has_kernels
from sequoia.model.placement import INT4, INT8, Numbers
from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.token_tree import TokenTree

OWN_WEIGHTS = {f"self:{INT4}": 4, f"self:{INT8}": 8}
"""Drafts that are the target's own weights in integers, with the bits of each."""


class ModelDraft:
    """A draft that is a model.

    Args:
        model: the draft model.
        proposable: token ids from here on differ between the models or are padding, and are never proposed.
    """

    def __init__(self, model: LanguageModel, proposable: int) -> None:
        self.model = model
        self.proposable = proposable

    def start(self) -> ModelProposer:
        return ModelProposer(self)


class ModelProposer:
    """Invariant between rounds: the cache holds a prefix of the tokens, possibly shorter than all but the last."""

    def __init__(self, draft: ModelDraft) -> None:
        self.proposable = draft.proposable
        self.context_length = draft.model.context_length
        self.cache = draft.model.new_cache()
        self._model = draft.model
        self._support = torch.arange(draft.proposable, device=draft.model.device)
        self._row: Mapping[int, int] = {}
        self._root = 0

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """See `Proposer.propose`: one pass to catch up, which covers the root, and one for each further level."""
        self._root = len(tokens) - 1

        def level_logits(frontier: Frontier) -> Tensor:
            if frontier.depth == 0:
                logits = self._catch_up(tokens)
            else:
                logits = self._model.forward(frontier.tokens, self.cache, frontier.block(self._root))
            return logits[:, : self.proposable]

        tree = growth.run(tokens[-1], self._support, level_logits)
        self._row = tree.row
        return tree

    def keep(self, path: Sequence[int]) -> None:
        """See `Proposer.keep`; a leaf was never passed through the draft and is caught up on next time."""
        if self.cache.length > self._root:
            rows = [self._row[node] for node in (0, *path) if node in self._row]
            self.cache.keep(self._root, [self._root + row for row in rows])

    def _catch_up(self, tokens: Sequence[int]) -> Tensor:
        """[1, vocab] logits at the last of `tokens`."""
        self.cache.truncate(min(self.cache.length, self._root))  # a round that was interrupted leaves its guesses
        return self._model.forward(read_ahead(self._model, tokens, self.cache), self.cache, last=1)


def draft_numbers(
    draft: Any, asked: str | torch.dtype, target: str | torch.dtype, device: torch.device
) -> str | torch.dtype | Numbers:
    """The number formats of a draft: those asked for, or the fastest, since no draft changes what the target says.

    Args:
        draft, asked, target: `draft`, `draft_dtype` and `dtype` as `sequoia.load` takes them.

    Raises:
        UsageError: int8 or int4 is asked for what cannot be quantised here.
    """
    is_loaded_here = isinstance(draft, (str, PathLike)) and draft != "ngram"
    if asked in (INT8, INT4, torch.int8) and not is_loaded_here:
        what = "no model" if isinstance(draft, str) else "an object, which is left whole"
        name = str(asked).removeprefix("torch.")
        raise UsageError(
            f"draft_dtype is {name}, which only a draft given by name or path can have, and this one is {what}. Leave "
            'draft_dtype "auto".'
        )
    if asked != "auto":
        return asked
    if is_loaded_here:
        return INT8 if device.type == "cpu" and has_kernels() else target
    return "auto" if target in (INT8, INT4, torch.int8) else target


def bits_of_own_weights(draft: Any, asked: str | torch.dtype) -> int | None:
    """Those of a draft that is the target's own weights in integers; None for any other draft.

    Args:
        draft, asked: `draft` and `draft_dtype` as `sequoia.load` takes them.

    Raises:
        UsageError: there are no such integers, or another format is asked for.
    """
    if not isinstance(draft, str) or draft.partition(":")[0] != "self":
        return None
    if draft not in OWN_WEIGHTS:
        raise UsageError(f"a draft of the target's own weights is {' or '.join(OWN_WEIGHTS)}, not {draft!r}.")
    if asked != "auto":
        raise UsageError(f'{draft} names its own number format, and draft_dtype is {asked}. Leave draft_dtype "auto".')
    return OWN_WEIGHTS[draft]
