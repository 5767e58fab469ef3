"""Greedy output against transformers' `generate`, token by token: python benchmarks/equality.py

In fp32 every tree must give the same tokens. In 16 bit a pass over many rows rounds differently from a pass over one,
so texts may part where two tokens all but tie. Each parting is held against the tie: the two tokens' logits, computed
in fp32 at that place, must lie closer together than 16-bit rounding moves logits there.

Exits with 1 if a difference is not explained.
"""

from __future__ import annotations

import argparse
import sys

import torch
from common import machine, read_prompts
from rich.console import Console
from rich.progress import track

import sequoia
from sequoia.engine import Engine
from sequoia.measure.prompts import BUILT_IN, SOURCE_FORMS
from sequoia.tree.shape import TreeShape

TREES = {1: TreeShape.root_only(), 8: "optimal:8x4", 32: "optimal:32x6", 128: "optimal:128x8"}


def shapes() -> dict[int, TreeShape]:
    profile = sequoia.AcceptanceProfile.shipped("ngram")
    return {
        size: tree if isinstance(tree, TreeShape) else sequoia.optimal_shape(profile, *map(int, tree[8:].split("x")))
        for size, tree in TREES.items()
    }


def reference_output(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=engine.target.device)
    with torch.inference_mode():
        output = engine.target_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
    return output[0, len(prompt) :].tolist()


def last_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=engine.target.device)
        return engine.target_model(input_ids=ids, use_cache=False).logits[0, -1].float()


def tie(exact: Engine, engine: Engine, prefix: list[int], ours: int, theirs: int) -> tuple[float, float]:
    """(gap between the two tokens in fp32, largest change that 16-bit rounding makes to any likely token's logit)."""
    precise, rounded = last_logits(exact, prefix), last_logits(engine, prefix)
    likely = precise.topk(20).indices
    gap = abs(precise[ours] - precise[theirs]).item()
    return gap, (precise - rounded)[likely].abs().max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=[BUILT_IN], help=SOURCE_FORMS)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()

    console = Console()
    engine = sequoia.load(tree="off", dtype=options.dtype)
    exact = engine if options.dtype == "fp32" else sequoia.load(tree="off", dtype="fp32")
    prompts = read_prompts(options.prompts, options.count, engine)
    console.print(f"{machine()}, {engine.target.loaded.dtype}, {len(prompts)} prompts × {options.tokens} tokens")
    params = sequoia.SamplingParams(max_tokens=options.tokens, temperature=0.0)
    equal = dict.fromkeys(TREES, 0)
    unexplained = 0
    for number, prompt in enumerate(track(prompts, console=Console(stderr=True))):
        expected = reference_output(engine, prompt, options.tokens)
        for size, shape in shapes().items():
            engine.tree = shape
            found = list(engine.generate(prompt, params).token_ids)
            if found == expected:
                equal[size] += 1
                continue
            at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
            if at is None:
                console.print(f"prompt {number}, tree {size}: one output ends early")
                unexplained += 1
                continue
            gap, rounding = tie(exact, engine, prompt + expected[:at], found[at], expected[at])
            near = options.dtype != "fp32" and gap <= 2 * rounding
            unexplained += not near
            verdict = "near tie" if near else "NOT A TIE"
            console.print(
                f"prompt {number}, tree {size}, token {at}: gap {gap:.3f}, rounding {rounding:.3f}: {verdict}"
            )
    for size, count in equal.items():
        console.print(f"tree of {size} nodes: {count} of {len(prompts)} outputs equal")
    console.print("every difference explained" if not unexplained else f"{unexplained} differences not explained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
