"""`sequoia selftest`: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sequoia.app.cli import main
from sequoia.measure import selftest as selftest_module
from sequoia.measure.selftest import SelfTest, run_selftest
from sequoia.speculate.rules import NodeLaw
from sequoia.speculate.verify import VERIFIERS, Verifier

LINE = r"✓ \d+ walks enumerated \(max error \de-1\d\)  ✓ joint law: TV 0\.\d{3}, sampling noise alone 0\.\d{3}\n"


def put_to_the_test(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command meets this verifier alone, and starts no processes."""

    def run(**options: Any) -> SelfTest:
        return run_selftest([verifier], **{**options, "workers": 1, "device": None})

    monkeypatch.setattr(selftest_module, "run_selftest", run)


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> None:
    put_to_the_test(VERIFIERS["sequoia"], monkeypatch)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual is the target."""
    rule = VERIFIERS["sequoia"].rule

    def wrong(*arguments: Any) -> NodeLaw:
        return replace(rule(*arguments), residual=arguments[0])

    put_to_the_test(replace(VERIFIERS["sequoia"], rule=wrong, quick=None), monkeypatch)


def test_one_line_on_stdout_and_a_table_on_stderr(right: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--samples", "10"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(LINE, out)
    assert re.search(r"✓ +sequoia +303 ", err)


@pytest.mark.slow
def test_two_processes_find_what_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--samples", "8", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(run_selftest(samples=8, device="cpu").to_dict()))
    assert err == ""


def test_a_failure_exits_1_and_says_where(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--samples", "10"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("✗ ")
    assert "✗ sequoia: error" in err
    assert "Traceback" not in err


def test_json_is_one_object(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--samples", "2", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is False
    assert record["verifiers"][0]["enumeration"]["ok"] is False


@pytest.mark.parametrize("arguments", [["--samples", "0"], ["--samples", "x"], ["--seed", "-1"], ["--sample"]])
def test_usage_errors_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_exits_130_and_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "sequoia", "selftest", "--samples", "100000", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background may have Ctrl-C ignored, and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until_at_work(process.pid)
    try:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 130
    assert (out, err) == ("", "")
    assert all_gone(process.pid)


def wait_until_at_work(pid: int) -> None:
    """Until it has helpers, where the system tells."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 60
    while children.exists() and not children.read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1 if children.exists() else 4)


def all_gone(group: int) -> bool:
    """Whether the group's processes are gone; the last helper goes when it sees that the others have gone."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
