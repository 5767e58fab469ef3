"""`sequoia generate` by a plan: what it takes, what it refuses, what it tells."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import sequoia.engine
from sequoia import load
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option, Prediction, kind_of
from sequoia.tree.plan import Plan, PlanFile
from sequoia.tree.plan_cache import store
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

FP32 = ["--dtype", "fp32", "--device", "cpu"]
LONG = ["--ignore-eos", "--max-tokens", "24"]


def _option(shape, tokens, seconds):
    return Option(kind_of(shape), shape, Prediction(tokens, 0.08, seconds, 0.0005))


def _plan_file(pair, tokens=2.61, date="2020-11-29"):
    """Its best tree has 7 nodes; the seconds are so long that no guard finds a round slow."""
    options = (_option(TreeShape.root_only(), 1.0, 20.0), _option(TreeShape.kary(2, 2), tokens, 47.9))
    plan = Plan({"temperature": 0.0}, AcceptanceProfile([[0.5, 0.2]]), options)
    latency = LatencyProfile({64: {1: Timing(20.0, 0.1), 16: Timing(47.9, 0.1)}}, {1: Timing(0.1, 0.0)}, {})
    return PlanFile(pair, {}, {"date": date} if date else {}, latency, (plan,))


@pytest.fixture(scope="module")
def pair(tiny):
    return load(str(tiny), tree="off", dtype="fp32", device="cpu").pair


@pytest.fixture
def saved(pair, tmp_path):
    _plan_file(pair).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_file_chooses_the_tree(cli, tiny, saved):
    planned = cli("generate", "w3 w4", "--target", tiny, *FP32, *LONG, "--plan", saved)
    plain = cli("generate", "w3 w4", "--target", tiny, *FP32, *LONG, "--tree", "off")
    assert (planned.code, planned.out) == (0, plain.out)
    heading, closing = planned.err.splitlines()
    assert heading.endswith("tree 7 nodes, depth 2 (plan of 29 Nov 2020)")
    assert "tree 7 nodes, depth 2 · finish: length" in closing


@pytest.mark.parametrize("date", [None, "soon"])
def test_a_plan_without_a_date_has_none_in_the_heading(cli, tiny, pair, tmp_path, date):
    _plan_file(pair, date=date).save(tmp_path / "plan.json")
    outcome = cli("generate", "w3", "--target", tiny, *FP32, *LONG, "--plan", tmp_path / "plan.json")
    assert outcome.err.splitlines()[0].endswith("depth 2 (plan)")


def test_a_plan_tuned_earlier_is_used(cli, tiny, pair):
    store(_plan_file(pair))
    outcome = cli("generate", "w3", "--target", tiny, *FP32, *LONG)
    assert "tree 7 nodes, depth 2 (plan of 29 Nov 2020)" in outcome.err
    for other in (["--tree", "chain:3"], ["--tree", "optimal:16x4"], ["--dtype", "bf16"]):
        assert "plan" not in cli("generate", "w3", "--target", tiny, *FP32, *LONG, *other).err


def test_a_plan_that_chose_off_says_so(cli, tiny, pair):
    store(_plan_file(pair, tokens=1.2))
    outcome = cli("generate", "w3", "--target", tiny, *FP32, *LONG)
    assert "tree off (plan of 29 Nov 2020)" in outcome.err
    assert "1.00 tokens per round · tree off" in outcome.err


def test_what_differs_is_one_line(cli, tiny, saved):
    flags = ["--temperature", "0.7", "--seed", "1"]
    outcome = cli("generate", "w3", "--target", tiny, *FP32, *LONG, "--plan", saved, *flags)
    notice, heading, _ = outcome.err.splitlines()
    assert notice == (
        "plan.json was tuned for temperature 0, not temperature 0.7. Its predictions may be off: run `sequoia tune`."
    )
    assert "plan of" in heading


def test_another_pairs_plan_is_refused(cli, tiny, pair, tmp_path):
    _plan_file(pair | {"target": "Qwen3-8B"}).save(tmp_path / "plan.json")
    outcome = cli("generate", "w3", "--target", tiny, *FP32, "--plan", tmp_path / "plan.json")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "error: plan.json was tuned for Qwen3-8B, not tiny. Run `sequoia tune` for this pair.\n"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--plan", "plan.json", "--tree", "chain:2"], 2, "--plan chooses the tree, and so does --tree chain:2"),
        (["--plan", "plan.json", "--profile", "x.json"], 2, "--plan chooses the tree, and so does --profile"),
        (["--plan", "missing.json"], 1, "cannot read missing.json"),
        (["--plan", "damaged.json"], 1, "damaged.json is not valid JSON"),
        (["--plan", "shape.json"], 1, "shape.json: format must be 'sequoia-plan'"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(cli, saved, tmp_path, monkeypatch, flags, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sequoia.engine, "load", lambda *_, **__: pytest.fail("loads a model"))
    (tmp_path / "damaged.json").write_text('{"format": ')
    TreeShape.chain(2).save(tmp_path / "shape.json")
    outcome = cli("generate", "hi", *flags)
    assert outcome.code == code
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


def test_stats_hold_the_prediction_against_what_was_measured(cli, tiny, saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    options = (_option(TreeShape.root_only(), 1.0, 0.0284), _option(TreeShape.kary(2, 2), 2.61, 0.0479))
    file = PlanFile.load(saved)
    replace(file, plans=(replace(file.plans[0], options=options),)).save(saved)
    flags = ["--plan", saved, "--stats", "--no-guard"]
    outcome = cli("generate", "w3 w4", "--target", tiny, *FP32, *LONG, *flags)
    table = outcome.err.splitlines()[1:-1]
    assert max(map(len, table)) <= 40
    start = table.index(next(line for line in table if line.startswith("tree 7/2")))
    assert table[start].split()[-2:] == ["predicted", "measured"]
    assert re.fullmatch(r"tokens per round +2\.61 ± 0\.08 +\d\.\d\d", table[start + 1])
    assert re.fullmatch(r"ms per round +47\.9 ± 0\.5 +[\d.]+", table[start + 2])


def test_stats_before_anything_was_measured(cli, tiny, saved):
    outcome = cli("generate", "w3", "--target", tiny, *FP32, "--max-tokens", "1", "--plan", saved, "--stats")
    assert re.search(r"^tokens per round +2\.61 ± 0\.08 +–$", outcome.err, re.MULTILINE)


def test_json_holds_it_too(cli, tiny, saved):
    found = json.loads(cli("generate", "w3 w4", "--target", tiny, *FP32, *LONG, "--plan", saved, "--json").out)
    plan = found["plan"]
    measured = plan["measured"].pop("tree")
    assert plan == {
        "kind": "tree",
        "predicted": {"tokens_per_round": 2.61, "tokens_error": 0.08, "seconds_per_round": 47.9, "seconds_error": 5e-4},
        "measured": {},
        "guard": [],
    }
    assert measured["rounds"] > 0
    assert 1 <= measured["tokens_per_round"] <= 3
    assert 0 < measured["seconds_per_round"] < 40
    assert (found["tree"]["size"], found["tree"]["depth"]) == (7, 2)


@pytest.fixture
def slow_plan(pair, tmp_path):
    """Plain decoding is said to be free, nearly: the guard must leave the tree."""
    options = (_option(TreeShape.root_only(), 1.0, 2e-9), _option(TreeShape.kary(2, 2), 3.0, 3e-9))
    plan = Plan({"temperature": 0.0}, AcceptanceProfile([[0.5, 0.2]]), options)
    latency = LatencyProfile({64: {1: Timing(2e-9, 0.0), 16: Timing(3e-9, 0.0)}}, {1: Timing(0.0, 0.0)}, {})
    PlanFile(pair, {}, {}, latency, (plan,)).save(tmp_path / "slow.json")
    return tmp_path / "slow.json"


def test_what_the_guard_did_is_told(cli, tiny, slow_plan):
    flags = ["--plan", slow_plan, "--stats", "--ignore-eos", "--max-tokens", "80"]
    outcome = cli("generate", "w3 w4", "--target", tiny, *FP32, *flags)
    assert re.search(r"^guard: tree → off at token \d+: slower than plain decoding$", outcome.err, re.MULTILINE)
    assert re.search(r"^rounds: tree \d+, off \d+$", outcome.err, re.MULTILINE)
    events = json.loads(cli("generate", "w3 w4", "--target", tiny, *FP32, *flags, "--json").out)["plan"]["guard"]
    assert (events[0]["from"], events[0]["to"]) == ("tree", "off")
    assert 0 < events[0]["at_token"] < 80


def test_no_guard(cli, tiny, slow_plan):
    flags = ["--plan", slow_plan, "--no-guard", "--json", "--ignore-eos", "--max-tokens", "80"]
    found = json.loads(cli("generate", "w3 w4", "--target", tiny, *FP32, *flags).out)
    assert found["plan"]["guard"] == []
    assert list(found["plan"]["measured"]) == ["tree"]


def test_no_guard_without_a_plan_is_told(cli, tiny):
    outcome = cli("generate", "w3", "--target", tiny, *FP32, *LONG, "--no-guard")
    assert "without a plan there is no guard, and --no-guard changes nothing\n" in outcome.err


def test_stats_say_which_path_runs(cli, tiny):
    flags = ["--target", tiny, "--device", "cpu", "--dtype", "bf16", "--max-tokens", "2", "--stats"]
    assert re.search(r"^target passes: lean decoder, (packed )?bf16$", cli("generate", "w3", *flags).err, re.MULTILINE)
