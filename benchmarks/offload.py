"""Weights streamed from the disk within a budget: accelerate's disk offload, ours plain, best chain, planned tree.

    python benchmarks/offload.py --target FOLDER --memory-budget 900MiB [--draft MODEL] [--sweep]

The target is a folder of safetensors; `benchmarks/widen.py` makes one of any size. The draft is by default the default
model with its matrices rounded to 4 bits in groups of 64, a stand-in for a small model that agrees well with a large
one. Each way runs in processes of its own, in turns, so that its peak memory is its own; ours end with a request that
fills the context, untimed, since that is what memory is planned for. The link is held against raw direct reads of the
same files, measured between answers.

accelerate reads through the page cache. To cap that too run all of this under a limit (systemd-run --user --scope -p
MemoryMax=…); without one the files' pages are dropped before each of its passes, which is what a cap comes to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import machine, read_prompts
from rich import box
from rich.console import Console
from rich.table import Table
from streaming import accelerate_model, drop_pages, peak_memory, raw_rate, rounded_draft, weight_files
from transformers import AutoTokenizer

import sequoia
from sequoia import SamplingParams
from sequoia.engine import Engine
from sequoia.errors import SequoiaError
from sequoia.measure.prompts import read_prompts as read_records
from sequoia.measure.tune import TuneSettings, tune
from sequoia.tree.dynamic import Tree
from sequoia.tree.option import Option
from sequoia.tree.plan import Plan, PlanFile

_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PLAIN = "plain"
_FULL_ROUNDS, _ROOM = 3, 64  # rounds that fill the context, and tokens left for their trees
_GIVEN = ("target", "memory_budget", "context", "draft", "draft_dtype", "plan", "count", "turns")
_LENGTHS = ("max_tokens", "few_tokens")
_COLUMNS = (
    "T",
    "tokens/s",
    "/ plain",
    "tokens/round",
    "said",
    "s/round",
    "said",
    "MB/token",
    "GB/s",
    "raw",
    "share",
    "peak MiB",
    "said",
)


@dataclass
class Outcome:
    """One way at one temperature, all answers together, without the rounds that read the prompts."""

    name: str
    temperature: float
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    bytes_moved: int = 0
    raw: list[float] = field(default_factory=list)  # bytes/s
    peak: int = 0
    said: int = 0  # of memory
    resident: int = 0  # layers
    predicted: tuple[float, float] | None = None  # tokens and seconds per round

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def add(self, other: Outcome) -> None:
        """Another run of the same."""
        for name in ("tokens", "rounds", "seconds", "bytes_moved"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.raw += other.raw
        self.peak, self.said = max(self.peak, other.peak), max(self.said, other.said)
        self.resident, self.predicted = other.resident, other.predicted


def params(asked: argparse.Namespace, tokens: int = 256) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=asked.temperatures[0], seed=1, ignore_eos=True)


def loaded_engine(asked: argparse.Namespace, draft: str, tree: Tree | str = "off") -> Engine:
    """Args:
    tree: the largest that will run, which memory is planned for.
    """
    return sequoia.load(
        asked.target,
        draft,
        tree,
        draft_dtype="auto" if draft == "ngram" else asked.draft_dtype,
        offload="disk",
        memory_budget=asked.memory_budget,
        context=asked.context,
    )


def ours(asked: argparse.Namespace, ways: Mapping[str, Option | None]) -> Iterator[Outcome]:
    """All ways in turn on each prompt; None is plain decoding."""
    trees = [way.shape for way in ways.values() if way is not None]
    largest = max(trees, key=lambda tree: tree.size, default="off")
    engine = loaded_engine(asked, asked.draft if trees else "ngram", largest)
    files, memory = weight_files(Path(asked.target)), engine.memory
    assert memory is not None
    found = {
        name: Outcome(name, asked.temperatures[0], said=memory.total, resident=memory.resident, predicted=_said(way))
        for name, way in ways.items()
    }
    for index, prompt in enumerate(read_prompts(asked.prompts, asked.count, engine)[asked.turn :: asked.turns]):
        turned = [*list(ways)[index % len(ways) :], *list(ways)[: index % len(ways)]]
        for name in turned:
            way, outcome = ways[name], found[name]
            tree, tokens = ("off", asked.few_tokens) if way is None else (way.shape, asked.max_tokens)
            answer(engine.with_tree(tree), prompt, params(asked, tokens), outcome)
            for slot in range(engine.target.link.slots):
                engine.target.link.wait(slot)  # or the ring reads beside the raw reads
            outcome.raw.append(raw_rate(files))
    fill_context(engine.with_tree(largest), asked.context)
    for outcome in found.values():
        outcome.peak = peak_memory()
        yield outcome


def fill_context(engine: Engine, context: int) -> None:
    """Rounds at the end of the context that memory is planned for, with room for their trees."""
    words = engine.tokenizer.encode("All that memory is planned for is used. ")
    session = engine.session((words * context)[: context - _ROOM], SamplingParams(temperature=0.0, ignore_eos=True))
    for _ in range(_FULL_ROUNDS):
        session.step()


def _said(way: Option | None) -> tuple[float, float] | None:
    return None if way is None else (way.prediction.tokens_per_round, way.prediction.seconds_per_round)


def answer(engine: Engine, prompt: Sequence[int], wanted: SamplingParams, outcome: Outcome) -> None:
    session, link = engine.session(prompt, wanted), engine.target.link
    session.step()
    before, moved, started = len(session.tokens), link.bytes_moved, time.perf_counter()
    while session.finish_reason is None:
        session.step()
        outcome.rounds += 1
    outcome.seconds += time.perf_counter() - started
    outcome.tokens += len(session.tokens) - before
    outcome.bytes_moved += link.bytes_moved - moved


def accelerates(asked: argparse.Namespace) -> Iterator[Outcome]:
    """transformers' generate with as many layers in memory as ours has."""
    target, temperature = Path(asked.target), asked.temperatures[0]
    files, tokenizer = weight_files(target), AutoTokenizer.from_pretrained(target)
    outcome = Outcome("accelerate, disk", temperature, resident=asked.resident)
    noise = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    starts: list[float] = []

    def begin(*_: Any) -> None:
        drop_pages(files)
        starts.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        model, streamed = accelerate_model(target, asked.resident, folder)
        model.register_forward_pre_hook(begin)
        for record in read_records(asked.prompts, asked.count)[asked.turn :: asked.turns]:
            outcome.raw.append(raw_rate(files))
            starts.clear()
            torch.manual_seed(1)
            ids = torch.tensor([record.token_ids(tokenizer, len(tokenizer), 256)])
            length = {"max_new_tokens": asked.few_tokens, "min_new_tokens": asked.few_tokens}
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), **length, **noise)
            outcome.seconds += time.perf_counter() - starts[1]
            outcome.tokens += len(starts) - 1
            outcome.rounds += len(starts) - 1
            outcome.bytes_moved += (len(starts) - 1) * streamed
    outcome.peak = peak_memory()
    yield outcome


def tuned(asked: argparse.Namespace) -> PlanFile:
    """The plan given, or one made now on other prompts than those that are timed, and kept there."""
    if asked.plan.exists():
        return PlanFile.load(asked.plan)
    settings = TuneSettings(
        tuple(SamplingParams(temperature=value) for value in asked.temperatures),
        samples=asked.samples,
        tokens=asked.max_tokens,
        seconds=asked.seconds,
        contexts=(128,),
        max_size=_SWEEP[-1],
    )
    file = tune(
        loaded_engine(asked, asked.draft, f"optimal:{_SWEEP[-1]}x8"),
        read_records(["built-in"], asked.samples),
        settings,
    )
    file.save(asked.plan)
    return file


def ways_of(plan: Plan, sweep: bool) -> dict[str, Option | None]:
    """The best chain and the chosen option; for a sweep the best tree of each size beside that."""
    chain = next(option for option in plan.options if option.kind == "chain")
    chosen = {f"▸ {plan.chosen.name}": plan.chosen}
    if not sweep:
        return {chain.name: chain, **chosen}
    sizes = {option.shape.size: option for option in plan.sizes}
    near = [min(sizes, key=lambda found: abs(found - size)) for size in _SWEEP]
    return {**chosen, **{f"size {size}": sizes[size] for size in near}}


def one_way(asked: argparse.Namespace) -> None:
    """A child's work: its outcomes as lines of JSON."""
    if asked.way == "accelerate":
        found = accelerates(asked)
    elif asked.way == _PLAIN:
        found = ours(asked, {_PLAIN: None})
    else:
        found = ours(asked, ways_of(PlanFile.load(asked.plan).plan_for(params(asked)), asked.way == "sweep"))
    for outcome in found:
        print(json.dumps(asdict(outcome)))


def in_turns(asked: argparse.Namespace, arguments: Sequence[str], temperature: float) -> list[Outcome]:
    """What each way finds, in processes of their own."""
    found: dict[str, Outcome] = {}
    resident = 0
    ways = (_PLAIN, "sweep") if asked.sweep else (_PLAIN, "accelerate", "trees")
    for turn, way in product(range(asked.turns), ways):
        own = ["--way", way, "--turn", str(turn), "--temperature", str(temperature), "--resident", str(resident)]
        run = subprocess.run([sys.executable, __file__, *arguments, *own], stdout=subprocess.PIPE, text=True)
        if run.returncode:
            raise SystemExit(f"error: {way} at temperature {temperature:g} failed")
        for line in run.stdout.splitlines():
            with suppress(json.JSONDecodeError):
                outcome = Outcome(**json.loads(line))
                found.setdefault(outcome.name, Outcome(outcome.name, temperature)).add(outcome)
                resident = outcome.resident if way == _PLAIN else resident
    return list(found.values())


def table(outcomes: Sequence[Outcome]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("way", no_wrap=True)
    for column in _COLUMNS:
        made.add_column(column, justify="right", no_wrap=True)
    plain = next(outcome.speed for outcome in outcomes if outcome.name == _PLAIN)
    for outcome in outcomes:
        tokens, seconds = outcome.predicted or (None, None)
        rate, raw = outcome.bytes_moved / outcome.seconds, statistics.median(outcome.raw)
        made.add_row(
            outcome.name,
            f"{outcome.temperature:g}",
            f"{outcome.speed:.2f}",
            f"{outcome.speed / plain:.2f}",
            f"{outcome.tokens / outcome.rounds:.2f}",
            "" if tokens is None else f"{tokens:.2f}",
            f"{outcome.seconds / outcome.rounds:.3f}",
            "" if seconds is None else f"{seconds:.3f}",
            f"{outcome.bytes_moved / outcome.tokens / 1e6:.0f}",
            f"{rate / 1e9:.2f}",
            f"{raw / 1e9:.2f}",
            f"{rate / raw:.0%}",
            f"{outcome.peak / 2**20:.0f}",
            f"{outcome.said / 2**20:.0f}" if outcome.said else "",
        )
    return made


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--memory-budget", default="1GiB")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--draft")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--plan", type=Path, help="a plan file; made where there is none")
    parser.add_argument("--sweep", action="store_true", help="trees of sizes 1 to 256 instead of the comparison")
    parser.add_argument("--prompts", action="append", help="as for `sequoia bench`; repeatable")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2, help="of all ways, each in new processes and on its prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--few-tokens", type=int, default=8, help="of answers at a token a pass, accelerate's and plain ones"
    )
    parser.add_argument("--temperature", default="0,0.6")
    parser.add_argument("--samples", type=int, default=24, help="for a plan")
    parser.add_argument("--seconds", type=float, default=120.0, help="of timing for a plan")
    parser.add_argument("--resident", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not 1 <= asked.turns <= asked.count:
        parser.error(f"--turns must be 1 to the {asked.count} prompts of --count, not {asked.turns}")
    asked.temperatures = [float(value) for value in asked.temperature.split(",")]
    asked.prompts = asked.prompts or ["built-in"]
    return asked


def main() -> None:
    asked = options()
    if asked.way is not None:
        one_way(asked)
        return
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        asked.draft = asked.draft or str(rounded_draft(Path(folder) / "rounded-to-4-bits"))
        asked.plan = asked.plan or Path(folder) / "plan.json"
        tuned(asked)
        given = {f"--{name.replace('_', '-')}": str(getattr(asked, name)) for name in (*_GIVEN, *_LENGTHS)}
        arguments = [part for option in given.items() for part in option]
        arguments += [part for source in asked.prompts for part in ("--prompts", source)]
        console.print(machine())
        arguments += ["--sweep"] if asked.sweep else []
        for temperature in asked.temperatures:
            console.print(table(in_turns(asked, arguments, temperature)))


if __name__ == "__main__":
    try:
        main()
    except SequoiaError as error:
        raise SystemExit(f"error: {error}") from None
