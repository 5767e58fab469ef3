"""Counts of earlier answers: read from what the command line printed, and merged into a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sequoia.errors import FileError
from sequoia.measure.runs import RunCounts, merged, read_runs
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

ANSWER: dict[str, Any] = {
    "target": "big",
    "draft": "n-gram",
    "params": {"temperature": 0.6, "top_p": 0.9},
    "tree": {"size": 3, "depth": 1, "dynamic": False, "parents": [-1, 0, 0]},
    "plan": None,
    "stats": {"visits": [100], "accepted": [[40, 20]]},
}


def write(path: Path, *answers: Any) -> Path:
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers), encoding="utf-8")
    return path


def test_answers_are_read(tmp_path: Path):
    plain = {**ANSWER, "stats": {"visits": [], "accepted": []}, "tree": {"size": 1, "parents": [-1]}}
    first, second = read_runs(write(tmp_path / "answers.jsonl", ANSWER, plain))
    shape = TreeShape([-1, 0, 0])
    assert first == RunCounts("big", "ngram", {"temperature": 0.6, "top_p": 0.9}, shape, (100,), ((40, 20),))
    assert (first.rounds, second.rounds) == (100, 0)


def test_a_tree_that_changed_is_not_believed(tmp_path: Path):
    event = {"at_token": 9, "from": "tree", "to": "chain", "reason": "slow"}
    guarded = {**ANSWER, "plan": {"kind": "tree", "guard": [event]}}
    steady = {**ANSWER, "plan": {"kind": "tree", "guard": []}}
    dynamic = {**ANSWER, "tree": {"size": 3, "depth": 1, "dynamic": True, "parents": None}}
    shapes = [run.shape for run in read_runs(write(tmp_path / "answers.jsonl", guarded, steady, dynamic))]
    assert shapes == [None, TreeShape([-1, 0, 0]), None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no answers"),
        ("{}\n", "line 1 is no answer of `sequoia generate --json`: 'stats' is missing"),
        (json.dumps(ANSWER) + "\nnonsense\n", "line 2 is no answer"),
        (json.dumps({**ANSWER, "params": {"heat": 1}}), "unknown sampling parameter 'heat'"),
        (json.dumps({**ANSWER, "stats": {"visits": [1], "accepted": []}}), "different lengths"),
        (json.dumps({**ANSWER, "stats": {"visits": [-1], "accepted": [[]]}}), "visits must be an integer"),
        ("[]\n", "line 1 is no answer"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: str, message: str):
    path = tmp_path / "answers.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(FileError, match=message):
        read_runs(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(FileError, match=r"cannot read .*none\.jsonl"):
        read_runs(tmp_path / "none.jsonl")


def test_counts_weigh_as_much_as_measured_visits():
    profile = AcceptanceProfile([[0.2, 0.1]], {"visits": [100.0]})
    run = RunCounts("big", "ngram", {"temperature": 0.6}, TreeShape([-1, 0, 0]), (100,), ((40, 20),))
    found = merged(profile, [run])
    # Rank 1 has its trials where rank 0 was rejected; of the measured ones its share is 0.125.
    second = (100 * 0.125 + 20) / (100 + 60)
    assert found.rates[0] == pytest.approx((0.3, 0.7 * second))
    assert found.provenance["rounds_of_runs"] == 100
    assert merged(profile, []).rates[0] == pytest.approx(profile.rates[0])
