"""A real engine of a few hundred weights, with a tokenizer of its own, and prompts for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sequoia.engine import Engine, load
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.method import Method
from sequoia.measure.bench.methods import build_method
from sequoia.measure.prompts import PromptRecord
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.params import SamplingParams

VOCAB = 48
WORDS = ["<unk>", "</s>", *(f"w{number}" for number in range(2, VOCAB))]
PROMPTS = [
    PromptRecord("a", "odd", "w3 w5 w7 w3 w5"),
    PromptRecord("b", "even", "w4 w6 w8 w10"),
    PromptRecord("c", "odd", "w9 w11 w13 w9 w11 w13"),
    PromptRecord("d", "even", "w20 w22"),
]


def tokenizer() -> Any:
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def tiny_engine(draft: str = "model", seed: int = 1) -> Engine:
    """fp32 on the CPU; the context has 64 positions."""
    words = tokenizer()
    target = (tiny_llama(VOCAB, seed, device="cpu").model, words)
    drafts = {"model": (tiny_llama(VOCAB, seed, blur=0.06, device="cpu").model, words), "ngram": "ngram"}
    return load(target, drafts[draft], dtype="fp32", device="cpu")


def answer(method: Method, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What the method emits, as one list."""
    tokens: list[int] = []
    method.generate(list(prompt), params, lambda step: tokens.extend(getattr(step, "token_ids", step)))
    return tokens


def answers(
    names: Iterable[str], engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> dict[str, list[int]]:
    with PassClock(engine.target) as clock:
        return {name: answer(build_method(name, engine, clock), prompt, params) for name in names}


def write_method(folder: Path, name: str, body: str) -> str:
    """A .py file with a function `generate` of this body; returns what names it as a method."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    path = folder / f"{name}.py"
    path.write_text(f"def generate(engine, prompt, params, emit):\n{lines}\n", encoding="utf-8")
    return str(path)
