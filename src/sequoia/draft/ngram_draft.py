"""A draft without a model: what followed the longest suffixes seen before in the prompt and the output.

A distribution, not a guess: counts of every order are interpolated (Witten and Bell's weights), so its children are
drawn and verified exactly like a model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.token_tree import TokenTree

_LONGEST_SUFFIX = 6


class NgramDraft:
    """A draft that copies from the context.

    Args:
        proposable: token ids from here on are padding and never proposed.
        longest_suffix: tokens of context looked up, at most.
    """

    def __init__(self, proposable: int, longest_suffix: int = _LONGEST_SUFFIX) -> None:
        self.proposable = proposable
        self.longest_suffix = longest_suffix

    def start(self) -> NgramProposer:
        return NgramProposer(self)


class NgramProposer:
    """Invariant: the counts cover every n-gram of a prefix of the tokens."""

    context_length: int | None = None

    def __init__(self, draft: NgramDraft) -> None:
        self.proposable = draft.proposable
        self._longest = draft.longest_suffix
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # suffix of 0 … longest tokens → follower counts
        self._counted = 0

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """See `Proposer.propose`."""
        self._count(tokens)
        recent = list(tokens[-self._longest :])
        support = np.array(sorted(self._followers.get((), {0: 0})))

        columns = {token: column for column, token in enumerate(support.tolist())}
        counts = self._followers.get((), {})
        unigrams = np.array([counts.get(token, 1) for token in columns], dtype=np.float32)
        unigrams /= unigrams.sum()

        def level_logits(frontier: Frontier) -> Tensor:
            probs = np.stack([self._probs(recent + path, unigrams, columns) for path in frontier.paths()])
            return torch.from_numpy(np.log(probs)).to(growth.device)

        return growth.run(tokens[-1], torch.from_numpy(support).to(growth.device), level_logits)

    def keep(self, path: Sequence[int]) -> None:
        """Nothing to forget: only emitted tokens are ever counted."""

    def _probs(
        self, context: Sequence[int], unigrams: NDArray[np.float32], columns: Mapping[int, int]
    ) -> NDArray[np.float32]:
        """[support] distribution after `context`.

        Each order passes T/(C + T) of its mass on to the next shorter one, where C counts its followers and T how many
        of them differ; the unigrams keep the rest.
        """
        found, left = dict[int, float](), 1.0
        for length in range(min(self._longest, len(context)), 0, -1):
            counts = self._followers.get(tuple(context[-length:]))
            if counts is None:
                continue
            total = sum(counts.values()) + len(counts)
            for token, count in counts.items():
                found[columns[token]] = found.get(columns[token], 0.0) + left * count / total
            left *= len(counts) / total
        probs = unigrams * np.float32(left)
        probs[list(found)] += np.fromiter(found.values(), np.float32, len(found))
        return probs

    def _count(self, tokens: Sequence[int]) -> None:
        for end in range(self._counted, len(tokens)):
            follower = tokens[end]
            if follower >= self.proposable:
                continue
            for length in range(min(self._longest, end) + 1):
                counts = self._followers.setdefault(tuple(tokens[end - length : end]), {})
                counts[follower] = counts.get(follower, 0) + 1
        self._counted = len(tokens)
