"""The command line with a head as draft."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sequoia.measure.random_head import save_random_head
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import load_model

FP32 = ["--dtype", "fp32", "--device", "cpu"]


@pytest.fixture(scope="module")
def head(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = CausalLM(load_model(tiny, dtype="fp32", device="cpu"))
    return save_random_head(tmp_path_factory.mktemp("heads") / "clever", target, draft_vocab_size=12)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{3 + n} w{4 + n}"}) + "\n" for n in range(3)), encoding="utf-8")
    return path


def test_generate_says_which_head_drafts_and_the_same_text(cli, tiny, head):
    asked = ["generate", "w3 w4", "--target", tiny, *FP32, "--ignore-eos", "--max-tokens", "24"]
    plain = cli(*asked, "--tree", "off")
    outcome = cli(*asked, "--draft", head, "--tree", "kary:2x3", "--stats")
    assert outcome.code == 0
    assert outcome.out == plain.out
    assert re.search(r"draft clever · (int8|fp32)      tree 15 nodes, depth 3", outcome.err)
    assert re.search(r"draft passes: one layer over the target's features, (int8|fp32)", outcome.err)


def test_a_head_that_does_not_fit_is_one_line(cli, plain, head, tmp_path):
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    outcome = cli("generate", "w3", "--target", plain, *FP32, "--draft", tmp_path)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("error: ")
    assert "model.safetensors" in outcome.err


def test_tune_measures_a_head_and_its_plan_is_found_again(cli, tiny, head, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sequoia.app.tune._BUSY", float("inf"))
    quick = ["--samples", 4, "--tokens", 6, "--seconds", 0, "--max-size", 6, "--max-depth", 3]
    pair = ["--target", tiny, "--draft", head, *FP32]
    outcome = cli("tune", *pair, "--prompts", prompts, "--temperature", "0,0.6", *quick)
    assert outcome.code == 0, outcome.err
    assert "draft clever" in outcome.err
    (kept,) = (tmp_path / "cache" / "sequoia" / "plans").iterdir()
    assert json.loads(kept.read_text())["pair"]["draft"] == "clever"
    used = cli("generate", "w3", *pair, "--max-tokens", "4")
    assert used.code == 0
    assert "plan" in used.err


def test_bench_runs_with_a_head(cli, tiny, head, prompts, tmp_path):
    asked = ["--prompts", prompts, "--methods", "plain,chain:2", "--max-tokens", "8", "--temperature", "0"]
    outcome = cli("bench", "--target", tiny, "--draft", head, *FP32, *asked, "--out", tmp_path / "results")
    assert outcome.code == 0, outcome.err
    assert "clever" in outcome.err + outcome.out
