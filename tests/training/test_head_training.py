"""Trainings of tiny heads, whole, broken off and gone on with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import SETTINGS, tiny_family, tiny_target, train

from sequoia.draft.heads import load_head
from sequoia.errors import FileError, UsageError
from sequoia.model.placement import Numbers
from sequoia.training.settings import TrainSettings


class Killed(BaseException):
    """As a process ends: nothing catches it."""


def _killed_at(part: str, when: int) -> Callable[[str, int, int, str], None]:
    def progress(now: str, done: int, total: int, words: str) -> None:
        if now == part and done >= when:
            raise Killed

    return progress


@pytest.mark.parametrize(("part", "when"), [("writing", 1500), ("training", 1), ("training", 8), ("training", 17)])
def test_a_training_that_was_killed_goes_on_to_the_same_weights(tmp_path: Path, part: str, when: int) -> None:
    target = tiny_target()
    whole = train(target, tmp_path / "whole")
    with pytest.raises(Killed):
        train(target, tmp_path / "broken", progress=_killed_at(part, when))
    broken = train(target, tmp_path / "broken", resume=True)
    assert broken.step == whole.step == 6 * 2 * 2
    assert [look.agreements for look in broken.looks] == [look.agreements for look in whole.looks]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_head_learns_what_its_target_says(tmp_path: Path) -> None:
    """At every depth it agrees with 15% more of the tokens than at its start, and got better all the way."""
    settings = replace(SETTINGS, tokens=60 * 8 * 128, epochs=8, learning_rate=2e-2)
    looks = train(tiny_target(), tmp_path, settings).looks
    for depth in range(3):
        greedy = [look.agreements[depth].greedy for look in looks]
        assert greedy[-1] > greedy[0] + 0.15
        assert greedy[-1] > greedy[len(greedy) // 2] - 0.02 > greedy[0]
        assert looks[-1].agreements[depth].overlap > looks[0].agreements[depth].overlap + 0.1


def test_what_is_saved_loads_as_a_draft(tmp_path: Path) -> None:
    target = tiny_target()
    train(target, tmp_path)
    draft = load_head(tmp_path, target, Numbers(torch.float32))
    assert draft.model.taps == (1, 3)
    assert len(draft.model.support) <= 40
    card = (tmp_path / "README.md").read_text()
    assert "24 of 24 steps" in card
    assert "--tokens 3072 --epochs 6" in card


def test_a_folder_holds_one_training(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(UsageError, match="no training to go on with"):
        train(target, tmp_path, resume=True)
    train(target, tmp_path)
    with pytest.raises(UsageError, match=r"holds a training already\. Go on with --resume"):
        train(target, tmp_path)
    with pytest.raises(UsageError, match="has epochs 6, not 7"):
        train(target, tmp_path, replace(SETTINGS, epochs=7), resume=True)


def test_damage_is_named(tmp_path: Path) -> None:
    target = tiny_target()
    train(target, tmp_path)
    kept = tmp_path / "training"
    (kept / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(FileError, match=r"checkpoint\.pt is damaged"):
        train(target, tmp_path, resume=True)
    (kept / "checkpoint.pt").unlink()
    (kept / "texts" / "0001.safetensors").write_bytes(b"nothing")
    with pytest.raises(FileError, match=r"0001.safetensors.*it is written again"):
        train(target, tmp_path, resume=True)


def test_hours_end_a_training(tmp_path: Path) -> None:
    state = train(tiny_target(), tmp_path, replace(SETTINGS, tokens=10**6, epochs=10**4, hours=4 / 3600))
    assert 0 < state.step < 10**6
    assert state.seconds > 0.6 * 4
    assert len(list((tmp_path / "training" / "texts").iterdir())) < 900


def test_hours_are_divided() -> None:
    limited = replace(SETTINGS, hours=2.0)
    assert 0 < limited.writing_seconds < limited.training_seconds
    assert limited.writing_seconds + limited.training_seconds == pytest.approx(7200)


def test_settings_are_checked() -> None:
    assert SETTINGS.shards(100) == 3
    assert replace(SETTINGS, disk=250 * 1024 * 100 // 100).shards(100) == 2
    with pytest.raises(UsageError, match="Allow more with --disk"):
        replace(SETTINGS, disk=10_000).shards(100)
    for name, value in {"tokens": 0, "hours": 0.0, "learning_rate": -1.0, "length": 3}.items():
        with pytest.raises(UsageError, match=name.replace("_", " ")):
            TrainSettings(**{name: value})


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_families_with_a_lean_decoder_can_be_trained_for(tmp_path: Path, family: str) -> None:
    target = tiny_family(family)
    looks = train(target, tmp_path, replace(SETTINGS, epochs=1)).looks
    assert looks[-1].agreements[0].loss < looks[0].agreements[0].loss
    assert load_head(tmp_path, target, Numbers(torch.float32)).model.taps[-1] == target.layer_count + 1
