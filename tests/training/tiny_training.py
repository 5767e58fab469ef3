"""Tiny targets whose texts have something to be learnt, and trainings of them in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.training.accelerated import accelerator
from sequoia.training.frame import Opening, Openings
from sequoia.training.head_training import Sources, train_head
from sequoia.training.settings import TrainSettings
from sequoia.training.trainer import State

VOCAB = 48
SETTINGS = TrainSettings(tokens=3 * 8 * 128, epochs=6, draft_vocab=40, rows=8, length=128, batch=4, depth=3)


def tiny_target(seed: int = 3) -> CausalLM:
    return CausalLM(tiny_llama(VOCAB, seed, device="cpu"))


def tiny_openings() -> Openings:
    return Openings([Opening((7, word), lead=1) for word in range(8, 16)], None)


def train(
    target: CausalLM,
    folder: Path,
    settings: TrainSettings = SETTINGS,
    resume: bool = False,
    progress: Callable[[str, int, int, str], None] = lambda *told: None,
) -> State:
    torch.manual_seed(resume)  # what torch's own generator holds must not matter
    sources, own = Sources(("tiny",), tiny_openings()), accelerator("cpu")
    return train_head(target, folder, settings, sources, resume=resume, accelerator=own, progress=progress)
