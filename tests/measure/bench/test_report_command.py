"""`sequoia bench report`: the table at any width, the page, JSON and faults, from results that no model made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from synthetic import GREEDY

from sequoia.app.cli import main
from sequoia.measure.bench.records import Results, ResultsFile


def saved(folder: Path, results: Results) -> Path:
    file = ResultsFile(folder)
    file.create(results.run)
    file.append([*results.results, *results.findings, *results.rounds])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("bench") / "run", synthetic.results())


def report(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["bench", "report", str(folder), *options])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("columns", [None, 40, 60, 80, 100, 200])
def test_tables_fit_and_no_figure_is_cut(folder, capsys, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = report(folder, capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()[:-1]  # the last names the page, whose path is never cut
    assert max(map(len, lines)) <= (columns or 100)
    assert "…" not in "".join(line for line in lines if not line.startswith("specinfer"))
    numbers = re.findall(r"\d\S*× \(\d+\.\d\d–\d+\.\d\d\)", out)
    assert len(numbers) == 2 * (len(synthetic.METHODS) - 1)  # plain's is 1 by definition
    for heading in ("method", "speedup", "tokens/s", "accepted", "output", *synthetic.CATEGORIES):
        assert heading in out
    assert lines[0] == "temperature 0 · 14 requests"
    assert "temperature 0.6, top-p 0.9 · 14 requests" in lines
    assert out.endswith(f"page: {folder / 'report.html'}\n")


def test_a_wide_terminal_gets_one_table_for_each_setting(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = report(folder, capsys)
    assert len(re.findall("^method ", out, re.MULTILINE)) == 2
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = report(folder, capsys)
    assert len(re.findall("^method ", out, re.MULTILINE)) == 4


def test_long_names_leave_room_for_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    methods = [*synthetic.METHODS[:2], ("methods/of/a/very/long/path/which_goes_on.py", None, None, 1.1)]
    _, out, _ = report(saved(tmp_path, synthetic.results(methods=methods)), capsys)
    assert max(map(len, out.splitlines()[:-1])) <= 60
    assert len(re.findall(r"× \(\d+\.\d\d–\d+\.\d\d\)", out)) == 4


def test_one_method_and_one_prompt(tmp_path, capsys):
    results = synthetic.results(1, (GREEDY,), synthetic.METHODS[:1])
    run = replace(results.run, prompts=results.run.prompts[:1])
    code, out, _ = report(saved(tmp_path, Results(run, results.results[:1])), capsys)
    assert code == 0
    assert re.search(r"^plain +1\.00× +\d\d\.\d \(–\) +1\.00 +100 ms +–$", out, re.MULTILINE)


def test_a_killed_run_is_shown_as_far_as_it_came(tmp_path, capsys):
    results = synthetic.results()
    results.results = [entry for entry in results.results if entry.prompt == "chat-0"]
    saved(tmp_path, results)
    with (tmp_path / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"entry": "result", "meth')
    code, out, _ = report(tmp_path, capsys)
    assert code == 0
    assert "1 of 14 prompts are done" in out
    results.results = []
    assert report(saved(tmp_path / "none", results), capsys)[0] == 0


def test_json_is_one_object_and_the_page_is_written_all_the_same(tmp_path, capsys):
    saved(tmp_path, synthetic.results())
    code, out, err = report(tmp_path, capsys, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    record = json.loads(out)
    assert record["page"] == str(tmp_path / "report.html")
    assert record["prompts_done"] == 14
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_faults_are_named_on_stderr_and_exit_1_after_all_is_written(tmp_path, capsys, options):
    results = synthetic.results(1, (GREEDY,))
    results.findings += [synthetic.fault("dynamic:16x4"), synthetic.near_tie("chain:4")]
    code, out, err = report(saved(tmp_path, results), capsys, *options)
    assert code == 1
    assert out
    assert err == (
        "✗ dynamic:16x4, temperature 0, prompt chat-0: wrong tokens: "
        "token 7 is 'blue' <b>& not 'green'; the target finds it 3.1 less likely\n"
    )
    assert (tmp_path / "report.html").exists()


def test_near_ties_are_no_failure(tmp_path, capsys):
    results = synthetic.results(2, (GREEDY,))
    tie = next(entry for entry in results.results if (entry.method, entry.prompt) == ("chain:4", "chat-1"))
    results.results[results.results.index(tie)] = replace(tie, token_ids=(*tie.token_ids[:-1], 5000))
    results.findings.append(synthetic.near_tie("chain:4"))
    code, out, err = report(saved(tmp_path, results), capsys)
    assert (code, err) == (0, "")
    assert re.search(r"^chain:4 .*≈ 1 near tie$", out, re.MULTILINE)
    assert re.search(r"^optimal:16x4 .*✓ as plain$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("", "does not start with"), ('{"entry": "run"}\n', "line 1 is no result")],
)
def test_what_is_no_run_is_one_line(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "results.jsonl").write_text(content, encoding="utf-8")
    code, out, err = report(tmp_path, capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not (tmp_path / "report.html").exists()


def in_a_process(folder: Path, stdout: Any = subprocess.PIPE, **environment: str) -> Any:
    script = """
import sys
from sequoia.app.cli import main
code = main()
print([name for name in ("torch", "transformers", "matplotlib.pyplot") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    command = [sys.executable, "-c", script, "bench", "report", str(folder)]
    streams = {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, env=os.environ | environment, text=True, timeout=60, **streams)


def test_it_needs_neither_torch_nor_transformers_and_is_quiet(folder, tmp_path):
    done = in_a_process(folder, MPLCONFIGDIR=str(tmp_path / "none" / "such"))
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "\x1b" not in done.stdout
    assert "×" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(folder):
    with open("/dev/full", "w") as full:
        done = in_a_process(folder, stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: cannot write to standard output: No space left on device."


def test_narrow_encodings_do_not_matter(folder):
    done = in_a_process(folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "1.00?" in done.stdout
