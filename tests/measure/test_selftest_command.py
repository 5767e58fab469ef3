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
from typing import Any

import pytest

from sequoia.app.cli import main
from sequoia.measure import selftest as selftest_module
from sequoia.measure.selftest import SelfTest, run_selftest
from sequoia.speculate.verify import VERIFIERS, NodeLaw

LINE = r"✓ \d+ walks enumerated \(max error \de-1\d\)  ✓ joint law: TV 0\.\d{3}, sampling noise alone 0\.\d{3}\n"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command meets one verifier, whose residual is the target."""
    rule = VERIFIERS["sequoia"].rule

    def wrong(*arguments: Any) -> NodeLaw:
        return replace(rule(*arguments), residual=arguments[0])

    verifier = replace(VERIFIERS["sequoia"], rule=wrong)

    def run(**options: Any) -> SelfTest:
        return run_selftest([verifier], **{**options, "workers": 1, "device": None})

    monkeypatch.setattr(selftest_module, "run_selftest", run)


@pytest.mark.slow
def test_one_line_on_stdout_and_a_table_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--samples", "10", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(LINE, out)
    for name in VERIFIERS:
        assert name in err


def test_a_failure_exits_1_and_says_where(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--samples", "60"]) == 1
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
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(8)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "")
    with pytest.raises(ProcessLookupError):  # the last helper goes when it sees that the others have gone
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
