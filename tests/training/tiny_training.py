"""Tiny targets whose texts have something to be learnt, and trainings of them in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import load_model
from sequoia.training.accelerated import accelerator
from sequoia.training.frame import Opening, Openings
from sequoia.training.head_training import Sources, train_head
from sequoia.training.settings import TrainSettings
from sequoia.training.trainer import State

VOCAB = 48
SETTINGS = TrainSettings(tokens=3 * 8 * 128, epochs=6, draft_vocab=40, rows=8, length=128, batch=4, depth=3)


def tiny_target(seed: int = 3) -> CausalLM:
    return CausalLM(tiny_llama(VOCAB, seed, device="cpu"))


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def tiny_family(family: str) -> CausalLM:
    torch.manual_seed(0)
    if family == "llama":
        return tiny_target()
    models: dict[str, Callable[[], Any]] = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
        "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, sliding_window=4, sliding_window_pattern=2)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
    }
    return CausalLM(load_model(models[family](), dtype="fp32", device="cpu"))


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
