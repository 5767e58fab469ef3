"""Between text and token ids: prompts in, text out as soon as it is certain, and strings to stop at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from sequoia.errors import UsageError
from sequoia.model.quiet import quiet

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 16
_CONTEXT = 4
# transformers' clean-up makes ten replacements in a row, each looking at most 3 characters ahead.
_CLEAN_UP_REACH = 32


class Detokenizer:
    """Turns token ids into text piece by piece.

    All pieces joined are `tokenizer.decode(all_ids, skip_special_tokens=True)`. A piece holds only what no later token
    can change, so it may lag a token or two behind. Each call decodes a short window, not the whole output; only
    tokenizers that clean up spaces (WordPiece ones) need all of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._bytes = _byte_ids(tokenizer)
        self._cleans = _cleans_up(tokenizer)
        # Without special tokens: one at the window's start would pass for the text's start, where a space is dropped.
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were handed out

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; returns the text that is now certain, often empty."""
        self._window += [token for token in token_ids if token not in self._special]
        # A run of byte tokens is text or replacement characters as a whole, decided where it ends.
        if not self._window or self._window[-1] in self._bytes:
            return ""
        text = self._decode(self._window)
        return self._release(text, self._certain(text))

    def flush(self) -> str:
        """The rest, now that no more tokens come."""
        text = self._decode(self._window)
        return self._release(text, len(text))

    def _certain(self, text: str) -> int:
        if self._cleans:
            return max(0, len(text) - _CLEAN_UP_REACH)
        # The last character may be the beginning of a longer UTF-8 sequence.
        return len(text) - text.endswith(_REPLACEMENT)

    def _release(self, text: str, certain: int) -> str:
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if self._shown == len(text) and len(self._window) > _WINDOW and not self._cleans:
            self._slide()
        return piece

    def _slide(self) -> None:
        """Keep a few tokens as context. Four hold the last character whole: UTF-8 takes at most four bytes."""
        context = self._window[-_CONTEXT:]
        text = self._decode(context)
        if text:
            self._window, self._shown = context, len(text)

    def _decode(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=self._cleans)
        )


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(index for index, token in added.items() if token.special) | frozenset(tokenizer.all_special_ids)


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens <0x00> … <0xFF> with which sentencepiece vocabularies spell what they have no token for."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    return frozenset(index for index in ids if index is not None) - {tokenizer.unk_token_id}


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding removes spaces before punctuation: many tokenizers say so, and transformers overrules most."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    with quiet():
        ids = tokenizer.encode("it .", add_special_tokens=False)
        plain = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return " ." not in plain or tokenizer.decode(ids) != plain


@dataclass(frozen=True)
class Released:
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Watches text for strings to stop at and holds back what may be the beginning of one.

    The stop string that is complete first ends the text, before its own first character; of two complete at once the
    longer one counts. So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def add(self, text: str) -> Released:
        """Take the next piece of text. After a stop everything is dropped."""
        if self._stopped:
            return Released("")
        text = self._held + text
        hits = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if hits:
            _, start, stop = min(hits)
            self._held, self._stopped = "", True
            return Released(text[:start], stop)
        split = len(text) - self._uncertain(text)
        self._held = text[split:]
        return Released(text[:split])

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _uncertain(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)


class TextStream:
    """Token ids → text that is certain, up to a stop string."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop = StopStrings(stop)
        self.stopped = False

    def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int]:
        """The text now certain, and how many of `tokens` it took to reach a stop string (all without one)."""
        if self._detokenizer is None:
            return "", len(tokens)
        pieces: list[str] = []
        for count, token in enumerate(tokens, start=1):
            if self._feed(self._detokenizer.add([token]), pieces):
                return "".join(pieces), count
        if last and not self._feed(self._detokenizer.flush(), pieces):
            pieces.append(self._stop.flush())
        return "".join(pieces), len(tokens)

    def _feed(self, piece: str, pieces: list[str]) -> bool:
        released = self._stop.add(piece)
        pieces.append(released.text)
        self.stopped = released.stop is not None
        return self.stopped


def encode_prompt(tokenizer: Any, prompt: Any, vocab_size: int | None = None) -> list[int]:
    """The prompt's token ids.

    Args:
        tokenizer: the model's; None for a model without one, which takes token ids only.
        prompt: text, encoded with the tokenizer's default special tokens; a list or array of ids; or chat messages
            (`[{"role": ..., "content": ...}, ...]`), put into the chat template up to where the answer begins.
        vocab_size: ids must lie below it; without it, below the tokenizer's size.

    Raises:
        UsageError: the prompt is none of these, is empty, or needs a tokenizer or chat template there is not.
    """
    if hasattr(prompt, "tolist"):  # arrays and tensors of ids
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt)
    elif not isinstance(prompt, (list, tuple)):
        raise UsageError(f"a prompt is text, a list of token ids or a list of chat messages, not {prompt!r:.80}.")
    elif prompt and all(isinstance(item, dict) for item in prompt):
        ids = _encode_chat(tokenizer, list(prompt))
    else:
        limit = len(tokenizer) if vocab_size is None and tokenizer is not None else vocab_size
        ids = [_checked_id(item, limit) for item in prompt]
    if not ids:
        raise UsageError("the prompt is empty. Give at least one token.")
    return ids


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    if not text:
        raise UsageError("the prompt is empty. Give at least one character.")
    _require_tokenizer(tokenizer)
    _require_whole(text)
    return list(tokenizer(text)["input_ids"])


def _encode_chat(tokenizer: Any, messages: list[Any]) -> list[int]:
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UsageError(f"chat message {index} needs a {key!r} that is text, not {message.get(key)!r:.80}.")
            _require_whole(message[key])
    _require_tokenizer(tokenizer)
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError("this model's tokenizer has no chat template. Give the prompt as text or token ids.")
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:
        # Templates raise errors of their own, such as "roles must alternate".
        reason = " ".join(str(error).split())
        raise UsageError(f"the model's chat template refuses these messages: {reason}") from error
    return list(ids)


def _require_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        raise UsageError("this model has no tokenizer, so it needs token ids. Give a list of ids, or load a tokenizer.")


def _require_whole(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt holds half a character (a lone surrogate) at {error.start}. Mend it.") from error


def _checked_id(item: Any, limit: int | None) -> int:
    value = int(item) if isinstance(item, Integral) and not isinstance(item, bool) else -1
    if value < 0 or (limit is not None and value >= limit):
        bounds = "of at least 0" if limit is None else f"from 0 to {limit - 1}"
        raise UsageError(f"a token id in the prompt is an integer {bounds}, not {item!r:.80}.")
    return value
