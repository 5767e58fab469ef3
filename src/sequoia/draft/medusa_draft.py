"""Medusa heads as draft: per depth one distribution, drawn from and verified as any other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sequoia.draft.medusa_model import MedusaModel
from sequoia.model.language_model import TappedCache
from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.token_tree import TokenTree


class MedusaDraft:
    """A draft that is a set of Medusa heads.

    Args:
        model: the heads at their target.
        proposable: token ids from here on are padding, and are never proposed.
    """

    def __init__(self, model: MedusaModel, proposable: int) -> None:
        self.model = model
        self.proposable = proposable

    def start(self) -> MedusaProposer:
        return MedusaProposer(self)


class MedusaProposer:
    """A `FeatureReader` that keeps nothing of its own."""

    context_length: int | None = None

    def __init__(self, draft: MedusaDraft) -> None:
        self.proposable = draft.proposable
        self.taps = draft.model.taps
        self._model = draft.model
        self._target_cache: TappedCache | None = None

    def follow(self, cache: TappedCache) -> None:
        """See `FeatureReader.follow`."""
        self._target_cache = cache

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """See `Proposer.propose`; nothing, while the target has not read all tokens but the last."""
        root = len(tokens) - 1
        if root == 0 or self._target_cache is None or self._target_cache.length < root:
            return growth.nothing(tokens[-1])
        feature = self._target_cache.features.read(root - 1, root)[:, 0]

        def level_logits(frontier: Frontier) -> Tensor:
            return self._model.logits(feature, frontier.depth).expand(len(frontier.tokens), -1)

        return growth.run(tokens[-1], self._model.support, level_logits)

    def keep(self, path: Sequence[int]) -> None:
        """Nothing to forget."""
