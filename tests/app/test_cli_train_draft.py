"""`sequoia train-draft` from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import start, write_model

from sequoia.app.train_draft import parse_size
from sequoia.errors import UsageError


@pytest.fixture
def arguments(tiny: Path, tmp_path: Path) -> list[Any]:
    return ["train-draft", "--target", tiny, "--out", tmp_path / "head", "--tokens", 65536, "--draft-vocab", 16]


def test_a_head_is_trained_and_drafts(cli, arguments, tiny, tmp_path):
    outcome = cli(*arguments, "--epochs", 1)
    assert outcome.code == 0, outcome.err
    assert outcome.out == ""
    assert "writing: " in outcome.err
    assert "training: 16/16" in outcome.err
    assert f"saved in {tmp_path / 'head'}" in outcome.err
    answer = cli("generate", "w3 w4", "--target", tiny, "--draft", tmp_path / "head", "--tree", "chain:3", "--json")
    plain = cli("generate", "w3 w4", "--target", tiny, "--tree", "off", "--json")
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    assert json.loads(answer.out)["draft"] == "head"

    again = cli(*arguments, "--epochs", 1)
    assert again.code == 2
    assert "holds a training already. Go on with --resume" in again.err
    other = cli(*arguments, "--epochs", 2, "--resume")
    assert other.code == 2
    assert "has epochs 1, not 2" in other.err


def test_prompts_are_answered(cli, arguments, tmp_path):
    data = tmp_path / "asked.jsonl"
    data.write_text('{"prompt": "w3 w4"}\n{"text": "w5"}\n')
    outcome = cli(*arguments, "--epochs", 1, "--data", data)
    assert outcome.code == 0, outcome.err
    assert str(data) in (tmp_path / "head" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--disk", "much"], "--disk takes a size such as 4GiB"),
        (["--disk", "1KiB"], "Allow more with --disk"),
        (["--hours", "0"], "hours must be above 0"),
        (["--weights", "int8"], "need the lean decoder in 16 or 32 bit"),
        (["--resume"], "holds no training to go on with"),
    ],
)
def test_bad_options_are_refused(cli, arguments, options, message, tmp_path):
    outcome = cli(*arguments, *options)
    assert outcome.code in (1, 2)
    assert message in outcome.err
    assert not (tmp_path / "head" / "model.safetensors").exists()


def test_ctrl_c_keeps_what_is_done(tmp_path):
    model = write_model(tmp_path / "model")
    command = ["train-draft", "--target", model, "--out", tmp_path / "head", "--tokens", 65536 * 64]
    process = start(*command)
    texts = tmp_path / "head" / "training" / "texts"
    deadline = time.monotonic() + 120
    while not (texts.is_dir() and list(texts.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "with --resume goes on" in err
    assert all(file.suffix == ".safetensors" for file in texts.iterdir())


def test_sizes_have_units():
    assert parse_size("--disk", "1.5GiB") == 3 * 2**29
    assert parse_size("--disk", "500MB") == 500 * 10**6
    with pytest.raises(UsageError, match="--disk takes a size"):
        parse_size("--disk", "4 things")


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path):
    """As `accelerate launch` starts them: half as many steps, over the same texts."""
    model = write_model(tmp_path / "model")
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "sequoia",
        "train-draft",
        "--device",
        "cpu",
    ]
    options = ["--target", model, "--out", tmp_path / "head", "--tokens", 98304, "--epochs", 1, "--draft-vocab", 16]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": "29617"}
    run = [sys.executable, *command, *map(str, options)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "training: 16/16" in done.stderr
    assert len(list((tmp_path / "head" / "training" / "texts").iterdir())) == 3
