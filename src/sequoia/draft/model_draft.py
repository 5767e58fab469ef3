"""An independent smaller model of the same vocabulary, grown level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sequoia.model.language_model import LanguageModel, read_ahead
from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.token_tree import TokenTree


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
