"""What tuning predicts against what happens: python benchmarks/acceptance.py [--prompts FILES] [--draft MODEL]

Rates are measured along the target's own texts on one half of the prompts; then the engine answers the other half with
trees of several sizes. Two tables: tokens per round, predicted and measured; and for one tree the rates by depth and
rank, teacher-forced on the first half and on policy on the second. ± is one standard error over prompts.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sequoia
from sequoia.draft.model_draft import ModelDraft
from sequoia.engine import Engine
from sequoia.measure import prompts
from sequoia.measure.acceptance import measure
from sequoia.measure.samples import Samples
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import LoadedModel
from sequoia.speculate.stats import Stats
from sequoia.tree.shape import TreeShape

CHAIN, SIZES, DEPTH = 3, (8, 16, 32, 64), 8
SHOWN = 16  # the tree whose rates are compared
RANKS = 6  # of these


def load(options: argparse.Namespace) -> Engine:
    """The default target with the draft asked for; `layers:N` is the target's own first N layers."""
    if not options.draft.startswith("layers:"):
        return sequoia.load(draft=options.draft, tree="off", dtype=options.dtype)
    engine = sequoia.load(tree="off", dtype=options.dtype)
    layers = int(options.draft.partition(":")[2])
    model = copy.deepcopy(engine.target_model)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    loaded = LoadedModel(model, engine.tokenizer, f"{engine.target.loaded.name}, first {layers} layers")
    engine.draft = ModelDraft(CausalLM(loaded), engine.target.loaded.token_count)
    return engine


def answered(engine: Engine, shape: TreeShape, held: Sequence[list[int]], params: Any) -> list[Stats]:
    """The engine's own rounds, by prompt."""
    engine.tree, found = shape, []
    for request, prompt in enumerate(
        track(held, f"tree of {shape.size}", console=Console(stderr=True), transient=True)
    ):
        session, stats = engine.session(prompt, params, request=request), Stats()
        while session.finish_reason is None:
            stats.add(session.step())
        found.append(stats)
    return found


def tokens_per_round(found: Sequence[Stats]) -> tuple[float, float]:
    """With its standard error by jackknife."""
    tokens = np.array([stats.emitted_tokens for stats in found], dtype=float)
    rounds = np.array([stats.rounds for stats in found], dtype=float)
    without = (tokens.sum() - tokens) / (rounds.sum() - rounds)
    error = np.sqrt((len(found) - 1) / len(found) * ((without - without.mean()) ** 2).sum())
    return tokens.sum() / rounds.sum(), float(error)


def shapes(samples: Samples) -> dict[str, TreeShape]:
    profile = samples.profile()
    trees = {f"tree {size}": sequoia.optimal_shape(profile, size, DEPTH) for size in SIZES}
    return {f"chain {CHAIN}": TreeShape.chain(CHAIN), **trees, "beam 4x4": TreeShape.beam(4, 4)}


def tokens_table(samples: Samples, runs: dict[str, list[Stats]], trees: dict[str, TreeShape], title: str) -> Table:
    table = Table("tree", "predicted", "measured", "difference", "in standard errors", title=title)
    for name, found in runs.items():
        predicted, error = samples.tokens_per_round(trees[name])
        mean, spread = tokens_per_round(found)
        gap = mean / predicted - 1
        z = (mean - predicted) / np.hypot(error, spread)
        table.add_row(name, f"{predicted:.3f} ± {error:.3f}", f"{mean:.3f} ± {spread:.3f}", f"{gap:+.1%}", f"{z:+.1f}")
    return table


def rates_table(samples: Samples, found: Sequence[Stats], shape: TreeShape, title: str) -> Table:
    """Teacher-forced and on policy, with the visits that the latter rests on."""
    table = Table("depth", "visits", *(f"rank {rank}" for rank in range(RANKS)), "all ranks", title=title)
    visits, accepted = samples.counts(shape)
    total = Stats()
    for stats in found:
        total.merge(stats)
    for depth, count in enumerate(total.visits):
        forced = accepted[depth] / max(visits[depth], 1e-12)
        policy = np.array(total.accepted[depth]) / max(count, 1)
        cells = [
            f"{a:.2f} {b:.2f}" for a, b in zip(forced, np.pad(policy, (0, len(forced) - len(policy))), strict=True)
        ]
        cells = (cells + [""] * RANKS)[:RANKS]
        error = np.sqrt(forced.sum() * (1 - forced.sum()) / max(count, 1))
        table.add_row(str(depth), str(count), *cells, f"{forced.sum():.3f} / {policy.sum():.3f} ± {error:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=[prompts.BUILT_IN], help=prompts.SOURCE_FORMS)
    parser.add_argument("--count", type=int, default=14, help="prompts to measure on")
    parser.add_argument("--held-out", type=int, default=14, help="other prompts to answer")
    parser.add_argument("--draft", default="ngram", help="ngram, a model, or layers:N of the target itself")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.6])
    parser.add_argument("--store", type=Path, help="folder for finished texts and rates")
    options = parser.parse_args()

    engine, console = load(options), Console()
    records = prompts.read_prompts(options.prompts, options.count + options.held_out)
    read = [record.token_ids(engine.tokenizer, engine.target.vocab_size, 128) for record in records]
    tuning, held = read[: options.count], read[options.count :]
    console.print(f"{machine()}, {engine.target.loaded.weights}, draft {options.draft}")
    console.print(f"{len(tuning)} prompts to measure on, {len(held)} others to answer, {options.tokens} tokens")
    for temperature in options.temperature:
        params = sequoia.SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=0)
        sizes: dict[str, Any] = {"samples": options.samples, "tokens": options.tokens, "store": options.store}
        samples = measure(engine.target, engine.draft, params, tuning, **sizes)
        trees = shapes(samples)
        runs = {name: answered(engine, shape, held, params) for name, shape in trees.items()}
        title = f"temperature {temperature:g}"
        console.print(tokens_table(samples, runs, trees, f"tokens per round, {title}"))
        name = f"tree {SHOWN}"
        console.print(rates_table(samples, runs[name], trees[name], f"teacher-forced, on policy: {name}, {title}"))
        law = samples.power_law
        console.print(f"rejection r_k ~ k^-{law.exponent:.3f}, r² {law.fit:.3f}; {samples.provenance['tokens']} tokens")


if __name__ == "__main__":
    main()
