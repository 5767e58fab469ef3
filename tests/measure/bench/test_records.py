"""The results file: what goes in comes out, a killed run leaves it usable, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import GREEDY, SAMPLED, entry, result, run_entry

from sequoia.errors import FileError
from sequoia.measure.bench.records import Finding, Results, ResultsFile, RoundEntry

RUN = run_entry([entry("plain"), entry("optimal:16x4", 16, "optimal")], (GREEDY, SAMPLED), ["p1", "p2"])
TIE = Finding("optimal:16x4", GREEDY, "p1", 0, "near tie", "two logits are equal")
ROUND = RoundEntry("optimal:16x4", "p1", (-1, 0, 0, 2), ("so", "a", "“b”", "c↵"), (2, 3), "d")


@pytest.fixture
def file(tmp_path: Path) -> ResultsFile:
    file = ResultsFile(tmp_path / "new" / "folder")
    file.create(RUN)
    return file


def test_everything_comes_back(file: ResultsFile) -> None:
    results = [result("plain"), result("optimal:16x4", setting=SAMPLED, repeat=1, passes=None)]
    file.append([ROUND, TIE, *results])
    loaded = file.load()
    assert loaded == Results(loaded.run, results, [TIE], [ROUND])
    assert (loaded.run.methods, loaded.run.sampling, loaded.run.prompts) == (RUN.methods, RUN.sampling, RUN.prompts)
    assert (loaded.run.settings, loaded.run.machine) == (RUN.settings, RUN.machine)


def test_half_a_line_is_not_read_and_mended_away(file: ResultsFile) -> None:
    file.append([result("plain")])
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + b'{"entry": "result", "met')
    assert file.load().results == [result("plain")]
    assert file.path.read_bytes() != whole  # another process may be writing it
    file.mend()
    assert file.path.read_bytes() == whole
    file.append([result("plain", "p2")])
    assert file.load().results == [result("plain"), result("plain", "p2")]


def test_a_finding_counts_once(file: ResultsFile) -> None:
    file.append([TIE])
    file.append([TIE])
    assert file.load().findings == [TIE]


def test_only_a_near_tie_is_no_fault() -> None:
    wrong = Finding("plain", GREEDY, "p1", 0, "early end", "too short")
    assert Results(RUN, [], [TIE, wrong]).faults == [wrong]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not start with the description of a run"),
        ("half a line", "does not start with the description of a run"),
        ("nonsense\n", "line 1 is no result"),
        ('{"entry": "result"}\n', "line 1 is no result"),
        ("[1]\n", "line 1 is no result"),
        (
            '{"entry": "run", "format": "sequoia-bench", "version": 99}\n',
            "must be sequoia-bench 1, not sequoia-bench 9",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = ResultsFile(tmp_path)
    file.path.write_text(text)
    with pytest.raises(FileError, match=message):
        file.load()


def test_damage_behind_the_first_line_is_named(file: ResultsFile) -> None:
    file.append([result("plain")])
    first, second = file.path.read_text().splitlines()
    for line, message in [
        (first, "line 3 describes a second run"),
        (json.dumps(json.loads(second) | {"mood": "good"}), "line 3 is no result: .*mood"),
        (json.dumps(json.loads(second) | {"entry": "song"}), "line 3 is no result: 'song'"),
    ]:
        file.path.write_text("\n".join([first, second, line, ""]))
        with pytest.raises(FileError, match=message):
            file.load()


def test_a_missing_file_and_an_unwritable_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read .*No such file"):
        ResultsFile(tmp_path / "nowhere").load()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        ResultsFile(tmp_path / "file" / "folder").create(RUN)


def test_what_a_result_comes_to() -> None:
    steady = result("plain", seconds=2.0)  # 11 tokens, one at 0.1 s and ten in two seconds
    assert (steady.first_token_seconds, steady.decoded_tokens) == (0.1, 10)
    assert steady.decode_seconds == pytest.approx(2.0)
    assert steady.tokens_per_second == pytest.approx(5.0)
    assert result("plain", passes=4).mean_accepted_length == 11 / 4
    assert result("plain", passes=None).mean_accepted_length is None


def test_what_cannot_be_said_is_none() -> None:
    at_once = result("plain", seconds=None)
    assert (at_once.decoded_tokens, at_once.tokens_per_second) == (0, None)
    nothing = result("plain", tokens=(), seconds=None)
    nothing = type(nothing)(**{**vars(nothing), "counts": (), "times": (), "passes": 0})
    assert (nothing.first_token_seconds, nothing.decode_seconds, nothing.decoded_tokens) == (None, 0.0, 0)
    assert (nothing.tokens_per_second, nothing.mean_accepted_length) == (None, None)
