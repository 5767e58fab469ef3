"""`--dtype int8`, `--weights` and `--draft-dtype`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome

Run = Callable[..., Outcome]


def _generate(cli: Run, tiny: Path, *options: Any) -> Outcome:
    return cli(
        "generate", "w6 w7 w8", "--target", tiny, "--device", "cpu", "--max-tokens", 12, "--ignore-eos", *options
    )


@pytest.mark.parametrize("name", ["--dtype", "--weights"])
def test_int8_is_said_in_the_heading(cli: Run, tiny: Path, name: str) -> None:
    found = _generate(cli, tiny, name, "int8")
    assert found.code == 0, found.err
    assert "· int8 ·" in found.err


def test_int8_says_the_same_with_a_tree_and_without(cli: Run, tiny: Path) -> None:
    trees = ("off", "optimal:16x4", "dynamic:8x3")
    found = [json.loads(_generate(cli, tiny, "--dtype", "int8", "--tree", tree, "--json").out) for tree in trees]
    assert [entry["dtype"] for entry in found] == ["int8"] * 3
    assert found[0]["token_ids"] == found[1]["token_ids"] == found[2]["token_ids"]


def test_a_draft_in_int8_changes_nothing_that_is_said(cli: Run, tiny: Path) -> None:
    formats = ("auto", "int8", "fp32")
    found = [
        _generate(cli, tiny, "--dtype", "fp32", "--draft", tiny, "--draft-dtype", name, "--json") for name in formats
    ]
    answers = [json.loads(entry.out) for entry in found]
    assert {answer["dtype"] for answer in answers} == {"fp32"}
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
    assert answers[1]["draft_dtype"] == "int8"
    assert answers[2]["draft_dtype"] == "fp32"


@pytest.mark.parametrize("option", ["--dtype", "--draft-dtype"])
def test_an_unknown_format_lists_the_choices(cli: Run, tiny: Path, option: str) -> None:
    found = _generate(cli, tiny, "--draft", tiny, option, "int4")
    assert found.code == 2
    assert "auto, int8, bf16" in found.err
    assert "'int4'" in found.err


def test_the_ngram_draft_has_no_weights_to_quantise(cli: Run, tiny: Path) -> None:
    found = _generate(cli, tiny, "--draft-dtype", "int8")
    assert found.code == 2
    assert "no model" in found.err
