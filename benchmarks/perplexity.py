"""How well the target predicts text in each number format: perplexities, and their ratios to bf16's.

    python benchmarks/perplexity.py [--target MODEL] [--prompts SOURCE] [--count 28] [--formats fp32,bf16,int8]

Each text is read once, its own tokens given (teacher forcing), in passes of 16 rows, the width of a tree.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from common import machine, read_prompts

import sequoia
from sequoia.model.causal_lm import CausalLM

_ROWS = 16
_BASE = "bf16"  # what the others are compared with


def main() -> None:
    options = _options()
    print(machine())
    losses = {}
    for name in options.formats.split(","):
        engine = sequoia.load(options.target, dtype=name, device=options.device)
        texts = read_prompts(options.prompts or ["built-in"], options.count, engine, options.tokens)
        losses[name] = [loss for ids in texts for loss in _losses(engine.target, ids)]
        print(f"{name}: perplexity {_perplexity(losses[name]):.4f} over {len(losses[name])} tokens", flush=True)
    for name in losses.keys() - {_BASE} if _BASE in losses else ():
        print(f"{name} / {_BASE}: {_ratio(losses[name], losses[_BASE])}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", action="append", help="as for `sequoia bench`; repeatable")
    parser.add_argument("--count", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=512, help="texts are cut to this many")
    parser.add_argument("--formats", default="fp32,bf16,int8")
    return parser.parse_args()


def _losses(model: CausalLM, ids: Sequence[int]) -> list[float]:
    """Negative log-probability of each token after the first, in nats."""
    tokens, cache = torch.tensor(ids, device=model.device), model.new_cache()
    logits = torch.cat([model.forward(part, cache) for part in tokens[:-1].split(_ROWS)])
    return torch.nn.functional.cross_entropy(logits.float(), tokens[1:], reduction="none").tolist()


def _perplexity(losses: Sequence[float]) -> float:
    return math.exp(sum(losses) / len(losses))


def _ratio(losses: Sequence[float], base: Sequence[float]) -> str:
    """Of two perplexities of the same tokens, with the standard error that the choice of tokens leaves."""
    differences = torch.tensor(losses, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64)
    error = float(differences.std() / math.sqrt(len(differences)))
    ratio = math.exp(float(differences.mean()))
    return f"{ratio:.4f} ± {ratio * error:.4f}"


if __name__ == "__main__":
    main()
