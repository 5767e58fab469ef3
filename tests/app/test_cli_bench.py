"""`sequoia bench` on a tiny model: files, table, page, resuming, and how it ends when it does not end well."""

from __future__ import annotations

import inspect
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import start

import sequoia.engine
from sequoia.app import bench
from sequoia.measure.bench import run as run_module
from sequoia.measure.bench.records import ResultsFile

METHODS = "plain,transformers,optimal:8x3"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"w{3 + n} w{4 + n} w{5 + n}", "category": "ab"[n % 2], "id": f"p{n}"} for n in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def arguments(tiny: Path, prompts: Path, tmp_path: Path) -> list[Any]:
    options = {"--target": tiny, "--dtype": "fp32", "--prompts": prompts, "--max-tokens": 8, "--out": tmp_path / "out"}
    return ["bench", "--methods", METHODS, *(part for option in options.items() for part in option)]


def test_a_run_gives_results_table_and_page(cli, arguments, tmp_path):
    outcome = cli(*arguments)
    assert (outcome.code, outcome.err) == (0, f"results go to {tmp_path / 'out'}\n")
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["report.html", "results.jsonl"]
    assert re.search(r"^plain +1\.00× ", outcome.out, re.MULTILINE)
    assert len(re.findall(r"✓ as plain$", outcome.out, re.MULTILINE)) == 2
    assert "tiny · draft ngram · fp32" in outcome.out
    results = ResultsFile(tmp_path / "out").load()
    assert len(results.results) == 3 * 4
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in METHODS.split(","))

    again = cli("bench", "report", tmp_path / "out")
    assert (again.code, again.out, again.err) == (0, outcome.out, "")
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == page


def test_a_stopped_run_goes_on(cli, arguments, tmp_path, monkeypatch):
    store, kept = run_module._Comparison._store, []

    def stop_after_two(self: Any, *parts: Any) -> None:
        store(self, *parts)
        kept.append(parts)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_module._Comparison, "_store", stop_after_two)
    outcome = cli(*arguments)
    folder = tmp_path / "out"
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[1:] == [
        f"stopped. The same command with --out {folder} goes on; sequoia bench report {folder} shows what is there."
    ]
    assert "2 of 4 prompts are done" in cli("bench", "report", folder).out

    before = (folder / "results.jsonl").read_text(encoding="utf-8")
    outcome = cli(*arguments)
    assert outcome.code == 0
    assert outcome.err == f"{folder}: going on: 2 of 4 prompts are done\n"
    assert "are done" not in outcome.out
    assert (folder / "results.jsonl").read_text(encoding="utf-8").startswith(before)
    assert len(ResultsFile(folder).load().results) == 3 * 4


@pytest.mark.slow
def test_ctrl_c_in_a_real_process(arguments, tmp_path):
    process = start(*arguments, "--max-tokens", 2000, "--repeats", 50)
    results = tmp_path / "out" / "results.jsonl"
    while not results.exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "goes on" in err
    assert "Traceback" not in err


def test_another_run_in_the_folder_is_refused(cli, arguments, tmp_path):
    cli(*arguments, "--count", 1)
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    outcome = cli(*arguments, "--count", 1, "--seed", 3)
    assert (outcome.code, outcome.out) == (2, "")
    assert "holds a run that differs: settings seed was 0 and is now 3" in outcome.err
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_lists_are_read_and_every_pair_is_run(cli, arguments, tmp_path):
    options = ("--temperature", "0,0.6", "--top-p", "1,0.9", "--count", 1, "--methods", "chain:2", "--json")
    outcome = cli(*arguments, *options)
    assert outcome.code == 0
    record = json.loads(outcome.out)
    assert [(entry["temperature"], entry["top_p"]) for entry in record["sampling"]] == [(0, 1), (0.6, 1), (0.6, 0.9)]
    assert [method["method"] for method in record["sampling"][0]["methods"]] == [*METHODS.split(","), "chain:2"]
    assert record["prompts"] == 1


def test_a_method_that_lies_is_a_failure_after_everything_is_written(cli, arguments, tmp_path):
    method = tmp_path / "liar.py"
    method.write_text(
        "def generate(engine, prompt, params, emit):\n"
        "    session = engine.session(prompt, params)\n"
        "    while session.finish_reason is None:\n"
        "        emit([(token + 1) % 20 for token in session.step().token_ids])\n",
        encoding="utf-8",
    )
    outcome = cli(*arguments, "--methods", method)
    assert outcome.code == 1
    assert re.search(r"^liar .*✗ \d wrong$", outcome.out, re.MULTILINE)
    assert "✗ liar, temperature 0, prompt p" in outcome.err
    assert (tmp_path / "out" / "report.html").exists()


def test_what_a_method_prints_stays_out_of_the_report(cli, arguments, tmp_path):
    method = tmp_path / "chatty.py"
    method.write_text(
        "def generate(engine, prompt, params, emit):\n"
        "    print('at work')\n"
        "    session = engine.session(prompt, params)\n"
        "    while session.finish_reason is None:\n"
        "        emit(session.step())\n",
        encoding="utf-8",
    )
    outcome = cli(*arguments, "--methods", method, "--json")
    assert (outcome.code, json.loads(outcome.out)["ok"]) == (0, True)
    assert "at work" in outcome.err


def test_quick_says_when_time_was_up(cli, arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "QUICK_SECONDS", 1e-6)
    outcome = cli(*arguments, "--quick")
    assert (outcome.code, "1 of 4 prompts are done" in outcome.out) == (0, True)
    assert "--quick begins no prompt after" in outcome.err
    assert cli(*arguments).err == f"{tmp_path / 'out'}: going on: 1 of 4 prompts are done\n"
    assert cli(*arguments).err == f"{tmp_path / 'out'}: all 4 prompts are done\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "warm"], "--temperature takes numbers with commas between them"),
        (["--temperature", "0,"], "--temperature takes numbers"),
        (["--temperature", "-1"], "temperature must be"),
        (["--top-p", "0"], "top_p must be"),
        (["--methods", "plain,,chain:4"], "one is empty"),
        (["--methods", "warp"], "unknown method 'warp'"),
        (["--methods", "chain:2,chain:2"], "named twice"),
        (["--prompts", "nowhere"], "'nowhere' is no source of prompts"),
        (["--count", "0"], "count must be"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--max-tokens", "9999"], "context is 4096"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--repeats", "0"], "repeats must be"),
        (["--seed", "-1"], "seed must be"),
        (["--threads", "0"], "--threads"),
        (["--threads", "100000"], "threads must be"),
        (["stray"], "no such command 'stray'"),
        (["report"], "--methods before report is for comparing"),
    ],
)
def test_misuse_is_one_line_and_code_2(cli, arguments, tmp_path, options, message):
    outcome = cli(*arguments, *options, *([tmp_path] if options == ["report"] else []))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_numbers_and_prompts_is_said_before_a_model_is_loaded(cli, arguments, monkeypatch):
    monkeypatch.setattr(sequoia.engine, "load", lambda *_, **__: pytest.fail("loaded"))
    for options in (["--temperature", "-1"], ["--prompts", "nowhere"], ["--repeats", "0"], ["--max-tokens", "0"]):
        assert cli(*arguments, *options).code == 2


@pytest.fixture
def asked(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call the command and return the job and the rest that the measuring was asked for."""
    seen: dict[str, Any] = {}

    def run_bench(engine: Any, prompts: Any, job: Any, folder: Path, **options: Any) -> Any:
        seen.update(options, prompts=prompts, job=job, folder=folder)
        raise KeyboardInterrupt

    def call(*arguments: Any) -> dict[str, Any]:
        assert cli("bench", *arguments).code == 130
        return seen

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "run_bench", run_bench)
    monkeypatch.setattr(sequoia.engine, "load", lambda *_, **__: SimpleNamespace(memory=None))
    return call


def test_defaults(asked):
    seen = asked()
    job = seen["job"]
    assert job == run_module.Job(bench.METHODS)  # and so are all its defaults
    assert len(seen["prompts"]) == 28
    assert sorted(map(len, _by_category(seen["prompts"]).values())) == [4] * 7
    assert (seen["prompt_tokens"], seen["sources"]) == (128, ["built-in"])
    assert re.fullmatch(r"bench-\d{8}-\d{6}", str(seen["folder"]))


def _by_category(prompts: list[Any]) -> dict[str, list[Any]]:
    return {name: [prompt for prompt in prompts if prompt.category == name] for name in {p.category for p in prompts}}


def test_quick_and_what_is_given_beside_it(asked):
    quick = asked("--quick")["job"]
    assert (quick.methods, quick.max_tokens, quick.seconds) == (bench.QUICK_METHODS, 48, bench.QUICK_SECONDS)
    assert quick.temperatures == (0.0,)
    given = asked("--quick", "--max-tokens", 5, "--methods", "plain", "--temperature", "0.6", "--count", 3)
    assert given["job"] == replace(quick, max_tokens=5, methods=("plain",), temperatures=(0.6,))
    assert len(given["prompts"]) == 3


def test_methods_may_be_repeated_and_have_spaces(asked):
    assert asked("--methods", "plain, chain:4", "--methods", "beam:4x4")["job"].methods == (
        "plain",
        "chain:4",
        "beam:4x4",
    )


def test_threads_are_set_before_loading(asked, monkeypatch):
    import torch

    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(sequoia.engine, "load", lambda *_, **__: calls.append("load") or SimpleNamespace(memory=None))
    asked("--threads", 1)
    assert calls == [1, "load"]


def test_the_job_s_defaults_are_the_command_s():
    ours = inspect.signature(bench.bench).parameters
    for name in ("repeats", "seed"):
        assert ours[name].default == inspect.signature(run_module.Job).parameters[name].default
    assert ours["prompt_tokens"].default == inspect.signature(run_module.run_bench).parameters["prompt_tokens"].default
    assert ours["draft"].default == inspect.signature(sequoia.engine.load).parameters["draft"].default


@pytest.mark.parametrize("arguments", [["bench", "-h"], ["bench", "report", "-h"]])
def test_help_fits_a_narrow_terminal_and_is_instant(arguments):
    script = """
import sys
from sequoia.app.cli import main
main()
print([name for name in ("torch", "transformers", "numpy", "matplotlib") if name in sys.modules], file=sys.stderr)
"""
    process = start(*arguments, script=script, env={"COLUMNS": "50"})
    out, err = process.communicate(timeout=30)
    assert err == "[]\n"
    assert max(map(len, out.splitlines())) <= 50
