"""Time of one pass over n rows, t(n), against transformers and against the machine: python benchmarks/passes.py

Our rows are the nodes of a token tree; the others run as many rows that follow each other. All take turns, each on a
context that it has read once and rolls back to after every pass.

No pass can take less than reading weights and cache once, nor less than its multiplications at the full matrix rate.
Both rates are measured in the same run; *distance* is how many times that limit a pass took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import machine
from limits import MEMORY, Limits, seconds
from random_models import FAMILIES, PREFIX, save_random
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from variants import EAGER, Variant, variants

from sequoia.errors import SequoiaError
from sequoia.model.threads import set_threads

QUICK = {"rows": [1, 16, 32], "contexts": [128]}
FULL = {"rows": [1, 2, 4, 8, 16, 32, 64, 128, 256], "contexts": [128, 1024, 4096]}
WARM_UP = 2  # passes of each kind that do not count: caches fill, and what is compiled may be compiled twice
FEW_ROWS = (16, 32)  # whose time should stay near one row's
PROFILED_PASSES, PROFILED_OPERATIONS = 5, 12


@dataclass(frozen=True)
class Point:
    """All passes of one kind."""

    context: int
    rows: int
    variant: str
    cache_numbers: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Between the quartiles."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float(high - low)


Points = Mapping[tuple[int, int, str], Point]  # by context, rows and variant


def measured(
    made: Mapping[str, Variant],
    contexts: Sequence[int],
    rows: Sequence[int],
    repeats: int,
    draw: Callable[[int], Tensor],
) -> Iterator[Point | None]:
    """None after each turn, and the points of each context at its end."""
    for context in contexts:
        tokens = draw(context)
        for variant in made.values():
            variant.fill(tokens)
        numbers = made[EAGER].cache_numbers
        times: dict[tuple[int, str], list[float]] = {(count, name): [] for count in rows for name in made}
        for turn in range(WARM_UP + repeats):
            for kind, taken in _turn(made, [draw(count) for count in rows], forwards=turn % 2 == 0).items():
                times[kind] += [taken] if turn >= WARM_UP else []
            yield None
        yield from (Point(context, count, name, numbers, tuple(values)) for (count, name), values in times.items())


def _turn(made: Mapping[str, Variant], passes: Sequence[Tensor], forwards: bool) -> dict[tuple[int, str], float]:
    """Seconds of one pass of each kind, by rows and variant: a machine's speed moves, and so all take turns."""
    found = {}
    for tokens in passes[:: 1 if forwards else -1]:
        for name, variant in list(made.items())[:: 1 if forwards else -1]:
            found[len(tokens), name] = seconds(partial(variant.run, tokens), tokens.device)
            variant.undo(len(tokens))
    return found


def _table(title: str, first: str, *others: str) -> Table:
    """Names, shortened where they must, and figures."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(first, no_wrap=True, max_width=34)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def limits_table(made: Mapping[str, Variant], limits: Limits) -> Table:
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits.multiplying.items())
    title = f"memory {limits.reading[MEMORY] / 1e9:.1f} GB/s; 10⁹ operations/s: {rates}"
    table = _table(title, "variant", "weights, 10⁶", "MB", "GB/s over as many bytes", "reading them, ms")
    for name, variant in made.items():
        size = variant.size
        rate = limits.read_rate(size.weight_bytes)
        figures = (size.weights / 1e6, size.weight_bytes / 1e6, rate / 1e9, size.weight_bytes / rate * 1e3)
        table.add_row(name, *(f"{figure:.1f}" for figure in figures))
    return table


def passes_table(context: int, points: Points, made: Mapping[str, Variant], limits: Limits) -> Table:
    columns = ("variant", "rows", "median", "least", "spread", "/ eager", "/ t(1)", "limit", "distance")
    table = _table(f"passes after {context} tokens of context, ms; spread between quartiles", *columns)
    of_context = [point for point in points.values() if point.context == context]
    for point in of_context:
        eager, single = points[context, point.rows, EAGER], points.get((context, 1, point.variant))
        least = made[point.variant].size.least_seconds(point.rows, point.cache_numbers, limits)
        times = (point.median, min(point.seconds), point.spread)
        table.add_row(
            point.variant,
            str(point.rows),
            *(f"{value * 1e3:.1f}" for value in times),
            f"{point.median / eager.median:.2f}",
            f"{point.median / single.median:.2f}" if single else "–",
            f"{least * 1e3:.1f}",
            f"{point.median / least:.1f}×",
            end_section=point.variant == list(made)[-1],
        )
    return table


def ratio_lines(context: int, points: Points, names: Sequence[str]) -> Iterator[str]:
    """One row against transformers', and a few rows against one, at one context."""

    def line(label: str, ratios: Mapping[str, tuple[Point | None, Point | None]]) -> str:
        found = [f"{name} {a.median / b.median:.2f}" for name, (a, b) in ratios.items() if a and b]
        return f"{label:22}{' · '.join(found) or 'not measured'}"

    def at(rows: int, name: str) -> Point | None:
        return points.get((context, rows, name))

    yield line("t(1) / eager's t(1)", {name: (at(1, name), at(1, EAGER)) for name in names if name != EAGER})
    for rows in FEW_ROWS:
        yield line(f"t({rows}) / t(1)", {name: (at(rows, name), at(1, name)) for name in names})


def profile_table(
    name: str, variant: Variant, context: int, rows: Sequence[int], draw: Callable[[int], Tensor]
) -> Table:
    """Self time of the operations that take most; with the profiler's own cost, so shares count and not sums."""
    variant.fill(draw(context))
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for count in rows:
        for operation, taken in _profiled(variant, draw(count)).items():
            times[operation][count] = taken
    ordered = sorted(times, key=lambda operation: -sum(times[operation].values()))
    listed = {operation: times[operation] for operation in ordered[:PROFILED_OPERATIONS]}
    listed["all others"] = {n: sum(times[other].get(n, 0) for other in ordered[PROFILED_OPERATIONS:]) for n in rows}
    title = f"{name} by operation and rows, ms, after {context} tokens"
    table = _table(title, "operation", *map(str, rows))
    for operation, by_rows in listed.items():
        table.add_row(operation.removeprefix("aten::"), *(f"{by_rows.get(count, 0.0) * 1e3:.1f}" for count in rows))
    return table


def _profiled(variant: Variant, tokens: Tensor) -> dict[str, float]:
    """Seconds of self time per pass by operation."""
    variant.run(tokens)
    variant.undo(len(tokens))
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports each start and stop on stderr
    with torch.profiler.profile() as profiler:
        for _ in range(PROFILED_PASSES):
            variant.run(tokens)
            variant.undo(len(tokens))
    field = "self_device_time_total" if tokens.is_cuda else "self_cpu_time_total"
    return {event.key: getattr(event, field) / 1e6 / PROFILED_PASSES for event in profiler.key_averages()}


def record(
    options: argparse.Namespace, limits: Limits, made: Mapping[str, Variant], points: Points
) -> dict[str, object]:
    """Everything measured, as plain data."""
    return {
        "machine": machine(),
        "target": options.target,
        "limits": asdict(limits),
        "variants": {name: asdict(variant.size) for name, variant in made.items()},
        "passes": [
            asdict(point) | {"limit": made[point.variant].size.least_seconds(point.rows, point.cache_numbers, limits)}
            for point in points.values()
        ],
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=numbers, metavar="LIST", help="such as 1,16,32; by default 1 to 256")
    parser.add_argument("--contexts", type=numbers, metavar="LIST", help="tokens; by default 128,1024,4096")
    parser.add_argument("--quick", action="store_true", help="by default 1,16,32 rows after 128 tokens")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtypes", default="bf16,fp32,int8", help="ours run in each; transformers in dtype auto")
    parser.add_argument("--compile", action="store_true", help="ours compiled, too: a minute more at first")
    parser.add_argument("--torch-compile", action="store_true", help="transformers compiled, too: minutes more")
    parser.add_argument("--profile", action="store_true", help="of ours by operation, after the first context")
    parser.add_argument("--target", help=f"a folder, a .gguf file, a hub name, or {PREFIX}FAMILY: {FAMILIES}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every pass's time")
    options = parser.parse_args()
    defaults = QUICK if options.quick else FULL
    vars(options).update({name: value for name, value in defaults.items() if getattr(options, name) is None})
    return options


def run(options: argparse.Namespace, console: Console) -> None:
    set_threads(options.threads)
    console.print(machine())
    most_tokens = max(options.contexts) + max(options.rows)
    compiled = options.compile, options.torch_compile
    made, reasons = variants(options.target, options.device, options.dtypes.split(","), *compiled, most_tokens)
    for name, reason in reasons.items():
        console.print(f"{name} left out: {reason}")
    loaded = made[EAGER].loaded
    console.print(f"{loaded.name}; eager: transformers' modules in {made[EAGER].size.form}")
    if loaded.context_length is not None and most_tokens > loaded.context_length:
        raise SystemExit(f"{loaded.name} has a context of {loaded.context_length} tokens. Lower --contexts or --rows.")
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randint(loaded.token_count, (count,), generator=generator).to(loaded.device)

    measure_limits = partial(Limits.measured, [variant.size.weight_bytes for variant in made.values()], loaded.device)
    limits = measure_limits()
    found = measured(made, options.contexts, options.rows, options.repeats, draw)
    turns = len(options.contexts) * (WARM_UP + options.repeats + len(options.rows) * len(made))
    progress = track(found, "passes", total=turns, console=Console(stderr=True), transient=True)
    points = {(point.context, point.rows, point.variant): point for point in progress if point}
    limits |= measure_limits()  # neighbours come and go

    console.print(limits_table(made, limits))
    for context in options.contexts:
        console.print(passes_table(context, points, made, limits))
    for line in ratio_lines(options.contexts[0], points, list(made)):
        console.print(line, soft_wrap=True)
    ours = {name: variant for name, variant in made.items() if name.startswith("ours")} if options.profile else {}
    for name, variant in ours.items():
        console.print(profile_table(name, variant, options.contexts[0], options.rows, draw))
    if options.json is not None:
        options.json.write_text(json.dumps(record(options, limits, made, points), indent=1), encoding="utf-8")


def main() -> None:
    options, console = parsed(), Console(width=None if sys.stdout.isatty() else 100)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if (options.target or "").startswith(PREFIX):
                options.target = save_random(options.target.removeprefix(PREFIX), Path(folder))
            run(options, console)
    except SequoiaError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
