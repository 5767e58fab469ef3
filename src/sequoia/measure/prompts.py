"""Prompts for measuring: one reader for files, Hugging Face data sets and the built-in set."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, count, groupby, islice, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from sequoia.errors import FileError, UsageError
from sequoia.model.quiet import quiet
from sequoia.text import encode_prompt
from sequoia.tree.checks import require_integer

Content = str | tuple[Mapping[str, str], ...]  # text to continue as it is, or chat messages


@dataclass(frozen=True)
class PromptRecord:
    """One prompt. `content` is what `Engine.generate` takes; `id` is the source's own, else its stem and line (row)."""

    id: str
    category: str
    content: Content

    def token_ids(self, tokenizer: Any, vocab_size: int | None = None, most: int | None = None) -> list[int]:
        """The prompt as the model reads it.

        Chat messages are put into the tokenizer's template and never cut, since a template cut short is none. Without
        a template the user's messages are joined and continued as text.

        Args:
            vocab_size: see `encode_prompt`.
            most: tokens that a text is cut to; its first ones stay.

        Raises:
            UsageError: there is no tokenizer, its template refuses the messages, or `most` is below 1.
        """
        most = None if most is None else require_integer("most", most, 1)
        if isinstance(self.content, str):
            return encode_prompt(tokenizer, self.content, vocab_size)[:most]
        if getattr(tokenizer, "chat_template", None) is not None:
            return encode_prompt(tokenizer, [dict(message) for message in self.content], vocab_size)
        asked = (message["content"] for message in self.content if message["role"] == "user")
        return encode_prompt(tokenizer, "\n\n".join(asked), vocab_size)[:most]


@dataclass(frozen=True)
class DataSet:
    """A Hugging Face data set, and how its rows become prompts."""

    name: str
    config: str | None = None
    split: str = "train"
    renamed: Mapping[str, str] = field(default_factory=dict)  # columns that have another name here
    instruction: str = ""  # put before each prompt
    least_words: int = 1  # rows with fewer are skipped: raw text has empty lines and headings among its rows

    def __str__(self) -> str:
        return ":".join(("hf", self.name, self.config or "", self.split))

    def fields_of(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row by the names of `read_prompts`; None if it is too short to be a prompt."""
        fields = {self.renamed.get(column, column): value for column, value in row.items()}
        name = _first_given(fields, _READERS)
        if name is None or not isinstance(text := fields[name], str):
            return fields
        return fields | {name: self.instruction + text} if len(text.split()) >= self.least_words else None


BUILT_IN = "built-in"
_SUMMARISE = "Summarise this article in three sentences.\n\n"
PRESETS: dict[str, DataSet] = {
    "c4": DataSet("allenai/c4", "en", "validation"),
    "openwebtext": DataSet("Skylion007/openwebtext"),
    "cnn_dailymail": DataSet("abisee/cnn_dailymail", "3.0.0", "test", {"article": "prompt"}, _SUMMARISE),
    "mt_bench": DataSet("HuggingFaceH4/mt_bench_prompts", renamed={"prompt": "turns"}),
    "wikitext": DataSet("Salesforce/wikitext", "wikitext-103-raw-v1", "test", least_words=20),
}
SOURCE_FORMS = f"{BUILT_IN}, a .jsonl or .txt file, {', '.join(PRESETS)} or hf:NAME:CONFIG:SPLIT"
MOST_ROWS = 1_000
"""Rows read from the beginning of a data set; the rest is not downloaded."""


def read_prompts(sources: Sequence[str | Path], count: int | None = None, seed: int = 0) -> list[PromptRecord]:
    """The prompts of all sources together, such that the first n of them cover all categories about evenly.

    Args:
        sources: forms of `SOURCE_FORMS`; CONFIG and SPLIT may be left out, SPLIT being train then. A line of a .jsonl
            file, or a row of a data set, holds one of `messages` (chat; used up to the last message that is not the
            assistant's), `turns` (list of text; the first is used, as the user's message), `prompt` (text, the user's
            message) or `text` (continued as it is); the first of these counts. `category`, else `source`, else the
            source's stem is its category; `id` is optional. The paragraphs of a .txt file are texts to continue.
        count: how many are returned at most; None for all.
        seed: of the order within each category. The categories take turns.

    Prompts that differ in white space only count once. An id that is taken already gets the source's stem before it.

    Raises:
        UsageError: no source, a source of no known kind, a `count` below 1, or the datasets library is missing.
        FileError: a file or data set cannot be read, or does not hold what it should; the place is named.
    """
    most = None if count is None else require_integer("count", count, 1)
    if not sources:
        raise UsageError(f"no prompts: no source is given. Give {SOURCE_FORMS}.")
    return _taking_turns(_distinct(_read(str(source)) for source in sources), seed)[:most]


def _distinct(readings: Iterable[tuple[str, list[PromptRecord]]]) -> list[PromptRecord]:
    """Every content once, each under an id of its own."""
    seen: set[Hashable] = set()
    kept: dict[str, PromptRecord] = {}
    for stem, records in readings:
        for record in records:
            key = _without_spacing(record.content)
            if key not in seen:
                seen.add(key)
                longer = f"{stem}-{record.id}"
                names = chain((record.id, longer), (f"{longer}-{number}" for number in count(2)))
                name = next(name for name in names if name not in kept)
                kept[name] = replace(record, id=name)
    return list(kept.values())


def _without_spacing(content: Content) -> Hashable:
    if isinstance(content, str):
        return " ".join(content.split())
    return tuple((message["role"], " ".join(message["content"].split())) for message in content)


def _taking_turns(records: Iterable[PromptRecord], seed: int) -> list[PromptRecord]:
    groups: dict[str, list[PromptRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    for category, group in groups.items():
        # A generator for each, so that the order in a category does not depend on what else is read.
        Random(f"{seed} {category}").shuffle(group)
    return [record for turn in zip_longest(*groups.values()) for record in turn if record is not None]


def _read(source: str) -> tuple[str, list[PromptRecord]]:
    """The source's stem and its prompts."""
    if source == BUILT_IN:
        return BUILT_IN, _read_file(Path(__file__).with_name("data") / "prompts.jsonl", BUILT_IN)
    if source in PRESETS:
        return source, _read_data_set(PRESETS[source], source)
    if source.startswith("hf:"):
        data_set = _parse_data_set(source)
        stem = data_set.name.split("/")[-1]
        return stem, _read_data_set(data_set, stem)
    path = Path(source)
    return path.stem, _read_file(path, path.stem)


def _read_file(path: Path, stem: str) -> list[PromptRecord]:
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".txt"):
        raise UsageError(f"{str(path)!r} is no source of prompts. Give {SOURCE_FORMS}.")
    if kind == ".txt":
        return _records(f"{path}, line", stem, _paragraphs(_read_lines(path)), lambda text: {"text": text})
    return _records(f"{path}, line", stem, (pair for pair in _read_lines(path) if pair[1].strip()), _parse_line)


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """(number, line) of a UTF-8 file. Split at line feeds only: JSON strings may hold other line separators."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}. Check the path.") from error
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise FileError(f"{path}, line {line}: prompts must be UTF-8, and this is not. Save them as UTF-8.") from error
    return list(enumerate(text.replace("\r\n", "\n").split("\n"), 1))


def _paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """(number of the first line, text) of each."""
    for blank, group in groupby(lines, lambda pair: not pair[1].strip()):
        if not blank:
            numbers, texts = zip(*group, strict=True)
            yield numbers[0], "\n".join(texts)


def _parse_line(line: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        # The parser's own place counts within the line, and calls it line 1.
        raise UsageError(f"not JSON: {getattr(error, 'msg', error)}. Write one JSON object a line.") from error
    if not isinstance(fields, Mapping):
        raise UsageError(f'a line must be a JSON object such as {{"prompt": "Hello"}}, not {line:.80}. Mend it.')
    return fields


def _parse_data_set(source: str) -> DataSet:
    name, *rest = source.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise UsageError(f"a data set is hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, not {source!r}.")
    config, split = [*rest, "", ""][:2]
    return DataSet(name, config or None, split or "train")


def _read_data_set(data_set: DataSet, stem: str) -> list[PromptRecord]:
    rows = enumerate(_first_rows(data_set), 1)
    long_enough = ((number, fields) for number, row in rows if (fields := data_set.fields_of(row)) is not None)
    return _records(f"{data_set}, row", stem, long_enough, lambda fields: fields)


def _first_rows(data_set: DataSet) -> list[Mapping[str, Any]]:
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        remedy = 'pip install "sequoia[datasets]"'
        raise UsageError(f"data sets need the datasets library ({error}): {remedy}, or give a file.") from error
    with quiet(), ExitStack() as undo:
        if not library.are_progress_bars_disabled():
            library.disable_progress_bars()
            undo.callback(library.enable_progress_bars)
        try:
            rows = library.load_dataset(data_set.name, data_set.config, split=data_set.split, streaming=True)
            return list(islice(rows, MOST_ROWS))
        except Exception as error:  # what networks and file formats raise has no common base
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FileError(f"cannot read {data_set}: {reason:.300}. Check its name and the network.") from error


def _records(
    place: str, stem: str, items: Iterable[tuple[int, Any]], parse: Callable[[Any], Mapping[str, Any]]
) -> list[PromptRecord]:
    """A prompt from each (number, item); `place` and the number say where an item is."""
    records = []
    for number, item in items:
        try:
            records.append(_record(parse(item), stem, number))
        except UsageError as error:
            raise FileError(f"{place} {number}: {error}") from error
    if not records:
        raise FileError(f"{place.rpartition(',')[0]} holds no prompts. Give at least one.")
    return records


def _record(fields: Mapping[str, Any], stem: str, number: int) -> PromptRecord:
    name = _first_given(fields, _READERS)
    if name is None:
        found = ", ".join(fields) or "nothing"
        raise UsageError(f"a prompt needs one of {', '.join(_READERS)}, and here is {found:.200}. Add one of them.")
    content = _READERS[name](fields[name])
    label = _first_given(fields, ("category", "source"))
    category = stem if label is None else _checked_text(label, fields[label])
    own_id = f"{stem}-{number}" if fields.get("id") is None else fields["id"]
    return PromptRecord(_checked_text("id", str(own_id) if isinstance(own_id, int) else own_id), category, content)


def _first_given(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of the names with a value. Data sets fill what a row lacks with None, so None is none."""
    return next((name for name in names if fields.get(name) is not None), None)


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name} must be text that is not empty, not {value!r:.80}. Mend it.")
    return value


def _user_message(name: str, value: object) -> Content:
    return ({"role": "user", "content": _checked_text(name, value)},)


def _from_turns(value: object) -> Content:
    if not isinstance(value, list) or not value:
        raise UsageError(f"turns must be a list of texts, the first being the prompt, not {value!r:.80}. Mend it.")
    return _user_message("the first of turns", value[0])


def _from_messages(value: object) -> Content:
    if not isinstance(value, list) or not all(map(_is_message, value)):
        raise UsageError(f'messages must be like [{{"role": "user", "content": "Hello"}}], not {value!r:.80}. Mend it.')
    size = max((size for size, message in enumerate(value, 1) if message["role"] != "assistant"), default=0)
    messages = tuple({"role": message["role"], "content": message["content"]} for message in value[:size])
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise UsageError("messages must hold one of the user that is not empty, and there is none. Add one.")
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


# The fields that can be a prompt. Of several the first here counts.
_READERS: dict[str, Callable[[object], Content]] = {
    "messages": _from_messages,
    "turns": _from_turns,
    "prompt": lambda value: _user_message("prompt", value),
    "text": lambda value: _checked_text("text", value),
}
