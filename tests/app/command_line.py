"""Helpers: a tiny model on disk, and the command line started in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_LENGTH = 4096
WORDS = [f"w{index}" for index in range(3, 20)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}w3 {% else %}w4 {% endif %}{{ m['content'] }} {% endfor %}w5"
)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def write_model(folder: Path, chat_template: str | None = CHAT_TEMPLATE, context: int = CONTEXT_LENGTH) -> Path:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: index for index, word in enumerate(WORDS, start=3)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def start(*arguments: Any, script: str | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, or `script`, which may replace parts of it first."""
    command = ["-m", "sequoia"] if script is None else ["-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, *command, *map(str, arguments)],
        text=True,
        env=environment,
        # Tests that run in the background may have Ctrl-C ignored, and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **(pipes | options),
    )
