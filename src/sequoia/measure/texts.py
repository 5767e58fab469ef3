"""The target's own texts: written many at once, and read again in one pass.

Texts share one cache. Each row sees the slots of its own text only, so that a text is what it would be alone; texts of
one prompt share the prompt's slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.model.language_model import Block, LanguageModel, read_ahead
from sequoia.params import SamplingParams
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Noise, Purpose, invert, uniform

_TOGETHER = 32  # texts written at once; with more a pass takes longer for each, as every row's mask covers all slots
_SLOTS = 8192  # of the cache that they share
_ROWS = 512  # of one pass over a prompt; bounds the mask's memory


@dataclass(frozen=True)
class Ask:
    """A text that is wanted: the `repeat`-th from its prompt. Its noise depends on nothing else but the seed."""

    prompt: tuple[int, ...]
    repeat: int = 0

    @property
    def request(self) -> int:
        """A number of its own under any seed, see `Noise`."""
        digest = hashlib.sha256(repr((self.prompt, self.repeat)).encode()).digest()
        return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class Text:
    """What the target wrote; ends with the end-of-text token, or at the length limit."""

    ask: Ask
    tokens: tuple[int, ...]


def plan_asks(prompts: Sequence[Sequence[int]], samples: int, temperature: float) -> list[Ask]:
    """`samples` texts, each prompt as often as the others, give or take one; the first prompts where there are more.

    At temperature 0 a prompt has one text only, so there may be fewer.
    """
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    if temperature == 0:
        samples = min(samples, len(distinct))
    shares = [samples // len(distinct) + (index < samples % len(distinct)) for index in range(len(distinct))]
    return [Ask(prompt, repeat) for prompt, share in zip(distinct, shares, strict=True) for repeat in range(share)]


def batches(
    asks: Sequence[Ask], tokens: int, together: int = _TOGETHER, slots: int | None = None
) -> Iterator[list[Ask]]:
    """Runs of asks to be written at once, bounded by their number and by the slots that they take; `slots` are those
    that memory is planned for, where it is."""
    most = _SLOTS if slots is None else min(slots, _SLOTS)
    batch: list[Ask] = []
    taken = 0
    for ask in asks:
        own = tokens if batch and batch[-1].prompt == ask.prompt else tokens + len(ask.prompt)
        if batch and (len(batch) == together or taken + own > most):
            yield batch
            batch, taken, own = [], 0, tokens + len(ask.prompt)
        batch.append(ask)
        taken += own
    if batch:
        yield batch


@torch.inference_mode()
def write_texts(
    target: LanguageModel, params: SamplingParams, asks: Sequence[Ask], eos_ids: frozenset[int] = frozenset()
) -> Iterator[Text]:
    """Write the texts side by side, and yield each as it ends; those of one prompt stand next to each other.

    Args:
        params: `max_tokens` and `ignore_eos` say when a text ends, `seed` repeats it; None draws fresh noise.

    Raises:
        UsageError: a prompt is empty or too long for the target's context.
        ModelError: the target's logits are no distribution.
    """
    if not asks:
        return
    shared = _SharedCache(target, len(asks))
    live = [_Writer(index, ask, target, params, eos_ids) for index, ask in enumerate(asks)]
    logits = _read_prompts(shared, asks)
    while live:
        probs = torch.cat([writer.probs(row) for writer, row in zip(live, logits, strict=True)])
        drawn = invert(probs, torch.cat([writer.coin() for writer in live]))[:, 0]
        for writer, token in zip(live, drawn.tolist(), strict=True):
            writer.add(token)
        going_on = torch.tensor([not writer.is_done for writer in live])
        yield from (Text(writer.ask, tuple(writer.tokens)) for writer in live if writer.is_done)
        live = [writer for writer in live if not writer.is_done]
        if live:
            logits = shared.go_on([writer.index for writer in live], drawn[going_on.to(drawn.device)])


def text_logits(model: LanguageModel, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """What a model thinks along texts that go on from one prompt, in one pass.

    Returns:
        For each text [tokens, vocab] logits; row t is the one that the text's token t follows from.
    """
    cache = model.new_cache()
    lead = read_ahead(model, prompt, cache)
    heads = [torch.tensor(text[:-1], dtype=torch.long) for text in texts]
    rows = torch.cat(heads).clamp_(max=model.vocab_size - 1).to(model.device)
    block = _branches(len(prompt), len(lead), list(map(len, heads)), model.device)
    logits = model.forward(torch.cat([lead, rows]), cache, block, last=1 + len(rows))
    ends = torch.tensor([1, *map(len, heads)]).cumsum(0)
    return [torch.cat([logits[:1], logits[start:end]]) for start, end in pairwise(ends.tolist())]


def _branches(prompt: int, lead: int, lengths: Sequence[int], device: torch.device) -> Block:
    """The prompt's last rows, and after them texts that do not see each other."""
    count = lead + sum(lengths)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    visible[lead:, lead:] &= owner[:, None] == owner
    positions = [torch.arange(prompt - lead, prompt), *(prompt + torch.arange(length) for length in lengths)]
    return Block(torch.cat(positions).to(device), visible.to(device))


class _SharedCache:
    """One cache for several texts.

    Invariant: `_visible[text, slot]` says which slots hold a text's tokens, and `_positions[slot]` where they stand.
    """

    def __init__(self, model: LanguageModel, texts: int) -> None:
        self._model, self._cache = model, model.new_cache()
        self._positions = torch.zeros(0, dtype=torch.long, device=model.device)
        self._visible = torch.zeros(texts, 0, dtype=torch.bool, device=model.device)

    def read(self, prompt: Sequence[int], texts: slice) -> Tensor:
        """[1, vocab] logits at the end of a prompt that `texts` share."""
        tokens = torch.tensor(prompt, device=self._model.device)
        for start in range(0, len(prompt), _ROWS):
            part = tokens[start : start + _ROWS]
            count = len(part)
            seen = self._visible[texts.start].expand(count, -1)
            positions = start + torch.arange(count, device=part.device)
            owners = self._visible.new_zeros(len(self._visible), count)
            owners[texts] = True
            logits = self._forward(part, positions, torch.cat([seen, owners.new_ones(count, count).tril()], 1), owners)
        return logits

    def go_on(self, texts: Sequence[int], tokens: Tensor) -> Tensor:
        """One token for each of `texts` → [texts, vocab] logits."""
        seen = self._visible[texts]
        own = torch.eye(len(texts), dtype=torch.bool, device=tokens.device)
        owners = own.new_zeros(len(self._visible), len(texts)).index_copy_(0, torch.tensor(texts).to(own.device), own)
        return self._forward(tokens, seen.sum(1), torch.cat([seen, own], 1), owners, last=len(texts))

    def _forward(self, tokens: Tensor, positions: Tensor, visible: Tensor, owners: Tensor, last: int = 1) -> Tensor:
        self._positions = torch.cat([self._positions, positions])
        self._visible = torch.cat([self._visible, owners], dim=1)
        return self._model.forward(tokens, self._cache, Block(self._positions, visible), last=last)


def _read_prompts(shared: _SharedCache, asks: Sequence[Ask]) -> Tensor:
    """[asks, vocab] logits at the ends of the prompts, each read once."""
    logits: list[Tensor] = []
    while len(logits) < len(asks):
        start = len(logits)
        end = next((i for i in range(start, len(asks)) if asks[i].prompt != asks[start].prompt), len(asks))
        logits += [shared.read(asks[start].prompt, slice(start, end))[0]] * (end - start)
    return torch.stack(logits)


class _Writer:
    """One text under way."""

    def __init__(
        self, index: int, ask: Ask, target: LanguageModel, params: SamplingParams, eos_ids: frozenset[int]
    ) -> None:
        context = target.context_length
        if not ask.prompt or (context is not None and len(ask.prompt) >= context):
            raise UsageError(
                f"a prompt must have 1 to {'any number of' if context is None else context - 1} tokens for this "
                f"target, and here is one of {len(ask.prompt)}. Leave it out."
            )
        room = params.max_tokens if context is None else context - len(ask.prompt)
        self.index, self.ask, self.tokens = index, ask, list[int]()
        self._most = min(params.max_tokens, room)
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._processors = Processors(params, ask.prompt, target.vocab_size, target.device)
        self._generator = Noise(params.seed, ask.request, target.device).generator(0, Purpose.VERIFY)

    def probs(self, logits: Tensor) -> Tensor:
        """[vocab] logits → [1, vocab] distribution of the next token."""
        return self._processors.probs(self._processors.scores(logits[None], [[]]))

    def coin(self) -> Tensor:
        return uniform((1, 1), self._generator)

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self._processors.observe([token])

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self._most or self.tokens[-1] in self._eos_ids
