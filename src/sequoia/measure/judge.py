"""Rates along texts: the target's and the draft's distributions put together at each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.measure.node_rates import NodeRates, drawn_rates, matched_rates
from sequoia.measure.renewal import TextRates
from sequoia.measure.rolling import DraftNodes, Reach, draft_nodes
from sequoia.measure.texts import Text, text_logits
from sequoia.model.language_model import LanguageModel
from sequoia.params import SamplingParams
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Candidates, Draws, Generator, Noise, Purpose
from sequoia.speculate.session import Draft
from sequoia.speculate.verify import GREEDY, Verifier

_ROWS = 512  # of one pass over texts of a prompt
_ELEMENTS = 2**22  # of the distributions that are judged together
_AFTER_WRITING = 1  # round of the noise; the text itself was drawn in round 0


@dataclass(frozen=True)
class Judge:
    """A pair, and the parameters and verifier that it is judged under.

    Raises:
        UsageError: the verifier draws children with replacement; what a rank is worth then depends on how many follow.
    """

    target: LanguageModel
    draft: Draft
    params: SamplingParams
    asked: Verifier
    reach: Reach

    def __post_init__(self) -> None:
        if self.verifier.draws is Draws.WITH_REPLACEMENT:
            raise UsageError(
                f"rates are measured for the verifiers sequoia and sampler_match, not {self.verifier.name}. Choose one."
            )

    @property
    def verifier(self) -> Verifier:
        """As a session takes it."""
        return GREEDY if self.params.temperature == 0 else self.asked

    @torch.inference_mode()
    def rates(self, texts: Sequence[Text]) -> Iterator[tuple[Text, TextRates]]:
        """Of texts of one prompt."""
        together = max(1, _ROWS // self.params.max_tokens)
        for start in range(0, len(texts), together):
            part = texts[start : start + together]
            for text, probs in zip(part, self._target_probs(part), strict=True):
                yield text, self._along(text, probs)

    def _target_probs(self, texts: Sequence[Text]) -> Iterator[Tensor | None]:
        """For each text [tokens, vocab] of the target; None where the text itself says it all."""
        if self.params.temperature == 0:
            yield from (None for _ in texts)
            return
        prompt = texts[0].ask.prompt
        for text, logits in zip(texts, text_logits(self.target, prompt, [t.tokens for t in texts]), strict=True):
            processors = Processors(self.params, prompt, self.target.vocab_size, self.target.device)
            paths = [text.tokens[:length] for length in range(len(text.tokens))] if processors.read_paths else []
            yield processors.probs(processors.scores(logits, paths))

    def _along(self, text: Text, target_probs: Tensor | None) -> TextRates:
        nodes = draft_nodes(self.target, self.draft, self.params, text, self.verifier.draws, self.reach)
        device, size = nodes.candidates.probs.device, (len(text.tokens), self.reach.depth, self.reach.ranks)
        generator = Noise(self.params.seed, text.ask.request, device).generator(_AFTER_WRITING, Purpose.DRAFT)
        tokens = torch.tensor(text.tokens, device=device)
        columns = None if target_probs is None else target_probs[:, nodes.candidates.tokens.to(target_probs.device)]
        found = [NodeRates.none(self.reach.ranks)]
        for rows in _pieces(len(nodes), len(nodes.candidates.tokens)):
            places = (nodes.starts[rows] + nodes.depths[rows]).to(device)
            target = None if columns is None else columns.to(device)[places]
            found.append(self._at(nodes.rows(rows), tokens[places], target, generator))
        given, marginal = (torch.cat([getattr(part, name).cpu() for part in found]) for name in ("given", "marginal"))
        return TextRates(_spread(nodes, given, size), _spread(nodes, marginal, size))

    def _at(self, candidates: Candidates, tokens: Tensor, target: Tensor | None, generator: Generator) -> NodeRates:
        """At nodes whose next tokens are `tokens`; `target` [nodes, columns] are the target's probabilities there."""
        if target is None or self.verifier.draws is Draws.TOP_K:
            return matched_rates(candidates, tokens, target, self.reach.ranks)
        return drawn_rates(candidates, tokens, target, self.reach.ranks, generator)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    """Of nodes that are judged together; bounds the memory."""
    together = max(1, _ELEMENTS // columns)
    for start in range(0, rows, together):
        yield slice(start, start + together)


def _spread(nodes: DraftNodes, values: Tensor, size: tuple[int, int, int]) -> NDArray[np.float32]:
    """[nodes, ranks] → [starts, depths, ranks]"""
    spread, found = np.zeros(size, dtype=np.float32), values.float().numpy()
    if nodes.drifts:
        spread[nodes.starts.numpy(), nodes.depths.numpy()] = found
        return spread
    for depth in range(min(size[1], len(found))):
        spread[: len(found) - depth, depth] = found[depth:]
    return spread
