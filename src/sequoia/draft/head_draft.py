"""A trained head as draft: it reads what the target's layers made of the text, and grows trees on its own outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sequoia.draft.head_model import HeadModel
from sequoia.model.language_model import TappedCache
from sequoia.model.lean.cache import LeanCache
from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.token_tree import TokenTree

_ROWS = 512  # of one pass over a long prompt; bounds the mask's memory


class HeadDraft:
    """A draft that is a head.

    Args:
        model: the head at its target.
        proposable: token ids from here on are padding, and are never proposed.
    """

    def __init__(self, model: HeadModel, proposable: int) -> None:
        self.model = model
        self.proposable = proposable

    def start(self) -> HeadProposer:
        return HeadProposer(self)


class HeadProposer:
    """A `FeatureReader`.

    Invariant between rounds: slot t of the cache comes from the target's own features of token t and from token t + 1,
    for a prefix of all tokens but the last.
    """

    context_length: int | None = None

    def __init__(self, draft: HeadDraft) -> None:
        self.proposable = draft.proposable
        self.taps = draft.model.taps
        self.cache = draft.model.new_cache()
        self._model = draft.model
        self._target_cache: TappedCache | None = None
        self._root = 0

    def follow(self, cache: TappedCache) -> None:
        """See `FeatureReader.follow`."""
        self._target_cache = cache

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """See `Proposer.propose`: one pass to catch up, which covers the root, and one for each further level.

        Nothing is proposed while the target has not read all tokens but the last, or where these are none.
        """
        self._root = len(tokens) - 1
        if self._root == 0 or self._target_cache is None or self._target_cache.length < self._root:
            return growth.nothing(tokens[-1])
        outputs = torch.empty(0)

        def level_logits(frontier: Frontier) -> Tensor:
            nonlocal outputs
            if frontier.depth == 0:
                outputs = self._catch_up(tokens)
            else:
                block = frontier.block(self._root - 1)  # the root's row is that of the token before it
                outputs = self._model.forward(outputs[frontier.parents], frontier.tokens, self.cache, block)
            return self._model.logits(outputs)

        return growth.run(tokens[-1], self._model.support, level_logits)

    def keep(self, path: Sequence[int]) -> None:
        """See `Proposer.keep`; what followed the root is forgotten, since the target has true features of it now."""
        self.cache.truncate(min(self.cache.length, self._root))

    def _catch_up(self, tokens: Sequence[int]) -> Tensor:
        """[1, size] output of the root's row."""
        assert self._target_cache is not None
        # A round that was interrupted leaves its guesses; and the root's row is run again where it is not new.
        self.cache.truncate(min(self.cache.length, self._root - 1))
        return read_text(self._model, tokens, self._target_cache, self.cache)[-1:]


def read_text(model: HeadModel, tokens: Sequence[int], target_cache: TappedCache, cache: LeanCache) -> Tensor:
    """Bring the head's cache up to the row of the last of `tokens`, on the target's features of those before.

    Returns:
        [rows, size] outputs of the rows that were missing.
    """
    start, end = cache.length, len(tokens) - 1
    following = torch.tensor(tokens[start + 1 :], device=model.device)
    features = torch.split(target_cache.features.read(start, end), _ROWS)
    pairs = zip(features, torch.split(following, _ROWS), strict=True)
    outputs = [model.forward(model.fused(rows), part, cache) for rows, part in pairs]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
