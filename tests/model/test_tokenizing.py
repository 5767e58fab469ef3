"""A tokenizer by its class's name is the one that transformers finds, or transformers is asked to find it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_loading import tiny_tokenizer
from transformers import AutoTokenizer

from sequoia.model.tokenizing import class_name, read_tokenizer


def test_the_class_reads_the_same_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(str(tmp_path))
    name = class_name(str(tmp_path), found)
    assert name == type(found).__name__
    assert read_tokenizer(str(tmp_path), name).get_vocab() == found.get_vocab()


@pytest.mark.parametrize(
    "setting", [{"chat_template": "{{ messages }}"}, {"eos_token": "w5"}, {"padding_side": "left"}]
)
def test_another_tokenizer_is_left_to_transformers(tmp_path: Path, setting: dict[str, str]) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(str(tmp_path), **setting)
    assert class_name(str(tmp_path), found) == "AutoTokenizer"


def test_another_vocabulary_is_another_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(str(tmp_path))
    tiny_tokenizer(words=18).save_pretrained(tmp_path)
    assert class_name(str(tmp_path), found) == "AutoTokenizer"


def test_a_class_that_is_not_transformers_own(tmp_path: Path) -> None:
    class Own:
        pass

    assert class_name(str(tmp_path), Own()) == "AutoTokenizer"


def test_a_model_without_one(tmp_path: Path) -> None:
    assert class_name(str(tmp_path), None) is None
    assert read_tokenizer(str(tmp_path), None) is None
