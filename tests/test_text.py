"""Text in pieces equals text at once, for every kind of tokenizer; stops do not depend on the cutting."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sequoia.errors import UsageError
from sequoia.model.loading import LoadedModel
from sequoia.text import Detokenizer, StopStrings, encode_prompt


def wrap(model: Any, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(model)
    inner.decoder = decoder
    inner.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|sep|>")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", **options)


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", *alphabet, "Ġthe", "hello", "ðŁ", "ĺĢ"]
    return wrap(models.BPE({token: index for index, token in enumerate(words)}, []), decoders.ByteLevel())


def sentencepiece() -> PreTrainedTokenizerFast:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "b", "日", "▁▁", "."]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(models.BPE({token: index for index, token in enumerate(words)}, [], byte_fallback=True), decoder)


def metaspace() -> PreTrainedTokenizerFast:
    words = ["<unk>", "▁", "▁the", "▁a", "b", "日", "▁▁", "."]
    return wrap(models.BPE({token: index for index, token in enumerate(words)}, []), decoders.Metaspace())


def cleaning() -> PreTrainedTokenizerFast:
    words = ["<unk>", "it", ".", "!", "'", "s", "n't", "'s", "'ve", "do", "a", "##b", ","]
    vocab = {token: index for index, token in enumerate(words)}
    return wrap(
        models.WordPiece(vocab, unk_token="<unk>"), decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True
    )


def words_only() -> PreTrainedTokenizerFast:
    vocab = {"<unk>": 0} | {f"w{index}": index for index in range(1, 12)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="w11")


TOKENIZERS = [byte_level(), sentencepiece(), metaspace(), cleaning(), words_only()]


def pieces_of(tokenizer: Any, rounds: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(ids) for ids in rounds), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "sentencepiece", "metaspace", "cleaning", "words"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole(tokenizer: Any, data: st.DataObject) -> None:
    token = st.integers(0, len(tokenizer) - 1) | st.integers(max(0, len(tokenizer) - 12), len(tokenizer) - 1)
    rounds = data.draw(st.lists(st.lists(token, max_size=5), max_size=40))
    ids = [token for ids in rounds for token in ids]
    assert "".join(pieces_of(tokenizer, rounds)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_half_a_character_is_held_back() -> None:
    tokenizer = byte_level()
    first, second, the = tokenizer.convert_tokens_to_ids(["ðŁ", "ĺĢ", "Ġthe"])
    assert pieces_of(tokenizer, [[the], [first], [second], [first]]) == [" the", "", "😀", "", "�"]


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = sentencepiece()
    run = tokenizer.convert_tokens_to_ids(["<0xE6>", "<0x9C>", "<0xAC>"])
    the = tokenizer.convert_tokens_to_ids("▁the")
    assert pieces_of(tokenizer, [[the], run[:2], run[2:], [the]]) == ["the", "", "", "本 the", ""]


def test_special_tokens_neither_show_nor_eat_spaces() -> None:
    tokenizer = sentencepiece()
    the, sep = tokenizer.convert_tokens_to_ids(["▁the", "<|sep|>"])
    assert pieces_of(tokenizer, [[sep], [the], [sep], [the]]) == ["", "the", "", " the", ""]


def test_work_per_token_does_not_grow() -> None:
    tokenizer = byte_level()
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **options: Any) -> str:
            decoded.append(len(ids))
            return str(tokenizer.decode(ids, **options))

    detokenizer = Detokenizer(Counting())
    for _ in range(500):
        detokenizer.add(tokenizer.convert_tokens_to_ids(["hello"]))
    assert max(decoded) <= 20


def test_smollm2_pieces(smollm2: LoadedModel) -> None:
    text = "def f(x):\n    return x*12\n\n👩‍👩‍👧 日本語 naïve — “quotes” <|im_end|> after"
    ids = smollm2.tokenizer(text)["input_ids"]
    pieces = pieces_of(smollm2.tokenizer, [[token] for token in ids])
    assert "".join(pieces) == text.replace("<|im_end|>", "")
    assert "�" not in "".join(pieces)


# --- stop strings ---------------------------------------------------------------------------------------------------


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watch = StopStrings(stops)
    text, hit = "", None
    for piece in pieces:
        released = watch.add(piece)
        text += released.text
        hit = hit or released.stop
    return text + watch.flush(), hit


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["\n\n"], ["one\n", "\ntwo"], ("one", "\n\n")),
        (["\n\n"], ["one\n", "two\n"], ("one\ntwo\n", None)),
        (["end"], ["the e", "n", "d of"], ("the ", "end")),
        (["aab"], ["aa", "aab"], ("aa", "aab")),
        (["abcd", "bc"], ["abc", "d"], ("a", "bc")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),
        ([], ["anything"], ("anything", None)),
        (["x"], ["x", "more x"], ("", "x")),
    ],
)
def test_stops(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert run_stops(stops, pieces) == expected


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    watch = StopStrings(["<end>", "##"])
    assert [watch.add(piece).text for piece in ["a <e", "x #", "b"]] == ["a ", "<ex ", "#b"]


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_stops_do_not_depend_on_the_cutting(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole, hit = run_stops(stops, [text])
    assert run_stops(stops, pieces) == (whole, hit)
    assert whole == text if hit is None else text.startswith(whole + hit)
    assert not any(stop in whole for stop in stops)


# --- prompts --------------------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def test_prompts() -> None:
    tokenizer = words_only()
    assert encode_prompt(tokenizer, "w3 w4") == [3, 4]
    assert encode_prompt(tokenizer, (3, 4)) == [3, 4]
    assert encode_prompt(None, [3, 10**6]) == [3, 10**6]
    tokenizer.chat_template = TEMPLATE
    assert encode_prompt(tokenizer, [{"role": "user", "content": "w3 w4"}]) == [3, 4, 9]


def test_default_special_tokens_are_kept(smollm2: LoadedModel) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = smollm2.tokenizer.decode(encode_prompt(smollm2.tokenizer, chat))
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (7, "a prompt is text, a list of token ids or a list of chat messages, not 7"),
        ([1, True], "not True"),
        ([1, 2.0], r"not 2\.0"),
        ([-1], "from 0 to 11, not -1"),
        ([12], "from 0 to 11, not 12"),
        ([1, {"role": "user", "content": "w1"}], "a token id in the prompt"),
        ([{"role": "user"}], "chat message 0 needs a 'content' that is text, not None"),
        ([{"role": "user", "content": "w1"}, {"content": "w1"}], "chat message 1 needs a 'role'"),
        ([{"role": "user", "content": "w1"}], "no chat template"),
    ],
)
def test_bad_prompts(prompt: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        encode_prompt(words_only(), prompt)


@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "w1"}]])
def test_text_needs_a_tokenizer(prompt: Any) -> None:
    with pytest.raises(UsageError, match="needs token ids"):
        encode_prompt(None, prompt)


def test_ids_may_reach_into_the_padding_the_model_has() -> None:
    assert encode_prompt(words_only(), [13], vocab_size=16) == [13]


def test_what_a_template_refuses() -> None:
    tokenizer = words_only()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        encode_prompt(tokenizer, [{"role": "user", "content": "w1"}])
