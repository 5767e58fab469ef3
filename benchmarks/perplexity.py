"""How well the target predicts text in each number format: perplexities and their ratios, with 95% intervals.

    python benchmarks/perplexity.py [--target MODEL] [--prompts SOURCE] [--count 28] [--answers 4] [--tokens 512]

Two sets of texts: the prompts as the model reads them, and answers to them, drawn at temperature 1 in fp32 with a fixed
seed, which every format then reads. Each text is read once, its own tokens given (teacher forcing), in passes of 16
rows, the width of a tree. What all prompts begin with, a chat template's first lines, is read but not scored: it would
count once for each text. Intervals are the jackknife's over whole texts: tokens of one text are not independent.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from itertools import chain

import torch
from common import machine, read_prompts

import sequoia
from sequoia.engine import Engine
from sequoia.measure.texts import batches, plan_asks, write_texts
from sequoia.model.causal_lm import CausalLM

_FORMATS = ("fp32", "bf16", "int8")
_RATIOS = (("int8", "bf16"), ("int8", "fp32"), ("bf16", "fp32"))
_ROWS = 16
_SEED = 0


@dataclass(frozen=True)
class Reading:
    """A text, and how many of its tokens are only there to be read."""

    ids: tuple[int, ...]
    given: int


Losses = list[list[float]]  # by text, of each token that is not given: negative log-probability in nats


def main() -> None:
    options = _options()
    print(machine())
    readings: dict[str, list[Reading]] = {}
    losses: dict[tuple[str, str], Losses] = {}
    for name in _FORMATS:
        engine = sequoia.load(options.target, dtype=name, device="cpu")
        readings = readings or _readings(engine, options)
        for kind, texts in readings.items():
            losses[kind, name] = found = [_losses(engine.target, text) for text in texts]
            print(f"{kind} in {name}: perplexity {_perplexity(found):.4f}", flush=True)
    for kinds in [[kind] for kind in readings] + ([list(readings)] if len(readings) > 1 else []):
        by_format = {name: [text for kind in kinds for text in losses[kind, name]] for name in _FORMATS}
        texts = by_format[_FORMATS[0]]
        print(f"{' and '.join(kinds)}: {sum(map(len, texts))} tokens of {len(texts)} texts")
        for above, below in _RATIOS:
            print(f"  {above} / {below}: {_ratio(by_format[above], by_format[below])}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--prompts", action="append", help="as for `sequoia bench`; repeatable")
    parser.add_argument("--count", type=int, default=28)
    parser.add_argument("--answers", type=int, default=4, help="to each prompt; 0 for prompts alone")
    parser.add_argument("--tokens", type=int, default=512, help="texts are cut to this many, answers to a quarter")
    return parser.parse_args()


def _readings(engine: Engine, options: argparse.Namespace) -> dict[str, list[Reading]]:
    prompts = read_prompts(options.prompts or ["built-in"], options.count, engine, options.tokens)
    shared = len(os.path.commonprefix(prompts)) if len(prompts) > 1 else 0
    readings = {"prompts": [Reading(tuple(ids), max(1, shared)) for ids in prompts]}
    if options.answers:
        params = sequoia.SamplingParams(max_tokens=options.tokens // 4, temperature=1.0, seed=_SEED)
        asks = batches(plan_asks(prompts, options.answers * len(prompts), params.temperature), params.max_tokens)
        written = chain.from_iterable(
            write_texts(engine.target, params, batch, engine.target.loaded.eos_ids) for batch in asks
        )
        readings["answers"] = [Reading(text.ask.prompt + text.tokens, len(text.ask.prompt)) for text in written]
    return readings


def _losses(model: CausalLM, text: Reading) -> list[float]:
    tokens, cache = torch.tensor(text.ids, device=model.device), model.new_cache()
    logits = torch.cat([model.forward(part, cache) for part in tokens[:-1].split(_ROWS)])[text.given - 1 :]
    return torch.nn.functional.cross_entropy(logits.float(), tokens[text.given :], reduction="none").tolist()


def _perplexity(losses: Losses) -> float:
    return math.exp(sum(map(sum, losses)) / sum(map(len, losses)))


def _ratio(losses: Losses, base: Losses) -> str:
    """Of two perplexities of the same texts."""
    sums = torch.tensor([sum(own) - sum(other) for own, other in zip(losses, base, strict=True)], dtype=torch.float64)
    counts = torch.tensor(list(map(len, losses)), dtype=torch.float64)
    mean, without = sums.sum() / counts.sum(), (sums.sum() - sums) / (counts.sum() - counts)
    error = math.sqrt((len(sums) - 1) / len(sums) * float((without - without.mean()).square().sum()))
    low, ratio, high = (math.exp(float(mean) + shift) for shift in (-1.96 * error, 0, 1.96 * error))
    return f"{ratio:.4f} ({low:.4f}–{high:.4f})"


if __name__ == "__main__":
    main()
