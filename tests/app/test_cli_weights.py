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
    found = _generate(cli, tiny, "--draft", tiny, option, "int3")
    assert found.code == 2
    assert "auto, int8, int4, bf16" in found.err
    assert "'int3'" in found.err


@pytest.mark.parametrize("bits", [4, 8])
def test_the_targets_own_rounded_weights_draft_for_it(cli: Run, tiny: Path, bits: int) -> None:
    plain = json.loads(_generate(cli, tiny, "--dtype", "fp32", "--tree", "off", "--json").out)
    found = _generate(cli, tiny, "--dtype", "fp32", "--draft", f"self:int{bits}", "--json")
    answer = json.loads(found.out)
    assert answer["token_ids"] == plain["token_ids"]
    assert (answer["draft"], answer["dtype"], answer["draft_dtype"]) == (f"self:int{bits}", "fp32", f"int{bits}")
    assert answer["draft_path"] == f"lean decoder, int{bits}"


def test_the_heading_says_the_drafts_format_once(cli: Run, tiny: Path) -> None:
    found = _generate(cli, tiny, "--draft", "self:int4", "--stats")
    assert "draft self:int4 " in found.err
    assert "self:int4 ·" not in found.err
    assert "draft passes: lean decoder, int4" in found.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "self:int3"], "a draft of the target's own weights is self:int4 or self:int8, not 'self:int3'"),
        (["--draft", "self"], "is self:int4 or self:int8, not 'self'"),
        (["--draft", "self:int4", "--draft-dtype", "int8"], "self:int4 names its own number format"),
    ],
)
def test_own_weights_that_there_are_not_are_refused(cli: Run, tiny: Path, options: list[str], message: str) -> None:
    found = _generate(cli, tiny, *options)
    assert found.code == 2
    assert message in " ".join(found.err.split())


def test_the_ngram_draft_has_no_weights_to_quantise(cli: Run, tiny: Path) -> None:
    found = _generate(cli, tiny, "--draft-dtype", "int8")
    assert found.code == 2
    assert "no model" in found.err
