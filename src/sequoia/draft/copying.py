"""Copies in another draft's trees: what followed the same tokens earlier is raised to how often such copies were right.

Answers repeat their prompts and themselves, and there a copy is a better guess than a small draft's. It is not put in
place of the draft's tokens, but into its distributions, so that its children are drawn and verified like all others.

Source of the copies: Saxena 2023, prompt lookup decoding. That they are weighed by their own past is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.model.language_model import TappedCache
from sequoia.speculate.growth import Frontier, Growth, LevelLogits
from sequoia.speculate.session import Draft, FeatureReader, Proposer
from sequoia.speculate.token_tree import TokenTree

SUFFIX = "+ngram"
"""Ends the name of a draft that copies, too."""

_LONGEST = 8  # tokens that are looked up, at most
_PRIOR = 4.0  # copies that a rate counts before any were seen
_HIGHEST = 0.98  # rate


class CopyingDraft:
    """A draft that copies from the context where it repeats, and goes by another elsewhere.

    Args:
        own: the other.
    """

    def __init__(self, own: Draft) -> None:
        self.own = own
        self.model: Any = getattr(own, "model", None)  # of the other, where it is one

    def start(self) -> CopyingProposer:
        own = self.own.start()
        return CopyingReader(own) if isinstance(own, FeatureReader) else CopyingProposer(own)


class CopyingProposer:
    """Another proposer, in whose trees copies are."""

    def __init__(self, own: Proposer) -> None:
        self.own = own
        self._copies = Copies(own.proposable)

    @property
    def proposable(self) -> int:
        """See `Proposer`."""
        return self.own.proposable

    @property
    def context_length(self) -> int | None:
        """See `Proposer`."""
        return self.own.context_length

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        """See `Proposer.propose`."""
        self._copies.read(tokens)
        return self.own.propose(tokens, _CopyingGrowth.of(growth, self._copies))

    def keep(self, path: Sequence[int]) -> None:
        """See `Proposer.keep`."""
        self.own.keep(path)


class CopyingReader(CopyingProposer):
    """A `FeatureReader`."""

    own: Any

    @property
    def taps(self) -> tuple[int, ...]:
        """See `FeatureReader`."""
        taps: tuple[int, ...] = self.own.taps
        return taps

    def follow(self, cache: TappedCache) -> None:
        """See `FeatureReader.follow`."""
        self.own.follow(cache)


class Copy(NamedTuple):
    """A token that may follow once more."""

    token: int
    rate: float  # how often such copies have been right; in (0, 1)


class Copies:
    """What followed runs of tokens, and how often that was right once more.

    Args:
        proposable: token ids from here on are never copied.

    Everything is told by emitted tokens alone, so that drawing and verifying with it stays exact.
    """

    def __init__(self, proposable: int) -> None:
        self._proposable = proposable
        self._followers: dict[tuple[int, ...], int] = {}  # runs of 1 to _LONGEST tokens → what came after the last
        self._tried, self._right = [0] * (_LONGEST + 1), [0] * (_LONGEST + 1)  # by length of the run
        self._recent: list[int] = []
        self._count = 0
        self._tokens: set[int] = set()  # all that can be copied
        self._own: tuple[Tensor, frozenset[int]] | None = None
        self._support: Support | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what is new; copies are judged on what comes after the first call, which has the prompt."""
        judged = self._count > 0
        for end in range(max(1, self._count), len(tokens)):
            recent, follower = tokens[max(0, end - _LONGEST) : end], tokens[end]
            if judged and (found := self._find(recent)):
                length, copy = found
                self._tried[length] += 1
                self._right[length] += copy == follower
            if follower < self._proposable:
                self._tokens.add(follower)
                for start in range(len(recent)):
                    self._followers[tuple(recent[start:])] = follower
        self._count, self._recent = len(tokens), list(tokens[-_LONGEST:])

    def after(self, path: Sequence[int]) -> Copy | None:
        """What followed the longest run that ends with the path, which goes on from the tokens that were read."""
        found = self._find([*self._recent, *path][-_LONGEST:])
        return None if found is None else Copy(found[1], self._rate(found[0]))

    def support(self, own: Tensor) -> Support:
        """The tokens that `own` has, and all that can be copied; made anew only where these are more."""
        if len(own) == self._proposable:
            return Support(own, None)
        if self._own is None or self._own[0] is not own:
            self._own, self._support = (own, frozenset(own.tolist())), None
        others = self._tokens - self._own[1]
        if self._support is None or len(self._support.ids) != len(own) + len(others):
            self._support = Support.of(own, sorted(others))
        return self._support

    def _find(self, recent: Sequence[int]) -> tuple[int, int] | None:
        for start in range(len(recent)):
            follower = self._followers.get(tuple(recent[start:]))
            if follower is not None:
                return len(recent) - start, follower
        return None

    def _rate(self, length: int) -> float:
        """Of copies after runs of this length; longer ones are better from the beginning."""
        right = self._right[length] + _PRIOR * length / (length + 3)
        return min(_HIGHEST, right / (self._tried[length] + _PRIOR))


@dataclass(frozen=True)
class Support:
    """A draft's candidates with others among them."""

    ids: Tensor  # [candidates] increasing
    own: Tensor | None  # [own candidates] which of them are the draft's; None where all are

    @classmethod
    def of(cls, own: Tensor, others: Sequence[int]) -> Support:
        """Args:
        own: [own candidates] increasing.
        """
        ids = torch.unique(torch.cat([own, torch.tensor(others, dtype=own.dtype, device=own.device)]))
        return cls(own, None) if len(ids) == len(own) else cls(ids, torch.searchsorted(ids, own))

    def widen(self, logits: Tensor) -> Tensor:
        """[nodes, own candidates] → [nodes, candidates]"""
        if self.own is None:
            return logits
        wide = logits.new_full((len(logits), len(self.ids)), -torch.inf)
        return wide.index_copy_(1, self.own, logits)


@dataclass(frozen=True)
class _CopyingGrowth(Growth):
    """Another growth, that is given a draft's logits with copies in them."""

    own: Growth
    copies: Copies

    @classmethod
    def of(cls, growth: Growth, copies: Copies) -> _CopyingGrowth:
        same: dict[str, Any] = {field.name: getattr(growth, field.name) for field in fields(Growth)}
        return cls(**same, own=growth, copies=copies)

    def run(self, root: int, support: Tensor, level_logits: LevelLogits) -> TokenTree:
        """See `Growth.run`."""
        wide = self.copies.support(support)

        def with_copies(frontier: Frontier) -> Tensor:
            copies = [self.copies.after(path) for path in frontier.paths()]
            return with_raised(wide.widen(level_logits(frontier)), wide.ids, copies)

        return self.own.run(root, wide.ids, with_copies)


def with_raised(logits: Tensor, ids: Tensor, copies: Sequence[Copy | None]) -> Tensor:
    """Logits of distributions in which each row's copy, where it has one, is at least as probable as its rate.

    Args:
        logits: [rows, candidates].
        ids: [candidates] their token ids, increasing; the copies are among them.
        copies: of each row.
    """
    found = [(row, *copy) for row, copy in enumerate(copies) if copy is not None]
    if not found:
        return logits
    rows, tokens, rates = zip(*found, strict=True)
    places = torch.tensor(rows, device=logits.device)
    columns = torch.searchsorted(ids, torch.tensor(tokens, device=ids.device))
    odds = torch.tensor([math.log(rate / (1 - rate)) for rate in rates], device=logits.device)
    others, own = logits[places].float(), logits[places, columns].float()
    others.scatter_(1, columns[:, None], -torch.inf)
    raised = torch.maximum(own, others.logsumexp(-1) + odds)
    return logits.index_put((places, columns), raised.to(logits.dtype))


def copies_along(prompt: Sequence[int], text: Sequence[int], depth: int, proposable: int) -> list[list[Copy | None]]:
    """What a `CopyingProposer` would copy along a text, had the text been accepted: [starts][depths].

    Args:
        depth: levels of each start, fewer where the text ends.
        proposable: see `Copies`.
    """
    copies, tokens = Copies(proposable), [*prompt, *text]
    found = []
    for start in range(len(text)):
        copies.read(tokens[: len(prompt) + start])
        found.append([copies.after(text[start:end]) for end in range(start, min(start + depth, len(text)))])
    return found


def without_copies(draft: Any) -> tuple[Any, bool]:
    """A draft as `sequoia.load` takes it, its ending "+ngram" taken off, and whether it had one.

    Raises:
        UsageError: what is left cannot have it.
    """
    name = str(draft) if isinstance(draft, (str, PathLike)) else ""
    if not name.endswith(SUFFIX):
        return draft, False
    own = name.removesuffix(SUFFIX)
    if own in ("", "auto", "ngram"):
        raise UsageError(f'{SUFFIX} goes with a model, a head or self:int4, not with "{own}". Leave it out.')
    return own, True
