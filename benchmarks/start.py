"""How long a start takes, up to the first text: python benchmarks/start.py [--repeats 9] [--target MODEL]

Fresh processes in turn: torch alone, torch and what of transformers any model needs, and `sequoia generate` up to its
first text. The model is in its cache after the first one, which does not count.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

_TRANSFORMERS = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM"
_PROMPT = "Why is the sky blue?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--target")
    options = parser.parse_args()
    target = ["--target", options.target] if options.target else []
    commands = {
        "torch": ["-c", "import torch; print()"],
        "torch and transformers": ["-c", f"{_TRANSFORMERS}; print()"],
        "first text": ["-m", "sequoia", "generate", _PROMPT, "--max-tokens", "4", *target],
    }
    for command in commands.values():
        _seconds(command)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in track(range(options.repeats), "starting", console=Console(stderr=True)):
        for name, command in commands.items():
            times[name].append(_seconds(command))
    print(machine())
    table = Table("up to", "median s", "least s", box=None)
    for name, seconds in times.items():
        table.add_row(name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}")
    Console().print(table)


def _seconds(command: list[str]) -> float:
    """From the start of a process to the first byte that it prints."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    ) as process:
        assert process.stdout is not None
        found = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if not found:
        sys.exit(f"{' '.join(command)} printed nothing.")
    return seconds


if __name__ == "__main__":
    main()
