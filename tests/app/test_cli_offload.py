"""Offload on the command line: the report before the run, refusals, and plans that belong to a budget."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

QUICK = ["--samples", 2, "--tokens", 4, "--seconds", 0, "--max-size", 4, "--max-depth", 2, "--temperature", 0]
STREAMED = ["--offload", "disk", "--memory-budget", "8GiB", "--context", 512]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sequoia.app.tune._BUSY", float("inf"))
    return tmp_path / "cache"


def generate(tiny: Path, *arguments: Any) -> list[Any]:
    return ["generate", "w3 w4 w5", "--target", tiny, "--dtype", "fp32", "--max-tokens", 12, *arguments]


def test_same_answer_and_a_line_on_memory(cli, tiny):
    whole = cli(*generate(tiny))
    streamed = cli(*generate(tiny, *STREAMED, "--stats"))
    assert (whole.code, streamed.code) == (0, 0)
    assert streamed.out == whole.out
    assert "memory" not in whole.err
    assert re.search(r"^memory [\d,]+ of 8,192 MiB: libraries [\d,]+ .*1 of 1 layers", streamed.err, re.MULTILINE)
    assert "target passes: lean decoder, fp32, 0 of 1 layers streamed" in streamed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offload", "disk", "--memory-budget", "3MiB"], r"budget of 3 MiB is too small \(the libraries"),
        (["--memory-budget", "lots"], "a memory budget is a size such as 2GiB or 800MiB, not 'lots'"),
        (["--offload", "cloud"], "offload must be one of auto, disk, host, off, not 'cloud'"),
        (["--offload", "host"], "streams to a CUDA device, not to cpu"),
        (["--offload", "off", "--memory-budget", "2GiB"], "Leave one of the two out"),
        (["--offload", "disk", "--dtype", "int8"], "not as int8"),
    ],
)
def test_refusals(cli, tiny, arguments, message):
    outcome = cli(*generate(tiny, "--device", "cpu", *arguments))
    assert outcome.code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", outcome.err)


def test_the_smallest_budget_that_is_named_works(cli, tiny):
    refused = cli(*generate(tiny, "--offload", "disk", "--memory-budget", "3MiB"))
    (smallest,) = re.findall(r"Give --memory-budget (\d+)MiB", refused.err)
    assert cli(*generate(tiny, "--offload", "disk", "--memory-budget", f"{int(smallest) + 32}MiB")).code == 0


def test_the_context_is_no_longer_than_memory_was_planned_for(cli, tiny):
    outcome = cli(*generate(tiny, "--offload", "disk", "--memory-budget", "8GiB", "--context", 8))
    assert outcome.code == 0
    record = json.loads(cli(*generate(tiny, "--context", 8, "--json")).out)
    assert record["prompt_tokens"] + len(record["token_ids"]) == 8


def test_a_plan_belongs_to_its_budget(cli, tiny, tmp_path):
    plan = tmp_path / "plan.json"
    tuned = cli("tune", "--target", tiny, "--dtype", "fp32", *QUICK, *STREAMED, "--count", 2, "--out", plan)
    assert tuned.code == 0
    assert "memory" in tuned.err
    assert json.loads(plan.read_text())["pair"]["offload"] == "disk within 8.00 GiB"
    assert cli(*generate(tiny, *STREAMED, "--plan", plan)).code == 0
    refused = cli(*generate(tiny, "--plan", plan))
    assert refused.code == 1
    assert "was tuned for offload disk within 8.00 GiB, not off" in refused.err


def test_bench_leaves_out_what_needs_the_whole_model(cli, tiny, tmp_path):
    common = ["bench", "--target", tiny, "--dtype", "fp32", "--max-tokens", 4, "--count", 1, *STREAMED]
    assert cli(*common, "--quick", "--out", tmp_path / "one").code == 0
    methods = {json.loads(line).get("method") for line in next((tmp_path / "one").glob("*.jsonl")).open()}
    assert "plain" in methods
    assert "transformers" not in methods
    refused = cli(*common, "--methods", "transformers", "--out", tmp_path / "two")
    assert refused.code == 2
    assert "transformers runs the whole model in memory, and this one is streamed" in refused.err
