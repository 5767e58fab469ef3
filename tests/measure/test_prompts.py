"""Prompts from every kind of source, in an order that covers the categories, and errors that name their place."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sequoia.errors import FileError, UsageError
from sequoia.measure.prompts import BUILT_IN, MOST_ROWS, PRESETS, PromptRecord, read_prompts
from sequoia.text import encode_prompt

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to


def lines(*records: Mapping[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def by_id(*sources: str | Path) -> dict[str, PromptRecord]:
    return {record.id: record for record in read_prompts(sources)}


# The built-in set.


def test_the_built_in_set_has_four_prompts_of_each_category() -> None:
    records = read_prompts([BUILT_IN])
    categories = ("chat", "prose", "code", "summary", "translation", "maths", "passage")
    assert Counter(record.category for record in records) == dict.fromkeys(categories, 4)
    assert len({record.id for record in records}) == 28
    assert len({str(record.content) for record in records}) == 28


@pytest.mark.parametrize(("category", "least", "most"), [("summary", 80, 130), ("passage", 100, 150)])
def test_built_in_prompts_bring_the_text_they_ask_about(category: str, least: int, most: int) -> None:
    for record in read_prompts([BUILT_IN]):
        if record.category == category:
            text = str(record.content[0]["content"]).split("\n\n")[1]  # type: ignore[index]
            assert least <= len(text.split()) <= most


# Files.


def test_each_field_becomes_its_kind_of_prompt(write: Write) -> None:
    dialogue = [{"role": "system", "content": "Be brief."}, *user("Hi"), {"role": "assistant", "content": "Hello"}]
    path = write(
        "mixed.jsonl",
        lines({"prompt": "a"}, {"text": "b"}, {"turns": ["c", "later"]})
        + "\n  \n"  # blank lines are skipped, and counted
        + lines({"messages": dialogue, "extra": 1}, {"messages": [*dialogue, *user("d"), *user("e")]}),
    )
    found = by_id(path)
    assert {name: record.content for name, record in found.items()} == {
        "mixed-1": user("a"),
        "mixed-2": "b",
        "mixed-3": user("c"),
        "mixed-6": tuple(dialogue[:2]),
        "mixed-7": (*dialogue, *user("d"), *user("e")),
    }
    assert {record.category for record in found.values()} == {"mixed"}


def test_of_several_fields_the_first_in_the_stated_order_counts(write: Write) -> None:
    fields: dict[str, Any] = {"text": "x", "prompt": "p", "turns": ["t"], "messages": list(user("m"))}
    expected: list[Any] = [user("m"), user("t"), user("p"), "x"]
    for content, name in zip(expected, ("messages", "turns", "prompt", "text"), strict=True):
        assert read_prompts([write("all.jsonl", lines(fields))])[0].content == content
        fields[name] = None  # as good as absent


def test_category_and_id_are_the_records_own_where_it_has_them(write: Write) -> None:
    path = write(
        "f.jsonl",
        lines(
            {"prompt": "a", "id": "x", "category": "maths", "source": "gone"},
            {"prompt": "b", "id": 7, "source": "exam", "category": None},
            {"prompt": "c", "id": None},
        ),
    )
    found = [(record.id, record.category) for record in by_id(path).values()]
    assert sorted(found) == [("7", "exam"), ("f-3", "f"), ("x", "maths")]


def test_paragraphs_of_a_text_file_keep_their_lines(write: Write) -> None:
    path = write("essay.txt", "\ufeffOne\r\ntwo\n\n \t\n\nThree:\n  - four\n")
    found = by_id(path)
    assert {name: record.content for name, record in found.items()} == {
        "essay-1": "One\ntwo",
        "essay-6": "Three:\n  - four",
    }
    assert found["essay-1"].category == "essay"


def test_separators_inside_json_strings_do_not_end_a_line(write: Write) -> None:
    text = "before\u2028after\x85end"
    path = write("s.jsonl", json.dumps({"text": text}, ensure_ascii=False) + "\r\n")
    assert read_prompts([path])[0].content == text


# Joining.


def test_the_first_prompts_cover_all_categories_evenly(write: Write) -> None:
    records = [{"prompt": f"{category} {number}", "category": category} for category in "abc" for number in range(9)]
    path = write("f.jsonl", lines(*records))
    for size in range(1, 28):
        counts = Counter(record.category for record in read_prompts([path], size))
        assert counts.total() == size
        assert max(counts.values()) - min(counts[category] for category in "abc") <= 1


def test_the_seed_alone_decides_the_order_within_a_category(write: Write) -> None:
    path = write("f.txt", "\n\n".join(f"text {number}" for number in range(30)))
    other = write("other.txt", "\n\n".join(f"other {number}" for number in range(5)))
    order = [record.id for record in read_prompts([path], seed=1)]
    assert order == [record.id for record in read_prompts([path], seed=1)]
    assert order == [record.id for record in read_prompts([other, path], seed=1) if record.category == "f"]
    assert order != [record.id for record in read_prompts([path], seed=2)]
    assert sorted(order) == sorted(record.id for record in read_prompts([path], seed=2))
    assert order[:7] == [record.id for record in read_prompts([path], 7, seed=1)]


def test_a_count_beyond_what_there_is_gives_all() -> None:
    assert len(read_prompts([BUILT_IN], 1000)) == 28


def test_what_differs_in_white_space_only_counts_once(write: Write) -> None:
    first = write("a.jsonl", lines({"prompt": "Say  this\nplease"}, {"text": "Say this please"}))
    second = write("b.jsonl", lines({"turns": [" Say this please "]}, {"prompt": "Say that"}))
    found = by_id(first, second, first)
    assert set(found) == {"a-1", "a-2", "b-2"}  # text to continue is another prompt than a message of the same words
    assert found["a-1"].content == user("Say  this\nplease")


def test_ids_that_clash_get_the_stem_before_them(write: Write) -> None:
    left = write("left/f.jsonl", lines({"text": "a", "id": "1"}, {"text": "b"}))
    right = write("right/f.jsonl", lines({"text": "c", "id": "1"}, {"text": "d"}, {"text": "e", "id": "1"}))
    found = {name: record.content for name, record in by_id(left, right).items()}
    assert found == {"1": "a", "f-2": "b", "f-1": "c", "f-f-2": "d", "f-1-2": "e"}


# Errors.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": ', "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "here is nothing"),
        ('{"question": "x", "id": "y"}', "one of messages, turns, prompt, text, and here is question, id"),
        ('{"prompt": " \\n"}', "prompt must be text that is not empty"),
        ('{"text": ""}', "text must be text that is not empty, not ''"),
        ('{"text": 3}', "text must be text that is not empty, not 3"),
        ('{"prompt": "x", "category": 3}', "category must be text"),
        ('{"prompt": "x", "source": ""}', "source must be text"),
        ('{"prompt": "x", "id": [1]}', "id must be text"),
        ('{"turns": "x"}', "turns must be a list"),
        ('{"turns": []}', "turns must be a list"),
        ('{"turns": [["x"]]}', "the first of turns must be text"),
        ('{"messages": {"role": "user", "content": "x"}}', "messages must be like"),
        ('{"messages": [{"role": "user"}]}', "messages must be like"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "messages must be like"),
        ('{"messages": []}', "one of the user that is not empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "one of the user that is not empty"),
        ('{"messages": [{"role": "user", "content": " "}]}', "one of the user that is not empty"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str, write: Write) -> None:
    path = write("bad.jsonl", lines({"prompt": "fine"}) + "\n" + line + "\n")
    with pytest.raises(FileError) as caught:
        read_prompts([path])
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.txt"])
def test_what_is_not_utf8_is_named(name: str, write: Write) -> None:
    path = write(name, b'{"prompt": "a"}\n\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(FileError, match=r"line 3: prompts must be UTF-8"):
        read_prompts([path])


@pytest.mark.parametrize(("name", "content"), [("empty.jsonl", "\n \n"), ("empty.txt", "")])
def test_a_file_without_prompts_is_an_error(name: str, content: str, write: Write) -> None:
    path = write(name, content)
    with pytest.raises(FileError) as caught:
        read_prompts([BUILT_IN, path])
    assert str(caught.value) == f"{path} holds no prompts. Give at least one."


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read .*none\.jsonl: No such file or directory"):
        read_prompts([tmp_path / "none.jsonl"])


@pytest.mark.parametrize("source", ["mt-bench", "notes.json", "a.csv", "", "hf", "built-in.zip"])
def test_an_unknown_source_is_told_what_there_is(source: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_prompts([source])
    for form in (BUILT_IN, ".jsonl", ".txt", *PRESETS, "hf:NAME:CONFIG:SPLIT"):
        assert form in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_count_is_at_least_one(count: Any) -> None:
    with pytest.raises(UsageError, match="count must be an integer of at least 1"):
        read_prompts([BUILT_IN], count)


def test_no_source_is_an_error() -> None:
    with pytest.raises(UsageError, match="no source is given"):
        read_prompts([])


# Data sets.


class Library(ModuleType):
    """Stands for the datasets library: notes what is asked of it, and how much is read."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] | Exception) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.calls: list[tuple[Any, ...]] = []
        self.read = 0
        self.bars = True

    def load_dataset(self, path: str, name: str | None, *, split: str, streaming: bool) -> Iterator[Mapping[str, Any]]:
        assert streaming
        assert not self.bars
        self.calls.append((path, name, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.stream(self.rows)

    def stream(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for row in rows:
            self.read += 1
            yield row

    def are_progress_bars_disabled(self) -> bool:
        return not self.bars

    def disable_progress_bars(self) -> None:
        self.bars = False

    def enable_progress_bars(self) -> None:
        self.bars = True


Install = Callable[[Iterable[Mapping[str, Any]] | Exception], Library]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def library(rows: Iterable[Mapping[str, Any]] | Exception) -> Library:
        made = Library(rows)
        monkeypatch.setitem(sys.modules, "datasets", made)
        return made

    return library


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hf:some/set", ("some/set", None, "train")),
        ("hf:some/set:small", ("some/set", "small", "train")),
        ("hf:some/set:small:test", ("some/set", "small", "test")),
        ("hf:some/set::test", ("some/set", None, "test")),
        ("c4", ("allenai/c4", "en", "validation")),
        ("openwebtext", ("Skylion007/openwebtext", None, "train")),
        ("wikitext", ("Salesforce/wikitext", "wikitext-103-raw-v1", "test")),
    ],
)
def test_a_data_set_is_asked_for_by_name(source: str, call: tuple[Any, ...], install: Install) -> None:
    text = "word " * 20
    library = install([{"text": text, "url": "somewhere"}])
    stem = source if source in PRESETS else "set"
    assert read_prompts([source]) == [PromptRecord(f"{stem}-1", stem, text)]
    assert library.calls == [call]
    assert library.bars


def test_mt_bench_asks_its_first_turn(install: Install) -> None:
    library = install([{"prompt": ["first", "second"], "prompt_id": 5, "category": "stem", "reference": []}])
    assert read_prompts(["mt_bench"]) == [PromptRecord("mt_bench-1", "stem", user("first"))]
    assert library.calls == [("HuggingFaceH4/mt_bench_prompts", None, "train")]


def test_articles_are_to_be_summarised(install: Install) -> None:
    library = install([{"article": "It {rained}.", "highlights": "Rain.", "id": "af"}, {"article": " ", "id": "b0"}])
    [record] = read_prompts(["cnn_dailymail"])
    assert library.calls == [("abisee/cnn_dailymail", "3.0.0", "test")]
    assert (record.id, record.category) == ("af", "cnn_dailymail")
    assert record.content == user("Summarise this article in three sentences.\n\nIt {rained}.")


def test_wikitext_leaves_out_headings_and_empty_rows(install: Install) -> None:
    paragraph = "word " * 30
    install([{"text": ""}, {"text": " = Heading = \n"}, {"text": ""}, {"text": paragraph}])
    assert [record.id for record in read_prompts(["wikitext"])] == ["wikitext-4"]


def test_only_the_beginning_of_a_data_set_is_read(install: Install) -> None:
    library = install({"text": f"text {number}"} for number in range(10 * MOST_ROWS))
    assert len(read_prompts(["hf:some/set"])) == MOST_ROWS
    assert library.read == MOST_ROWS


def test_a_row_without_a_prompt_is_named(install: Install) -> None:
    install([{"text": "fine"}, {"text": None, "question": "x"}])
    with pytest.raises(FileError, match=r"^hf:some/set::train, row 2: a prompt needs one of"):
        read_prompts(["hf:some/set"])


def test_a_data_set_of_empty_rows_holds_no_prompts(install: Install) -> None:
    install([{"text": ""}])
    with pytest.raises(FileError, match=r"^hf:some/set::train holds no prompts"):
        read_prompts(["hf:some/set"])


def fails_while_read() -> Iterator[Mapping[str, Any]]:
    yield {"text": "fine"}
    raise OSError("the line\nwent dead")


@pytest.mark.parametrize("rows", [OSError("the line\nwent dead"), fails_while_read()])
def test_what_the_library_raises_is_told_in_one_line(rows: Any, install: Install) -> None:
    library = install(rows)
    with pytest.raises(FileError, match=r"^cannot read hf:some/set:small:train: the line went dead\. "):
        read_prompts(["hf:some/set:small"])
    assert library.bars


@pytest.mark.parametrize("source", ["hf:", "hf::small", "hf:a:b:c:d"])
def test_forms_of_a_data_set(source: str, install: Install) -> None:
    install([])
    with pytest.raises(UsageError, match="a data set is hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"):
        read_prompts([source])


@pytest.mark.parametrize("source", ["hf:some/set", *PRESETS])
def test_without_the_library_one_is_told_how_to_get_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r'pip install "sequoia\[datasets\]"'):
        read_prompts([source])


def test_files_do_not_need_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read_prompts([BUILT_IN], 1)


# Token ids.


class Words:
    """A tokenizer with a token per word, whose template puts one before each message and one at the end."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __len__(self) -> int:
        return 1000

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        bodies = (self(message["content"])["input_ids"] for message in messages)
        return [token for body in bodies for token in (100, *body)] + [101]


CHAT = PromptRecord(
    "x",
    "x",
    (
        {"role": "system", "content": "be brief"},
        *user("a bb"),
        {"role": "assistant", "content": "no"},
        *user("ccc dddd"),
    ),
)


def test_texts_are_cut_and_messages_are_not() -> None:
    tokenizer = Words("a template")
    assert PromptRecord("x", "x", "a bb ccc dddd").token_ids(tokenizer) == [1, 2, 3, 4]
    assert PromptRecord("x", "x", "a bb ccc dddd").token_ids(tokenizer, most=3) == [1, 2, 3]
    whole = [100, 2, 5, 100, 1, 2, 100, 2, 100, 3, 4, 101]
    assert CHAT.token_ids(tokenizer, most=3) == CHAT.token_ids(tokenizer) == whole
    assert encode_prompt(tokenizer, CHAT.content) == whole


def test_without_a_template_the_users_words_are_continued() -> None:
    tokenizer = Words(None)
    assert CHAT.token_ids(tokenizer) == [1, 2, 3, 4]
    assert CHAT.token_ids(tokenizer, 1000, most=3) == [1, 2, 3]


@pytest.mark.parametrize("content", ["a text", user("a message")])
def test_token_ids_need_a_tokenizer_and_a_right_length(content: Any) -> None:
    record = PromptRecord("x", "x", content)
    with pytest.raises(UsageError, match="tokenizer"):
        record.token_ids(None)
    with pytest.raises(UsageError, match="most must be an integer of at least 1"):
        record.token_ids(Words(None), most=0)
