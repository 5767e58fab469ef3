"""What the benchmarks share: prompts, the machine, and the two models."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from sequoia.engine import Engine
from sequoia.measure import prompts


def machine() -> str:
    """One line that absolute times must stand beside."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else model
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}, {torch.get_num_threads()} threads, {versions}"


def read_prompts(sources: Sequence[str], count: int, engine: Engine, most_tokens: int = 256) -> list[list[int]]:
    """`count` prompts as token ids, of all categories alike; texts to continue are cut to `most_tokens`."""
    records = prompts.read_prompts(sources, count)
    return [record.token_ids(engine.tokenizer, engine.target.vocab_size, most_tokens) for record in records]
