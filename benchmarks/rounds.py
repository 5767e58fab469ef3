"""Where a round's time goes, and plain decoding against transformers: python benchmarks/rounds.py

Overhead is everything in a round outside the models' forwards: growing the tree, processors, verification, the cache.
With the n-gram draft there is no draft forward, so the draft's own work counts as overhead; the second draft is the
target's own first layers, whose text is poor but whose passes cost what a small model's would.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import machine, read_prompts
from rich.console import Console
from rich.table import Table
from torch import Tensor

import sequoia
from sequoia.draft.model_draft import ModelDraft
from sequoia.engine import Engine
from sequoia.measure.prompts import BUILT_IN
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import LoadedModel
from sequoia.speculate.session import Draft, Session
from sequoia.tree.shape import TreeShape

DRAFT_LAYERS = 6


@dataclass
class Stopwatch:
    """A model that counts the seconds of its forwards."""

    model: CausalLM
    seconds: list[float] = field(default_factory=lambda: [0.0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        started = time.perf_counter()
        logits = self.model.forward(*args, **kwargs)
        if logits.is_cuda:
            torch.cuda.synchronize()
        self.seconds[0] += time.perf_counter() - started
        return logits


def truncated(engine: Engine, layers: int) -> LoadedModel:
    """The target's weights with the first `layers` layers only."""
    loaded, model = engine.target.loaded, copy.deepcopy(engine.target_model)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return LoadedModel(model, loaded.tokenizer, f"{loaded.name}, first {layers} layers")


def rounds(
    target: Stopwatch, draft: Draft, engine: Engine, prompt: list[int], params: sequoia.SamplingParams
) -> list[tuple[float, float]]:
    """(seconds, seconds in forwards) of each full-sized round, the first left out as warm-up."""
    session = Session(target, draft.start(), engine.tree, engine.verifier, prompt, params)
    session.step()
    measured = []
    while session.finish_reason is None:
        target.seconds[0], started = 0.0, time.perf_counter()
        outcome = session.step()
        if outcome.tree.shape == engine.tree:
            measured.append((time.perf_counter() - started, target.seconds[0]))
    return measured


def overhead_table(engine: Engine, prompts: list[list[int]], tokens: int) -> Table:
    target = Stopwatch(engine.target)
    small = Stopwatch(CausalLM(truncated(engine, DRAFT_LAYERS)), target.seconds)
    drafts: dict[str, Draft] = {"n-gram": engine.draft, f"{DRAFT_LAYERS} layers": ModelDraft(small, small.vocab_size)}
    table = Table("draft", "temperature", "ms/round", "outside forwards, ms", "share", title="overhead")
    for name, draft in drafts.items():
        for settings in ({"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}):
            params = sequoia.SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True, **settings)
            measured = [pair for prompt in prompts for pair in rounds(target, draft, engine, prompt, params)]
            if not measured:
                raise SystemExit(f"{tokens} tokens hold no whole round of depth {engine.tree.depth}. Raise --tokens.")
            whole = statistics.median(seconds for seconds, _ in measured)
            outside = statistics.median(seconds - forwards for seconds, forwards in measured)
            label = ", top-p ".join(str(value) for value in settings.values())
            table.add_row(name, label, f"{whole * 1e3:.1f}", f"{outside * 1e3:.2f}", f"{outside / whole:.1%}")
    return table


def ours(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    params = sequoia.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return list(engine.generate(prompt, params).token_ids)


def theirs(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=engine.target.device)
    with torch.inference_mode():
        output = engine.target_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
    return output[0, len(prompt) :].tolist()


def plain_table(engine: Engine, prompts: list[list[int]], tokens: int, repeats: int) -> Table:
    """Whole requests, prompt included, prompt by prompt and taking turns in going first."""
    engine.tree = TreeShape.root_only()
    methods: dict[str, Callable[[Engine, list[int], int], list[int]]] = {"sequoia, tree off": ours, "generate": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn, prompt in enumerate([prompts[0], *prompts * repeats]):  # the first is warm-up
        for name, method in list(methods.items())[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            emitted = method(engine, prompt, tokens)
            seconds[name].append(time.perf_counter() - started)
            assert len(emitted) == tokens
    table = Table("method", "tokens/s", "ratio of medians", "median of ratios", title="plain decoding, temperature 0")
    reference = seconds["generate"][1:]
    for name, values in seconds.items():
        median = statistics.median(values[1:])
        pairs = statistics.median(theirs_ / ours_ for theirs_, ours_ in zip(reference, values[1:], strict=True))
        table.add_row(name, f"{tokens / median:.1f}", f"{statistics.median(reference) / median:.3f}", f"{pairs:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    engine = sequoia.load(draft="ngram", tree="optimal:32x8", dtype=options.dtype)
    prompts = read_prompts([BUILT_IN], options.prompts, engine)
    console = Console()
    console.print(f"{machine()}, {engine.target.loaded.dtype}")
    console.print(f"tree of {engine.tree.size} nodes, depth {engine.tree.depth}; {engine.target.vocab_size} tokens")
    console.print(overhead_table(engine, prompts, options.tokens))
    console.print(plain_table(engine, prompts, options.tokens, options.repeats))


if __name__ == "__main__":
    main()
