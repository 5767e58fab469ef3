"""`sequoia tree`: drawings, plans and files."""

from __future__ import annotations

import json

import pytest

from sequoia.tree.planner import expected_tokens, optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

PROFILE = AcceptanceProfile([[0.6, 0.2], [0.5, 0.25]], {"source": "a test"})


@pytest.fixture
def profile_file(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_show_draws_the_topology(cli):
    outcome = cli("tree", "show", "beam:4x6")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == TreeShape.beam(4, 6).draw() + "\n"


def test_show_reads_files_and_profiles(cli, tmp_path, profile_file):
    TreeShape.kary(2, 3).save(tmp_path / "shape.json")
    outcome = cli("tree", "show", tmp_path / "shape.json", "--profile", profile_file)
    assert outcome.code == 0
    assert outcome.out == TreeShape.kary(2, 3).draw(PROFILE) + "\n"
    assert f"{expected_tokens(TreeShape.kary(2, 3), PROFILE):.3f} expected tokens" in outcome.out


def test_show_plans_with_the_shipped_rates_like_generate_does(cli):
    rates = AcceptanceProfile.shipped("ngram")
    assert cli("tree", "show", "optimal:16x4").out == optimal_shape(rates, 16, 4).draw(rates) + "\n"
    rates = AcceptanceProfile.shipped("model")
    assert cli("tree", "show", "chain:3", "--draft", "model").out == TreeShape.chain(3).draw(rates) + "\n"


def test_drawings_keep_to_the_width(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    outcome = cli("tree", "optimal", "40x12")
    assert max(map(len, outcome.out.splitlines()[1:])) <= 44


@pytest.mark.parametrize("limits", [["9", "3"], ["9x3"]])
def test_optimal_takes_both_forms(cli, profile_file, limits):
    shape = optimal_shape(PROFILE, 9, 3)
    outcome = cli("tree", "optimal", *limits, "--profile", profile_file)
    assert (outcome.code, outcome.out, outcome.err) == (0, shape.draw(PROFILE) + "\n", "")


def test_optimal_as_json(cli, profile_file):
    shape = optimal_shape(PROFILE, 9, 3)
    outcome = cli("tree", "optimal", "9x3", "--profile", profile_file, "--json")
    assert json.loads(outcome.out) == {
        "size": 9,
        "depth": 3,
        "expected_tokens": expected_tokens(shape, PROFILE),
        "parents": list(shape.parents),
        "provenance": {"source": "a test"},
    }


def test_optimal_writes_a_shape_that_show_reads(cli, tmp_path, profile_file):
    out = tmp_path / "mine.json"
    planned = cli("tree", "optimal", "9x3", "--profile", profile_file, "--out", out)
    assert planned.err == f"wrote {out}\n"
    assert TreeShape.load(out) == optimal_shape(PROFILE, 9, 3)
    assert cli("tree", "show", out, "--profile", profile_file).out == planned.out


def test_a_failed_write_leaves_nothing(cli, tmp_path):
    outcome = cli("tree", "optimal", "9x4", "--out", tmp_path / "none" / "mine.json")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: cannot write")
    assert cli("tree", "optimal", "90x1", "--out", tmp_path / "mine.json").code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "chain:-3"], 2, "depth must be an integer of at least 1, not -3"),
        (["show", "forest"], 2, "tree forest: no such form"),
        (["show", "missing.json"], 1, "cannot read missing.json"),
        (["optimal", "0x4"], 2, "size must be an integer of at least 1, not 0"),
        (["optimal", "16", "--", "-1"], 2, "depth must be an integer of at least 0, not -1"),
        (["optimal", "16"], 2, "such as 16 4 or 16x4, not '16'"),
        (["optimal", "16x4", "4"], 2, "not '16x4 4'"),
        (["optimal", "many", "4"], 2, "not 'many 4'"),
        (["optimal", "640x2"], 2, "gives at most"),
        (["optimal", "99999999x9"], 2, "65,536"),
        (["optimal", "16x4", "--profile", "missing.json"], 1, "cannot read missing.json"),
        (["optimal", "16x4", "--profile", "damaged.json"], 1, "damaged.json is not valid JSON"),
        (["optimal", "16x4", "--profile", "unknown.json"], 1, "unknown.json: unknown key 'colour'"),
        (["optimal", "16x4", "--profile", "shape.json"], 1, "another kind of record"),
        (["optimal", "16x4", "--profile", "profile.json", "--draft", "model"], 2, "Give one of them"),
        (["show", "shape.json", "--profile", "shape.json"], 1, "another kind of record"),
        (["show", "damaged.json"], 1, "damaged.json is not valid JSON"),
    ],
)
def test_errors(cli, tmp_path, monkeypatch, profile_file, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    TreeShape.chain(2).save("shape.json")
    (tmp_path / "damaged.json").write_text('{"format": ')
    (tmp_path / "unknown.json").write_text(json.dumps(PROFILE.to_dict() | {"colour": "red"}))
    outcome = cli("tree", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
