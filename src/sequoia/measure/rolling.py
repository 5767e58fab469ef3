"""A draft walked along a text instead of drawing: what it thinks at the nodes that lie on the text.

A node is the pair (start, depth): the round's root is the token before text token `start`, and `depth` text tokens were
accepted since. What comes next there is text token start + depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from sequoia.draft.copying import Copy, CopyingDraft, Support, copies_along, with_raised
from sequoia.draft.head_draft import HeadDraft
from sequoia.draft.model_draft import ModelDraft
from sequoia.measure.head_walk import Added, walked_levels
from sequoia.measure.texts import Text, text_logits
from sequoia.model.language_model import LanguageModel, TappedCache, TappedModel, read_ahead
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Frontier, Growth, LevelLogits
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Candidates, Draws, Noise, Purpose
from sequoia.speculate.session import Draft, FeatureReader
from sequoia.speculate.token_tree import TokenTree, layout_of
from sequoia.tree.shape import TreeShape


@dataclass(frozen=True)
class DraftNodes:
    """A draft's distributions at nodes along one text."""

    starts: Tensor  # [nodes]
    depths: Tensor  # [nodes]
    candidates: Candidates  # [nodes, columns] over all tokens that the draft proposes anywhere; scores -inf elsewhere
    drifts: bool  # whether a node depends on its start; if not, there are nodes of depth 0 only

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, rows: slice) -> Candidates:
        """The candidates of some nodes."""
        every = self.candidates
        return Candidates(every.tokens, every.scores[rows], every.probs[rows], every.proposable)


@dataclass(frozen=True)
class Reach:
    """How far into a tree rates are wanted."""

    depth: int  # levels
    ranks: int  # children of a node


@torch.inference_mode()
def draft_nodes(
    target: LanguageModel, draft: Draft, params: SamplingParams, text: Text, draws: Draws, reach: Reach
) -> DraftNodes:
    """The draft's distributions along a text, at the nodes that rounds can come to.

    An independent model thinks the same at a place whatever the root was, so that one pass tells all. Any other draft
    is rolled: from each start its own proposer goes on along the text, so that what it loses on the way shows. There,
    nodes behind a text token that no child can hold are left out. A head is rolled from all starts at once.

    A draft that goes by the target's features proposes nothing in the first round, so it has no nodes there.

    Copies in an independent model's distributions are taken as if each node was a root: a tree that the text has not
    reached yet knows a few tokens less to copy from.
    """
    own, copies = draft, None
    if isinstance(draft, CopyingDraft):
        own, copies = draft.own, _Copied.of(text, reach.depth, draft.start().proposable)
    if isinstance(own, ModelDraft):
        return _passed(target, own, params, text, copies)
    if isinstance(own, HeadDraft):
        return _rolled_at_once(target, own, params, text, draws, reach, copies)
    walks = _rolled(target, draft, params, text, draws, reach)
    nodes = [(start, depth) for start, levels in walks.items() for depth in range(len(levels.scores))]
    starts, depths = torch.tensor(nodes, dtype=torch.long).reshape(-1, 2).unbind(1)
    return DraftNodes(starts, depths, _joined(list(walks.values())), drifts=True)


@dataclass(frozen=True)
class _Copied:
    """Copies along a text."""

    found: list[list[Copy | None]]  # [starts][depths]

    @classmethod
    def of(cls, text: Text, depth: int, proposable: int) -> _Copied:
        return cls(copies_along(text.ask.prompt, text.tokens, depth, proposable))

    def added(self, support: Tensor) -> Added:
        """To the distributions of a draft with these candidates."""
        tokens = {copy.token for copies in self.found for copy in copies if copy is not None}
        wide = Support.of(support, sorted(tokens))

        def to(logits: Tensor, starts: Tensor, depth: int) -> Tensor:
            return with_raised(wide.widen(logits), wide.ids, [self.found[start][depth] for start in starts.tolist()])

        return Added(wide.ids, to)


def _passed(
    target: LanguageModel, draft: ModelDraft, params: SamplingParams, text: Text, copies: _Copied | None
) -> DraftNodes:
    """One pass of the draft over the text, up to the end of its own context."""
    prompt, context, device = text.ask.prompt, draft.model.context_length, draft.model.device
    count = len(text.tokens) if context is None else max(0, min(len(text.tokens), context + 1 - len(prompt)))
    support = torch.arange(draft.proposable, device=device)
    logits = torch.zeros(0, draft.proposable, device=device)
    if count:
        logits = text_logits(draft.model, prompt, [text.tokens[:count]])[0][:, : draft.proposable]
        if copies is not None:
            logits = copies.added(support).to(logits, torch.arange(count), 0)
    processors = Processors(params, prompt, target.vocab_size, device)
    paths = [text.tokens[:start] for start in range(count)] if processors.read_paths else []
    scores = processors.scores(logits, paths, support, model="draft")
    candidates = Candidates(support, scores, processors.probs(scores), draft.proposable)
    return DraftNodes(torch.arange(count), torch.zeros(count, dtype=torch.long), candidates, drifts=False)


def _rolled(
    target: LanguageModel, draft: Draft, params: SamplingParams, text: Text, draws: Draws, reach: Reach
) -> dict[int, Candidates]:
    """For each start the draft's candidates, a row for each level that can be reached."""
    proposer, tokens, device = draft.start(), list(text.ask.prompt), target.device
    processors = Processors(params, text.ask.prompt, target.vocab_size, device)
    noise = Noise(0, 0, device).generator(0, Purpose.DRAFT)  # nothing is drawn here, but a draft may for itself
    walks: dict[int, Candidates] = {}
    for start, token in enumerate(text.tokens):
        if start == 1 and isinstance(proposer, FeatureReader):
            proposer.follow(_features(target, proposer.taps, text))
        levels = min(reach.depth, len(text.tokens) - start)
        if proposer.context_length is not None:
            levels = min(levels, proposer.context_length + 1 - len(tokens))
        if levels > 0:
            ahead = text.tokens[start : start + levels]
            chain = TreeShape.chain(levels)
            walk = _Walk(chain, processors, draws, proposer.proposable, noise, device, ahead, reach.ranks)
            proposer.propose(tokens, walk)
            proposer.keep(())
            if walk.found:
                walks[start] = walk.found[0]
        processors.observe([token])
        tokens.append(token)
    return walks


@dataclass(frozen=True)
class _Walk(Growth):
    """A growth whose only node on each level is the text's token, whatever the draft would draw.

    It ends behind a token that the draft cannot have proposed: no round passes there.
    """

    text: Sequence[int] = ()  # what follows the root, a token for each level
    ranks: int = 1
    found: list[Candidates] = field(default_factory=list)

    def run(self, root: int, support: Tensor, level_logits: LevelLogits) -> TokenTree:
        """See `Growth.run`."""
        assert isinstance(self.tree, TreeShape)
        layout = layout_of(self.tree, self.device)
        tokens = torch.tensor([root, *self.text], device=self.device)
        columns, scores = _columns(support, tokens[1:]), list[Tensor]()
        for depth, (level, column) in enumerate(zip(layout.levels, columns, strict=True)):
            paths, block = partial(layout.paths, level.nodes, tokens), partial(layout.level_block, depth)
            frontier = Frontier(depth, tokens[depth : depth + 1], paths, block, level.parents)
            scores.append(self._scores(frontier, support, level_logits))
            if column is None or not _may_hold(scores[-1], [column], self.draws, self.ranks).item():
                break
        rows = torch.cat(scores)
        self.found.append(Candidates(support, rows, self.processors.probs(rows), self.proposable))
        grown = layout_of(TreeShape.chain(len(rows)), self.device)
        return TokenTree(grown, tokens[: len(rows) + 1], support, self.found[0].probs, grown.row, self.proposable)


def _rolled_at_once(
    target: LanguageModel,
    draft: HeadDraft,
    params: SamplingParams,
    text: Text,
    draws: Draws,
    reach: Reach,
    copies: _Copied | None,
) -> DraftNodes:
    """As `_rolled`, from all starts at once."""
    added = None if copies is None else copies.added(draft.model.support)
    support = draft.model.support if added is None else added.ids
    processors = Processors(params, text.ask.prompt, target.vocab_size, draft.model.device)

    def goes_on(scores: Tensor, tokens: Tensor) -> Tensor:
        columns = _columns(support, tokens)
        known = torch.tensor([column is not None for column in columns], device=scores.device)
        return known & _may_hold(scores, [column or 0 for column in columns], draws, reach.ranks)

    cache = _features(target, draft.model.taps, text)
    levels = list(walked_levels(draft.model, text, cache, processors, reach.depth, goes_on, added))
    scores = torch.cat([torch.zeros(0, len(support), device=support.device), *(level.scores for level in levels)])
    starts = torch.cat([torch.zeros(0, dtype=torch.long), *(level.starts.cpu() for level in levels)])
    depths = torch.tensor([depth for depth, level in enumerate(levels) for _ in level.starts], dtype=torch.long)
    candidates = Candidates(support, scores, processors.probs(scores), draft.proposable)
    return DraftNodes(starts, depths, candidates, drifts=True)


def _features(target: LanguageModel, taps: Sequence[int], text: Text) -> TappedCache:
    """The target's cache once it has read the text but its last token."""
    tokens = [*text.ask.prompt, *text.tokens[:-1]]
    cache = cast(TappedModel, target).new_cache(taps)
    target.forward(read_ahead(target, tokens, cache), cache, last=1)
    return cache


def _may_hold(scores: Tensor, columns: Sequence[int] | Tensor, draws: Draws, ranks: int) -> Tensor:
    """[nodes] whether some child can be the token of a column. scores [nodes, candidates], columns [nodes]"""
    own = scores[range(len(scores)), columns][:, None]
    return (scores > own).sum(1) < ranks if draws is Draws.TOP_K else own[:, 0] > -torch.inf


def _columns(support: Tensor, tokens: Tensor) -> list[int | None]:
    """Where each token stands in the support; None for one that does not."""
    columns = torch.searchsorted(support, tokens).clamp_(max=len(support) - 1)
    inside = (support[columns] == tokens).tolist()
    return [column if within else None for column, within in zip(columns.tolist(), inside, strict=True)]


def _joined(walks: Sequence[Candidates]) -> Candidates:
    """Candidates over the columns of all."""
    if not walks:
        return Candidates(torch.zeros(1, dtype=torch.long), torch.zeros(0, 1), torch.zeros(0, 1), 1)
    tokens = torch.unique(torch.cat([walk.tokens for walk in walks]))
    count = sum(len(walk.scores) for walk in walks)
    scores, start = walks[0].scores.new_full((count, len(tokens)), -torch.inf), 0
    probs = torch.zeros_like(scores)
    for walk in walks:
        rows, columns = slice(start, start + len(walk.scores)), torch.searchsorted(tokens, walk.tokens)
        scores[rows, columns], probs[rows, columns] = walk.scores, walk.probs
        start = rows.stop
    return Candidates(tokens, scores, probs, walks[0].proposable)
