"""What a head's level costs beside the target's one-row pass: python benchmarks/head.py [--compile]

Rounds of all shapes take turns in one request, each timed in its parts. The root's level catches up on what the last
round accepted; the levels below it are passes over the head's own outputs. A head of random weights costs what a
trained one costs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from common import machine, read_prompts
from rich.console import Console
from rich.table import Table

import sequoia
from sequoia.engine import Engine
from sequoia.measure.prompts import BUILT_IN
from sequoia.measure.random_head import save_random_head
from sequoia.measure.round_parts import Parts, TimedRequest, clock_of
from sequoia.tree.shape import TreeShape

SHAPES = {
    "off": TreeShape.root_only(),
    "chain 4": TreeShape.chain(4),
    "beam 4x4": TreeShape.beam(4, 4),
    "beam 8x4": TreeShape.beam(8, 4),
}


def load(options: argparse.Namespace) -> Engine:
    asked = {"dtype": options.dtype, "draft_dtype": options.draft_dtype, "compile": options.compile}
    if options.head:
        return sequoia.load(options.target, options.head, "off", **asked)
    plain = sequoia.load(options.target, tree="off", dtype=options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_random_head(Path(folder), plain.target, draft_vocab_size=options.draft_vocab)
        return sequoia.load(options.target, folder, "off", **asked)


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, list[Parts]]:
    prompt = read_prompts([BUILT_IN], 1, engine)[0]
    params = sequoia.SamplingParams(temperature=options.temperature, seed=0)
    request = TimedRequest(engine, params, prompt, 512, clock_of(engine.target.device))
    found: dict[str, list[Parts]] = defaultdict(list)
    for turn in range(options.repeats + 1):
        for name, shape in SHAPES.items():
            parts = request.measure(shape)
            if turn:
                found[name].append(parts)
    return found


def table(found: dict[str, list[Parts]]) -> Table:
    one_row = statistics.median(parts.target for parts in found["off"])
    report = Table(
        "round", "target's pass", "root's level", "each level below", "of the one-row pass", title_justify="left"
    )
    for name, rounds in found.items():
        target = statistics.median(parts.target for parts in rounds)
        if name == "off":
            report.add_row(name, f"{1000 * target:.2f} ms", "", "", "")
            continue
        root = statistics.median(parts.levels[0][1] for parts in rounds)
        below = statistics.median(seconds for parts in rounds for _, seconds in parts.levels[1:])
        share = f"{root / one_row:.1%}, {below / one_row:.1%}"
        report.add_row(name, f"{1000 * target:.2f} ms", f"{1000 * root:.2f} ms", f"{1000 * below:.2f} ms", share)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a path or a hub name; SmolLM2-135M-Instruct by default")
    parser.add_argument("--head", help="as --draft takes it, auto for the shipped one; by default random")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="token ids that a random head proposes")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    console = Console()
    engine = load(options)
    engine.wait_until_compiled()
    console.print(f"{machine()}, target {engine.target.loaded.weights}, head {engine.pair['draft_dtype']}")
    console.print(table(measure(engine, options)))


if __name__ == "__main__":
    main()
