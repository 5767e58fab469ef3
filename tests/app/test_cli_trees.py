"""`sequoia tree`: drawings, plans and files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sequoia.app.trees import EngineName, Format
from sequoia.model.torch_files import to_bytes
from sequoia.tree.advice import ENGINES
from sequoia.tree.formats import WRITERS, growmap
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.plan import PAIR_KEYS, BatchOption, Option, Plan, PlanFile, Prediction
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


SHAPE = TreeShape([-1, 0, 0, 1, 1, 3])
BACK = {"growmap": "out.pt", "umbrella": "out.json", "medusa": "out.json", "sequoia": "out.json"}


def plan_file(*temperatures: float) -> PlanFile:
    def option(kind, shape, seconds):
        return Option(kind, shape, Prediction(1.0, 0.0, seconds, 0.0))

    def plan(temperature):
        tree = option("tree", TreeShape.beam(2 + round(temperature), 2), 1.0)
        options = (option("off", TreeShape.root_only(), 3.0), option("chain", TreeShape.chain(3), 2.0), tree)
        return Plan({"temperature": temperature, "top_p": 0.9}, PROFILE, options)  # at temperature 0 it means nothing

    latency = LatencyProfile({128: {1: Timing(1.0, 0.0)}}, {1: Timing(0.1, 0.0)}, {}, {})
    batch = (BatchOption(8, (option("off", TreeShape.root_only(), 3.0),), False),)
    return PlanFile(dict.fromkeys(PAIR_KEYS, "x"), {}, {}, latency, tuple(map(plan, temperatures)), batch)


@pytest.mark.parametrize(("kind", "name"), BACK.items())
def test_convert_there_and_back(cli, tmp_path, kind, name):
    SHAPE.save(tmp_path / "shape.json")
    outcome = cli("tree", "convert", tmp_path / "shape.json", tmp_path / name, "--to", kind)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"wrote {tmp_path / name}: {kind}, 6 nodes, depth 3\n"
    assert cli("tree", "show", tmp_path / name).out == SHAPE.draw() + "\n"
    assert cli("tree", "convert", tmp_path / name, tmp_path / "back.json").code == 0
    assert TreeShape.load(tmp_path / "back.json") == SHAPE
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["back.json", name, "shape.json"])


def test_convert_goes_by_the_suffix(cli, tmp_path):
    (tmp_path / "choices.json").write_text("[[0], [0, 0], [1]]")
    assert "growmap, 4 nodes" in cli("tree", "convert", tmp_path / "choices.json", tmp_path / "out.pt").err
    assert "sequoia, 4 nodes" in cli("tree", "convert", tmp_path / "out.pt", tmp_path / "out.json").err


@pytest.mark.parametrize("name", ["vector.json", "vector.pt"])
def test_convert_makes_profiles_of_vectors(cli, tmp_path, name):
    (tmp_path / "vector.json").write_text("[0, 0.5, 0.25, 0.25]")
    (tmp_path / "vector.pt").write_bytes(to_bytes(np.array([0, 0.5, 0.25, 0.25], dtype=np.float32)))
    outcome = cli("tree", "convert", tmp_path / name, tmp_path / "profile.json")
    assert outcome.err.endswith("profile, 2 ranks; the last entry, 0.25, is the share with all rejected\n")
    assert AcceptanceProfile.load(tmp_path / "profile.json").rates == ((0.5, 0.25),)
    assert cli("tree", "optimal", "4x3", "--profile", tmp_path / "profile.json").code == 0
    outcome = cli("tree", "convert", tmp_path / name, tmp_path / "out.pt")
    assert (outcome.code, outcome.err.startswith("error: acceptance rates become a profile")) == (2, True)
    assert "holds acceptance rates" in cli("tree", "show", tmp_path / name).err


def test_plans_are_shown_and_converted(cli, tmp_path):
    plan_file(0.0, 1.0).save(tmp_path / "plan.json")
    first, second = TreeShape.beam(2, 2), TreeShape.beam(3, 2)
    outcome = cli("tree", "show", tmp_path / "plan.json")
    assert outcome.out == first.draw(PROFILE) + "\n"
    assert outcome.err == "for temperature 0; there are plans for 0, 1: --temperature\n"
    outcome = cli("tree", "show", tmp_path / "plan.json", "--temperature", "1")
    assert (outcome.out, outcome.err) == (second.draw(PROFILE) + "\n", "")
    cli("tree", "convert", tmp_path / "plan.json", tmp_path / "out.json", "--temperature", "1")
    assert TreeShape.load(tmp_path / "out.json") == second
    outcome = cli("tree", "show", tmp_path / "plan.json", "--temperature", "0.5")
    assert (outcome.code, outcome.err) == (2, "error: no plan for temperature 0.5. There are plans for 0, 1.\n")


def test_advice_is_text_to_paste(cli, tmp_path):
    plan_file(0.0).save(tmp_path / "plan.json")
    outcome = cli("tree", "advise", tmp_path / "plan.json", "--engine", "vllm")
    assert json.loads(outcome.out) == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 8, 0]],
    }
    assert "Add method and model" in outcome.err
    outcome = cli("tree", "advise", "chain:3", "--engine", "sglang")
    assert outcome.out == "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n"
    assert "max_total_draft_tokens: 15" in cli("tree", "advise", "optimal:16x4", "--engine", "trtllm").out
    outcome = cli("tree", "advise", "off", "--engine", "trtllm")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "This is plain decoding: leave speculation off.\n")


def test_a_form_is_no_file_of_that_name(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "off").write_text("nothing")
    assert cli("tree", "show", "off").out == TreeShape.root_only().draw() + "\n"


def test_the_names_are_those_of_the_library():
    assert [kind.value for kind in Format] == list(WRITERS)
    assert tuple(name.value for name in EngineName) == ENGINES


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["convert", "missing.pt", "out.json"], 1, "cannot read missing.pt"),
        (["convert", "missing.json", "out.json"], 1, "cannot read missing.json"),
        (["convert", "damaged.json", "out.json"], 1, "damaged.json is not valid JSON"),
        (["convert", "damaged.pt", "out.json"], 1, "damaged.pt is no torch file"),
        (["convert", "gap.json", "out.json"], 1, "gap.json: choices[1] is [2], but its sibling [1] is missing"),
        (["convert", "wrong.pt", "out.json"], 1, "wrong.pt: mask[2][1] must be 0, as Successors imply, not 1"),
        (["convert", "wrong.json", "out.json"], 1, "wrong.json: mask[2][1] must be 0, as Successors imply, not 1"),
        (["convert", "plan.json", "out.json"], 1, "plan.json: key 'batch' is missing"),
        (["convert", "shape.json", "out.json", "--to", "growmap"], 2, "Name it out.pt, or use --to umbrella"),
        (["convert", "shape.json", "out.pt", "--to", "medusa"], 2, "Use another suffix"),
        (["convert", "shape.json", "none/out.json"], 1, "cannot write none/out.json"),
        (["convert", "shape.json", "none/out.pt"], 1, "cannot write none/out.pt"),
        (["convert", "profile.json", "out.json", "--to", "medusa"], 2, "become a profile of ours"),
        (["convert", "shape.json", "out.json", "--to", "yaml"], 2, "'yaml' is not one of"),
        (["advise", "kary:2x2", "--engine", "vllm"], 2, "vLLM drafts chains only"),
        (["advise", "dynamic:8x4", "--engine", "sglang"], 2, "a dynamic tree has no shape of its own"),
        (["advise", "forest", "--engine", "sglang"], 2, "tree forest: no such form"),
        (["advise", "profile.json", "--engine", "sglang"], 1, "profile.json holds acceptance rates, not a tree"),
        (["advise", "chain:2"], 2, "missing option '--engine'"),
        (["show", "wrong.pt"], 1, "wrong.pt: mask[2][1] must be 0"),
    ],
)
def test_errors_with_other_tools_files(cli, tmp_path, monkeypatch, profile_file, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    SHAPE.save("shape.json")
    (tmp_path / "damaged.json").write_text('{"size": ')
    (tmp_path / "damaged.pt").write_bytes(to_bytes([1])[:-40])
    (tmp_path / "gap.json").write_text("[[0], [2]]")
    wrong = growmap(SHAPE)
    wrong["mask"][2, 1] = 1
    (tmp_path / "wrong.pt").write_bytes(to_bytes(wrong))
    (tmp_path / "wrong.json").write_text(json.dumps(wrong | {key: wrong[key].tolist() for key in ("mask", "depth")}))
    record = plan_file(0.0).to_dict()
    del record["batch"]
    (tmp_path / "plan.json").write_text(json.dumps(record))
    before = sorted(tmp_path.iterdir())
    outcome = cli("tree", *arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert sorted(tmp_path.iterdir()) == before
