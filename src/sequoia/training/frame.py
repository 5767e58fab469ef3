"""How texts begin and go on: a chat template's frame, openings of requests, or prompts that are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from sequoia.errors import UsageError
from sequoia.measure.prompts import PromptRecord
from sequoia.training.openings import OPENINGS

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_ROOM = 64  # tokens that a text must have left after its prompt


@dataclass(frozen=True)
class Opening:
    """The first tokens of a text, which the model goes on with."""

    tokens: tuple[int, ...]
    lead: int = 0  # tokens at their beginning that all texts share
    is_request: bool = False  # whether a user's message goes on, and not an answer


@dataclass(frozen=True)
class Frame:
    """What a chat template puts before, between and after messages, as token ids."""

    lead: tuple[int, ...]
    to_answer: tuple[int, ...]  # from the end of a request to the answer
    to_request: tuple[int, ...]  # from the end of an answer to the next request

    @classmethod
    def of(cls, tokenizer: Any) -> Frame | None:
        """None where there is no template, or one that takes no two requests."""
        if getattr(tokenizer, "chat_template", None) is None:
            return None
        marks = [f"{_MARK}{index}{_MARK}" for index in range(3)]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            rest = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # templates raise what they like where a conversation is not to their taste
            return None
        parts = []
        for mark in marks:
            part, found, rest = rest.partition(mark)
            if not found:
                return None
            parts.append(tuple(tokenizer.encode(part, add_special_tokens=False)))
        return cls(*parts)


class Openings:
    """Where texts come from.

    Args:
        choices: at least one.
        frame: how a conversation goes on; without one a text ends where the model ends it.
    """

    def __init__(self, choices: Sequence[Opening], frame: Frame | None) -> None:
        self._choices, self.frame = choices, frame

    def draw(self, random: Random) -> Opening:
        return random.choice(self._choices)

    @classmethod
    def built_in(cls, tokenizer: Any) -> Openings:
        """Requests that the model writes itself; without a chat template, texts that begin like one.

        Raises:
            UsageError: there is no tokenizer.
        """
        if tokenizer is None:
            raise UsageError("the built-in openings need a tokenizer. Load the target as a (model, tokenizer) pair.")
        frame = Frame.of(tokenizer)
        if frame is None:
            texts = dict.fromkeys(text for text in OPENINGS if text)
            return cls([Opening(tuple(tokenizer.encode(text))) for text in texts], None)
        lead = frame.lead
        begun = (tuple(tokenizer.encode(text, add_special_tokens=False)) if text else () for text in OPENINGS)
        return cls([Opening(lead + tokens, len(lead), is_request=True) for tokens in begun], frame)

    @classmethod
    def given(cls, records: Iterable[PromptRecord], tokenizer: Any, vocab_size: int, longest: int) -> Openings:
        """Prompts that the model answers.

        Args:
            longest: tokens of a text; prompts that leave no room for an answer are left out.

        Raises:
            UsageError: all are too long.
        """
        read = [tuple(record.token_ids(tokenizer, vocab_size)) for record in records]
        short = [Opening(tokens) for tokens in read if len(tokens) <= longest - _ROOM]
        if not short:
            raise UsageError(f"texts have {longest} tokens, and no prompt is {_ROOM} shorter. Give shorter prompts.")
        return cls(short, None)
