"""Whether a plan holds: predicted against measured, and the planned shape against others, on prompts it has not seen.

    python benchmarks/plans.py --plan plan.json --prompts FILE [--prompts FILE …] [--count 12] [--temperature 0,0.6]

For each temperature all shapes take turns on every prompt, in an order that turns with the prompts, with answers as
long as those the plan was tuned on. Predictions are those of the plan file, for the shapes it has looked at.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import machine, read_prompts
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sequoia
from sequoia import SamplingParams, TreeShape
from sequoia.engine import Engine
from sequoia.errors import SequoiaError
from sequoia.tree.option import Option
from sequoia.tree.plan import Plan, PlanFile
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile

_CHAINS = range(1, 9)
_WIDE = {"chains:4x4": TreeShape.chains(4, 4), "chains:16x8": TreeShape.chains(16, 8)}
_BEAMS = {"beam:2x4": TreeShape.beam(2, 4), "beam:4x6": TreeShape.beam(4, 6)}
_BLIND_SIZES = (16, 64)  # of trees planned without latencies
_BLIND_DEPTH = 16
_PAUSE = 3.0  # a round of as many medians was interrupted by something else, and counts as one median
_OTHER_SIZES = 3  # beside the chosen option, whose predictions are held against what is measured


@dataclass
class Measured:
    """One shape's rounds, by prompt."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    round_seconds: list[float] = field(default_factory=list)  # of whole rounds but the first, all prompts together
    seconds: list[float] = field(default_factory=list)  # of all rounds but the first
    later_tokens: list[int] = field(default_factory=list)  # of these

    @property
    def tokens_per_round(self) -> float:
        return sum(self.tokens) / sum(self.rounds)

    @property
    def tokens_error(self) -> float:
        return _ratio_error(self.tokens, self.rounds)

    @property
    def seconds_per_round(self) -> float:
        return float(np.median(self.round_seconds))

    @property
    def seconds_per_token(self) -> float:
        return sum(self.seconds) / sum(self.later_tokens)


def _ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Standard error of Σ above / Σ below by jackknife over prompts."""
    top, bottom = np.array(above, dtype=float), np.array(below, dtype=float)
    without = (top.sum() - top) / (bottom.sum() - bottom)
    return float(np.sqrt((len(top) - 1) / len(top) * ((without - without.mean()) ** 2).sum()))


def shapes_of(plan: Plan) -> dict[str, TreeShape]:
    """The chosen shape, three other sizes of the plan, and what else people run."""
    named = [(f"▸ {plan.chosen.name}", plan.chosen.shape)]
    named += [(option.name, option.shape) for option in [*plan.options, *_other_sizes(plan)]]
    named += [(f"chain {edges}", TreeShape.chain(edges)) for edges in _CHAINS]
    named += [*_WIDE.items(), *_BEAMS.items()]
    named += [(f"optimal:{size}, by tokens alone", _blind(plan.profile, size)) for size in _BLIND_SIZES]
    found: dict[TreeShape, str] = {}
    for name, shape in named:
        found.setdefault(shape, name)
    return {name: shape for shape, name in found.items()}


def _other_sizes(plan: Plan) -> list[Option]:
    """Of the plan's trees some of other sizes than the chosen one, spread over all."""
    trees = [option for option in plan.sizes if option.kind == "tree" and option.shape != plan.chosen.shape]
    places = np.linspace(0, len(trees) - 1, min(_OTHER_SIZES, len(trees))).round().astype(int)
    return [trees[place] for place in places]


def _blind(profile: AcceptanceProfile, size: int) -> TreeShape:
    return optimal_shape(profile, size, _BLIND_DEPTH)


def measure(
    engine: Engine, shapes: Mapping[str, TreeShape], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Measured]:
    engines = {name: engine.with_tree(shape) for name, shape in shapes.items()}
    found = {name: Measured() for name in shapes}
    names = list(shapes)
    for engine_ in engines.values():
        _answer(engine_, prompts[0], params, Measured())  # warm-up
    bar = Console(stderr=True)
    for index, prompt in enumerate(track(prompts, f"temperature {params.temperature:g}", console=bar, transient=True)):
        turned = names[index % len(names) :] + names[: index % len(names)]
        for name in turned if index % 2 else turned[::-1]:
            _answer(engines[name], prompt, params, found[name])
    return found


def _answer(engine: Engine, prompt: Sequence[int], params: SamplingParams, found: Measured) -> None:
    session, tokens, seconds, whole = engine.session(prompt, params), [], [], []
    while session.finish_reason is None:
        started = time.perf_counter()
        round_ = session.step()
        seconds.append(time.perf_counter() - started)
        tokens.append(len(round_.token_ids))
        if round_.tree.shape == engine.tree:
            whole.append(seconds[-1])
    pause = _PAUSE * float(np.median(seconds))
    seconds = [taken if taken < pause else pause / _PAUSE for taken in seconds]
    found.tokens.append(sum(tokens))
    found.rounds.append(len(tokens))
    found.seconds.append(sum(seconds[1:]))
    found.later_tokens.append(sum(tokens[1:]))
    found.round_seconds += whole[1:]


def table(plan: Plan, shapes: Mapping[str, TreeShape], found: Mapping[str, Measured]) -> Table:
    title = f"temperature {plan.params['temperature']:g}"
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    made.add_column("shape", no_wrap=True)
    columns = ("nodes", "tokens/round", "predicted", "ms/round", "predicted", "tokens/s", "predicted", "/ chosen")
    for column in columns:
        made.add_column(column, justify="right")
    predicted = {option.shape: option.prediction for option in [*plan.sizes, *plan.options]}
    chosen = next(iter(found.values()))
    for name, shape in shapes.items():
        entry, said = found[name], predicted.get(shape)
        made.add_row(
            name,
            str(shape.size),
            f"{entry.tokens_per_round:.2f} ± {entry.tokens_error:.2f}",
            _held(said and said.tokens_per_round, entry.tokens_per_round, 1, 2),
            f"{entry.seconds_per_round * 1e3:.1f}",
            _held(said and said.seconds_per_round, entry.seconds_per_round, 1e3, 1),
            f"{1 / entry.seconds_per_token:.1f}",
            _held(said and said.tokens_per_second, 1 / entry.seconds_per_token, 1, 1),
            _against(entry, chosen),
        )
    return made


def _held(said: float | None, found: float, scale: float, digits: int) -> str:
    """What was predicted, and how far it is from what was measured."""
    return "–" if said is None else f"{said * scale:.{digits}f} ({said / found - 1:+.0%})"


def _against(entry: Measured, chosen: Measured) -> str:
    """Its speed over the chosen shape's, with one standard error over prompts."""
    ratios = np.log(_speeds(entry) / _speeds(chosen))
    error = float(ratios.std(ddof=1) / np.sqrt(len(ratios))) if len(ratios) > 1 else 0.0
    ratio = chosen.seconds_per_token / entry.seconds_per_token
    return f"{ratio:.2f} ± {ratio * error:.2f}"


def _speeds(entry: Measured) -> np.ndarray:
    return np.array(entry.later_tokens, dtype=float).clip(1) / np.array(entry.seconds).clip(1e-9)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--prompts", action="append", required=True, help="as for `sequoia bench`; repeatable")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", default="0,0.6")
    return parser.parse_args()


def main() -> None:
    asked, console = options(), Console(width=130)
    file = PlanFile.load(asked.plan)
    engine = sequoia.load(asked.target, asked.draft, "off", dtype=asked.dtype, draft_dtype=asked.draft_dtype)
    prompts = read_prompts(asked.prompts, asked.count, engine)
    console.print(machine())
    for temperature in map(float, asked.temperature.split(",")):
        params = SamplingParams(max_tokens=asked.max_tokens, temperature=temperature, seed=1)
        plan = file.plan_for(params)
        shapes = shapes_of(plan)
        console.print(table(plan, shapes, measure(engine, shapes, prompts, params)))


if __name__ == "__main__":
    try:
        main()
    except SequoiaError as error:
        raise SystemExit(f"error: {error}") from None
