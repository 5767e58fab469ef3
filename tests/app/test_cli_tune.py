"""`sequoia tune` on a tiny model: table, files, the plan that is used from then on, and how it ends when stopped."""

from __future__ import annotations

import inspect
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import start

import sequoia.measure.tune as tune_module
from sequoia.app.tune import BATCHES, TEMPERATURES, tune
from sequoia.measure.tune import TuneSettings
from sequoia.tree.plan import PlanFile

QUICK = ["--samples", 4, "--tokens", 6, "--seconds", 0, "--max-size", 6, "--max-depth", 3, "--batch", "1,4"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sequoia"


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs beside the tests."""
    monkeypatch.setattr("sequoia.app.tune._BUSY", float("inf"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{3 + n} w{4 + n}"}) + "\n" for n in range(3)), encoding="utf-8")
    return path


@pytest.fixture
def arguments(tiny: Path, prompts: Path) -> list[Any]:
    return ["tune", "--target", tiny, "--dtype", "fp32", "--prompts", prompts, "--temperature", "0,0.6", *QUICK]


def test_a_tuning_shows_its_tables_and_is_used_from_then_on(cli, arguments, tiny, cache):
    outcome = cli(*arguments)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert [line for line in lines if line.startswith("temperature")] == ["temperature 0", "temperature 0.6"]
    assert len([line for line in lines if line.startswith("▸ ")]) == 2
    assert len(re.findall(r"^[▸ ] off +1\.00 +\d+\.\d +\d+", outcome.out, re.MULTILINE)) == 2
    assert (
        len(re.findall(r"^[▸ ] chain \d +\d\.\d\d +\d+\.\d +\d+\S*( ± \d+\.\d)? +\d+\.\d\d× plain$", outcome.out, re.M))
        == 2
    )
    assert re.fullmatch(r"requests at once, on paper · 4: .+", lines[-1])
    assert outcome.err.splitlines() == [
        "tiny · draft ngram · fp32 · cpu · 1 thread",
        "accepting: 0/7 texts",
        "timing: 0/4 sweeps",
        "planning: 0/2 plans",
        "saved; used from now on for this pair",
    ]
    assert list((cache / "tunings").iterdir()) == []
    (kept,) = (cache / "plans").iterdir()
    chosen = PlanFile.load(kept).plans[1].chosen

    answer = cli("generate", "w3 w4", "--target", tiny, "--dtype", "fp32", "--temperature", "0.6", "--json")
    assert json.loads(answer.out)["plan"]["predicted"] == chosen.prediction.to_dict()


def test_plan_and_report_go_where_they_are_wanted(cli, arguments, tmp_path, cache):
    plan, report = tmp_path / "plan.json", tmp_path / "tune.html"
    outcome = cli(*arguments, "--out", plan, "--report", report)
    assert outcome.err.splitlines()[-1] == (
        f"saved; used from now on for this pair · also in {plan} · report: {report}"
    )
    (kept,) = (cache / "plans").iterdir()
    assert plan.read_bytes() == kept.read_bytes()
    assert "<html" in report.read_text(encoding="utf-8")
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_json_is_the_plan_file_and_where_it_is(cli, arguments, tmp_path, cache):
    outcome = cli(*arguments, "--json", "--out", tmp_path / "plan.json", "--top-k", 5)
    assert outcome.out.count("\n") == 1
    record = json.loads(outcome.out)
    (kept,) = (cache / "plans").iterdir()
    assert (record.pop("kept"), record.pop("out"), record.pop("report")) == (
        str(kept),
        str(tmp_path / "plan.json"),
        None,
    )
    file = PlanFile.from_dict(record)
    assert file.to_dict() == PlanFile.load(kept).to_dict()
    assert [plan.params for plan in file.plans] == [{"temperature": 0.0}, {"temperature": 0.6, "top_k": 5}]
    assert file.data["prompts"][0].endswith("prompts.jsonl")


def test_a_stopped_tuning_goes_on(cli, arguments, cache, monkeypatch):
    timed = tune_module.measure_latency

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_module, "measure_latency", stop)
    outcome = cli(*arguments)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[-1].startswith("stopped. The same command goes on")
    (folder,) = (cache / "tunings").iterdir()
    assert not (cache / "plans").exists()

    monkeypatch.setattr(tune_module, "measure_latency", timed)
    monkeypatch.setattr(
        "sequoia.measure.acceptance.write_texts", lambda *args: [] if not args[2] else pytest.fail("written again")
    )
    outcome = cli(*arguments)
    assert outcome.code == 0
    assert not folder.exists()


def test_ctrl_c_in_a_real_process(arguments, cache, tmp_path):
    environment = {"XDG_CACHE_HOME": str(cache.parent)}
    process = start(*arguments[:-10], "--samples", 4, "--tokens", 6, "--seconds", 600, "--max-size", 6, env=environment)
    deadline = time.monotonic() + 120
    while not list(cache.glob("tunings/*/timings.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("stopped. The same command goes on")
    assert "Traceback" not in err


def test_answers_are_merged_in(cli, arguments, tiny, tmp_path):
    asked = ["generate", "w3 w4", "--target", tiny, "--dtype", "fp32", "--temperature", "0.6", "--json"]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(cli(*asked, "--tree", "optimal:6x3").out for _ in range(2)), encoding="utf-8")
    outcome = cli(*arguments, "--json", "--from-run", answers)
    plans = PlanFile.from_dict({k: v for k, v in json.loads(outcome.out).items() if k not in ("kept", "out", "report")})
    rounds = [plan.profile.provenance.get("rounds_of_runs", 0) for plan in plans.plans]
    assert rounds[0] == 0
    assert rounds[1] > 0

    outcome = cli(*arguments, "--temperature", "0", "--from-run", answers)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith(
        "error: a run had temperature 0.6, and plans are made for temperature 0."
    )


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--temperature", "warm"], 2, "--temperature takes numbers with commas between them"),
        (["--temperature", "-1"], 2, "temperature must be a number of at least 0"),
        (["--batch", "1,x"], 2, "--batch takes integers with commas between them"),
        (["--batch", "0"], 2, "batch must be an integer of at least 1"),
        (["--report", "page.pdf"], 2, "--report writes an HTML page, and page.pdf ends in .pdf"),
        (["--out", "nowhere/plan.json"], 1, "--out nowhere/plan.json: there is no folder nowhere. Make it first"),
        (["--out", "."], 1, "--out . is a folder"),
        (["--prompts", "none.jsonl"], 1, "cannot read none.jsonl"),
        (["--from-run", "none.jsonl"], 1, "cannot read none.jsonl"),
        (["--samples", "0"], 2, "invalid value for '--samples'"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(cli, monkeypatch, extra, code, message):
    monkeypatch.setattr("sequoia.engine.load", lambda *_, **__: pytest.fail("loaded"))
    outcome = cli("tune", *extra)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith(f"error: {message}")
    assert outcome.err.count("\n") == 1


def test_a_busy_machine_is_told(cli, arguments, monkeypatch):
    monkeypatch.setattr("sequoia.app.tune._BUSY", -1.0)
    err = cli(*arguments).err
    assert re.search(r"^the machine was busy: times of the same pass scatter by \d+%\. Tune again", err, re.MULTILINE)


def test_defaults_are_those_of_the_settings():
    defaults = {name: parameter.default for name, parameter in inspect.signature(tune).parameters.items()}
    settings = TuneSettings(params=(tune_module.SamplingParams(),))
    for name in ("samples", "tokens", "prompt_tokens", "seed", "seconds", "max_size", "max_depth"):
        assert defaults[name] == getattr(settings, name)
    assert ",".join(map(str, settings.batch)) == BATCHES
    assert len(TEMPERATURES.split(",")) == 3
