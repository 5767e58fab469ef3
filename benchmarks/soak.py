"""Many generations of a streamed target one after another: memory, threads and descriptors must not grow.

    python benchmarks/soak.py --target FOLDER --memory-budget 900MiB [--generations 100] [--minutes 30]

Prompts, temperatures, lengths and trees take turns; every fifth answer is abandoned in the middle of its stream, and
every tenth engine is closed and loaded again. Counts are taken after each generation. The first quarter warms up; of
the others the last ten must have no more threads and descriptors than any ten before, and no more than 2% of memory
beyond them. Exits with 1 if they have. Generations are spread over the minutes asked for.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import threading
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common import machine, read_prompts
from rich.progress import track

import sequoia
from sequoia import SamplingParams
from sequoia.engine import Engine
from sequoia.errors import SequoiaError

_TREES = ("optimal:32x8", "off", "chain:4", "dynamic:16x4")
_TEMPERATURES = (0.0, 0.6, 1.0)
_LENGTHS = (8, 24, 48)
_LAST, _SLACK = 10, 1.02


@dataclass(frozen=True)
class Count:
    """What a process holds."""

    memory: int  # bytes of its own, page cache left out
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Count:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found
        return cls(int(found[1]) * 1024, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def load(asked: argparse.Namespace) -> Engine:
    return sequoia.load(
        asked.target, asked.draft, "off", offload="disk", memory_budget=asked.memory_budget, context=asked.context
    )


def generate(engine: Engine, prompt: list[int], number: int) -> None:
    """One answer, or the beginning of one."""
    params = SamplingParams(
        max_tokens=_LENGTHS[number % len(_LENGTHS)],
        temperature=_TEMPERATURES[number % len(_TEMPERATURES)],
        seed=number,
        ignore_eos=True,
    )
    stream = engine.with_tree(_TREES[number % len(_TREES)]).stream(prompt, params)
    for _ in islice(stream, 2 if number % 5 == 4 else None):
        pass


def main() -> None:
    asked = options()
    engine = load(asked)
    prompts = read_prompts(["built-in"], 28, engine, most_tokens=asked.context // 2)
    counts, started = list[Count](), time.monotonic()
    for number in track(range(asked.generations), "generations"):
        if number and number % 10 == 0:
            del engine
            gc.collect()
            engine = load(asked)
        generate(engine, prompts[number % len(prompts)], number)
        counts.append(Count.now())
        due = started + 60 * asked.minutes * (number + 1) / asked.generations
        time.sleep(max(0.0, due - time.monotonic()))
    print(machine())
    print(f"{asked.generations} generations in {(time.monotonic() - started) / 60:.1f} minutes")
    raise SystemExit(0 if held(counts) else 1)


def held(counts: list[Count]) -> bool:
    """Whether the last ones have no more than those before, which is printed."""
    before, last = counts[len(counts) // 4 : -_LAST], counts[-_LAST:]
    fine = True
    for name, slack in (("memory", _SLACK), ("threads", 1.0), ("descriptors", 1.0)):
        early, late = ([getattr(count, name) for count in some] for some in (before, last))
        ends = f"first {getattr(counts[0], name)}, then at most {max(early)}, in the last {_LAST} at most {max(late)}"
        print(f"{name}: {ends}; medians {statistics.median(early):.0f} and {statistics.median(late):.0f}")
        fine = fine and max(late) <= slack * max(early)
    print(f"Python threads left: {[thread.name for thread in threading.enumerate()]}")
    return fine


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a folder of safetensors")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--memory-budget", default="1GiB")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--generations", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0)
    asked = parser.parse_args()
    if asked.generations < 4 * _LAST:
        parser.error(f"--generations must be at least {4 * _LAST}, not {asked.generations}.")
    return asked


if __name__ == "__main__":
    try:
        main()
    except SequoiaError as error:
        raise SystemExit(f"error: {error}") from None
