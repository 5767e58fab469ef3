"""The record of a loaded model, and whether two of them speak of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sequoia.errors import VocabularyError
from sequoia.model.offload.hollow import Hollow
from sequoia.model.placement import Numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)

# Outputs are padded to a multiple for speed (Qwen: 151,936 and 152,064 rows for one tokenizer). Without tokenizers to
# compare, a difference within one such multiple is taken for padding.
_PADDING = 512


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: in eval mode, without gradients, with its tokenizer (None if it has none)."""

    model: PreTrainedModel = field(repr=False)
    """transformers' own, or an `Outline` of it."""
    tokenizer: Any = field(repr=False)
    name: str
    load_again: Callable[[], LoadedModel] | None = field(default=None, repr=False, compare=False)
    """Loads another copy, not quantised; None for a model that was given as an object, which is never taken apart."""
    numbers: Numbers | None = None
    """What was asked for, where it was loaded here."""
    hollow: Hollow | None = field(default=None, repr=False, compare=False)
    """What brings the layers' matrices, where the model is without them."""
    most_tokens: int | None = None
    """Of a prompt and its answer, where memory is planned for no more."""

    @property
    def bits(self) -> int | None:
        """Of its linear layers, where they are to be integers before it speaks."""
        return self.numbers.bits if self.numbers else None

    @property
    def weights(self) -> str:
        """The weights' number format as `--weights` names it."""
        return (self.numbers or Numbers(self.dtype)).name

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """Rows of the output, padding included."""
        return int(self.model.config.get_text_config().vocab_size)

    @cached_property
    def token_count(self) -> int:
        """Ids below this are real tokens; the rows above it only pad the output."""
        if self.tokenizer is None:
            return self.vocab_size
        # Not len(tokenizer): where ids have gaps, the highest lies above the count.
        return min(1 + max(self.tokenizer.get_vocab().values(), default=-1), self.vocab_size)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text, from the first of generation config, config and tokenizer that names any."""
        sources = (self.model.generation_config, self.model.config.get_text_config(), self.tokenizer)
        named = (_ids(getattr(source, "eos_token_id", None)) for source in sources)
        return next((ids for ids in named if ids), frozenset())

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for, as its config says; None where it names no limit."""
        config = self.model.config.get_text_config()
        limits = (getattr(config, field, None) for field in _CONTEXT_FIELDS)
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _ids(value: object) -> frozenset[int]:
    values: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
    return frozenset(item for item in values if isinstance(item, int) and item >= 0)


def shared_token_count(target: LoadedModel, draft: LoadedModel) -> int:
    """How many ids the draft may propose: 0 … n-1, the same tokens in both; rows that only pad are left out.

    Raises:
        VocabularyError: an id means different tokens, or without tokenizers the sizes differ by more than padding.
    """
    count = min(target.token_count, draft.token_count)
    if target.tokenizer is draft.tokenizer and target.tokenizer is not None:
        return count
    if target.tokenizer is None or draft.tokenizer is None:
        _compare_sizes(target.vocab_size, draft.vocab_size)
    else:
        _compare_tokens(target, draft, count)
    return count


def _compare_sizes(target_rows: int, draft_rows: int) -> None:
    smaller, larger = sorted((target_rows, draft_rows))
    if larger > -(-smaller // _PADDING) * _PADDING:
        raise VocabularyError(
            f"draft and target must share a vocabulary: the target has {target_rows} ids and the draft {draft_rows}. "
            'Choose a draft of the same family, or draft="ngram".'
        )


def _compare_tokens(target: LoadedModel, draft: LoadedModel, count: int) -> None:
    ours, theirs = _tokens_by_id(target.tokenizer), _tokens_by_id(draft.tokenizer)
    for token in range(count):
        if ours.get(token) != theirs.get(token):
            raise VocabularyError(
                f"draft and target must share a vocabulary: id {token} is {ours.get(token)!r} in the target "
                f"({target.token_count} tokens) and {theirs.get(token)!r} in the draft ({draft.token_count} tokens). "
                'Choose a draft of the same family, or draft="ngram".'
            )


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}
