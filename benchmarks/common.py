"""What the benchmarks share: prompts, the machine, and the two models."""

from __future__ import annotations

import json
import platform
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from sequoia.engine import Engine
from sequoia.text import encode_prompt

BUILT_IN = Path(__file__).with_name("prompts.jsonl")


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


def read_prompts(paths: list[Path], count: int, engine: Engine, most_tokens: int = 256) -> list[list[int]]:
    """`count` prompts as token ids, the same number from each file; long ones are cut at the front."""
    per_file = -(-count // len(paths))
    prompts: list[list[int]] = []
    for path in paths:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        chosen = random.Random(0).sample(records, min(per_file, len(records)))
        prompts += [_token_ids(record, engine)[-most_tokens:] for record in chosen]
    return prompts[:count]


def _token_ids(record: dict[str, Any], engine: Engine) -> list[int]:
    """Plain text goes in as it is, everything else as the user's message."""
    if "text" in record:
        return encode_prompt(engine.tokenizer, record["text"])
    content = record.get("prompt") or record["turns"][0]
    return encode_prompt(engine.tokenizer, [{"role": "user", "content": content}])
