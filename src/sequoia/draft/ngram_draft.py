"""A draft without a model: what followed the longest suffixes seen before in the prompt and the output.

A distribution, not a guess: counts of every order are interpolated (Witten and Bell's weights), so its children are
drawn and verified exactly like a model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sequoia.speculate.token_tree import Growth, TokenTree

_LONGEST_SUFFIX = 6


class NgramDraft:
    """A draft that copies from the context.

    Args:
        vocab_size: the target's rows.
        proposable: token ids from here on are padding and never proposed.
        longest_suffix: tokens of context looked up, at most.
    """

    def __init__(self, vocab_size: int, proposable: int, longest_suffix: int = _LONGEST_SUFFIX) -> None:
        self.vocab_size = vocab_size
        self.proposable = proposable
        self.longest_suffix = longest_suffix

    def start(self) -> NgramProposer:
        return NgramProposer(self)


class NgramProposer:
    """Invariant: the counts cover every n-gram of a prefix of the tokens."""

    context_length: int | None = None

    def __init__(self, draft: NgramDraft) -> None:
        self.proposable = draft.proposable
        self._vocab_size = draft.vocab_size
        self._longest = draft.longest_suffix
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # suffix of 1 … longest tokens → follower counts
        self._unigrams = torch.zeros(draft.proposable)
        self._counted = 0

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """See `Proposer.propose`."""
        self._count(tokens)
        layout, recent = growth.layout, list(tokens[-self._longest :])

        def level_logits(depth: int, tree_tokens: Tensor) -> Tensor:
            values = tree_tokens.tolist()
            paths = [[values[node] for node in layout.shape.paths[inner]] for inner in layout.levels[depth]]
            return torch.stack([self._probs(recent + path) for path in paths]).log_().to(layout.device)

        return growth.run(tokens[-1], level_logits, self._vocab_size)

    def keep(self, path: Sequence[int]) -> None:
        """Nothing to forget: only emitted tokens are ever counted."""

    def _count(self, tokens: Sequence[int]) -> None:
        for end in range(self._counted, len(tokens)):
            follower = tokens[end]
            if follower >= self.proposable:
                continue
            self._unigrams[follower] += 1
            for length in range(1, min(self._longest, end) + 1):
                counts = self._followers.setdefault(tuple(tokens[end - length : end]), {})
                counts[follower] = counts.get(follower, 0) + 1
        self._counted = len(tokens)

    def _probs(self, context: list[int]) -> Tensor:
        """[proposable] distribution after `context`: each order passes T/(C + T) of its mass on to the next shorter
        one, where C counts its followers and T how many of them differ."""
        left, found = 1.0, dict[int, float]()
        for length in range(min(self._longest, len(context)), 0, -1):
            counts = self._followers.get(tuple(context[-length:]))
            if counts is None:
                continue
            total = sum(counts.values()) + len(counts)
            for token, count in counts.items():
                found[token] = found.get(token, 0.0) + left * count / total
            left *= len(counts) / total
        seen = self._unigrams.sum()
        probs = self._unigrams * (left / seen) if seen > 0 else torch.full_like(self._unigrams, left / self.proposable)
        if found:
            probs[list(found)] += torch.tensor(list(found.values()))
        return probs
