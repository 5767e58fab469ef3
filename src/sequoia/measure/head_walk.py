"""A head walked along a text from all starts at once: one pass for each depth, not one for each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sequoia.draft.head_draft import read_text
from sequoia.draft.head_model import HeadModel
from sequoia.measure.texts import Text
from sequoia.model.language_model import Block, TappedCache
from sequoia.speculate.processors import Processors

GoesOn = Callable[[Tensor, Tensor], Tensor]
"""(scores [nodes, candidates], tokens [nodes] that the text goes on with) → [nodes] whether rounds can come there."""


class WalkedLevel(NamedTuple):
    """Nodes of one depth."""

    starts: Tensor  # [nodes]
    scores: Tensor  # [nodes, candidates] processed logits


class Added(NamedTuple):
    """What is added to a head's distributions."""

    ids: Tensor  # [candidates] token ids, increasing, the head's own among them
    to: Callable[[Tensor, Tensor, int], Tensor]  # (head's logits, starts [nodes], depth) → [nodes, candidates]


def walked_levels(
    model: HeadModel,
    text: Text,
    cache: TappedCache,
    processors: Processors,
    depth: int,
    goes_on: GoesOn,
    added: Added | None,
) -> Iterator[WalkedLevel]:
    """The levels that rounds come to, from the root's down, `depth` at most; starts are those after the first round.

    Slots of the head's cache are the rows of the text's true features, then those of each level. A node's row sees the
    true ones up to its root's, and of each level above the one of its own start.

    Args:
        cache: the target's, which has read the text.
    """
    prompt, count, own = len(text.ask.prompt), len(text.tokens), model.new_cache()
    ids, starts = torch.tensor(text.tokens, device=model.device), torch.arange(1, count, device=model.device)
    if not len(starts) or not depth:
        return
    outputs = read_text(model, [*text.ask.prompt, *text.tokens[:-1]], cache, own)[prompt - 1 :]
    true = torch.arange(own.length, device=model.device)
    positions, owners = true, torch.zeros_like(true)
    for level in range(depth):
        paths = [text.tokens[: start + level] for start in starts.tolist()] if processors.read_paths else []
        logits, support = model.logits(outputs), model.support
        if added is not None:
            logits, support = added.to(logits, starts, level), added.ids
        scores = processors.scores(logits, paths, support, model="draft")
        yield WalkedLevel(starts, scores)
        alive = goes_on(scores, ids[starts + level]) & (starts + level + 1 < count)
        starts, outputs = starts[alive], outputs[alive]
        if not len(starts) or level + 1 == depth:
            return
        roots = prompt - 2 + starts[:, None]  # the roots' own rows
        positions = torch.cat([positions, roots[:, 0] + level + 1])
        owners = torch.cat([owners, starts])
        visible = owners == starts[:, None]
        visible[:, : len(true)] = true <= roots
        outputs = model.forward(outputs, ids[starts + level], own, Block(positions, visible))
