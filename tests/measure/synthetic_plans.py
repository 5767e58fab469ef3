"""Plan files that nothing was measured for: profiles, times and predictions made up, as large or small as asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option, Prediction, fastest, kind_of
from sequoia.tree.plan import BatchOption, Plan, PlanFile
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

PAIR = {
    "target": "SmolLM2-135M-Instruct",
    "draft": "ngram",
    "vocab_size": 49_152,
    "target_dtype": "bf16",
    "draft_dtype": None,
    "device": "cpu",
    "threads": 2,
    "compiled": False,
    "offload": "off",
}
MACHINE = {
    "cpu": "Intel(R) Xeon(R) Processor @ 2.70GHz",
    "cores": 2,
    "threads": 2,
    "memory_gib": 15.6,
    "gpu": None,
    "os": "Linux",
    "python": "3.12.3",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "commit": "c500a1b",
}
DATA = {
    "prompts": ["built-in"],
    "hash": "5f0c1d2e3a4b",
    "count": 98,
    "samples": 200,
    "tokens": 64,
    "prompt_tokens": 128,
    "seed": 0,
    "date": "2026-11-30",
}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 20, 24, 28, 32, 33, 40, 48, 64, 96, 128)


def profile(
    first: float = 0.6, exponent: float = 0.9, depths: int = 6, ranks: int = 16, bumps: bool = False
) -> AcceptanceProfile:
    """Rates that fall with rank and depth as in the paper; with `bumps` every third rank is above the one before."""
    rows = []
    for depth in range(depths):
        left = [(1 - first * 0.96**depth) * rank**-exponent for rank in range(1, ranks + 1)]
        rates = [before - after for before, after in zip([1.0, *left], left, strict=False)]
        if bumps:
            rates[1::3], rates[2::3] = rates[2::3], rates[1 : len(rates) - 1 : 3]
        rows.append(rates)
    errors = [[math.sqrt(rate * (1 - rate) / (400 * 0.6**depth)) for rate in row] for depth, row in enumerate(rows)]
    return AcceptanceProfile(rows, {"errors": errors})


def latency(contexts: Sequence[int] = (128, 1024), draft: bool = True, rows: Sequence[int] = ROWS) -> LatencyProfile:
    """Times with a cliff after 16 and after 32 rows."""
    target = {
        context: {
            count: _timing(0.028 + context * 4e-6 + 0.00035 * count + 0.009 * ((count - 1) // 16)) for count in rows
        }
        for context in contexts
    }
    levels = {width: _timing(0.0006 + 0.00005 * width) for width in (1, 2, 4, 8, 16, 32)} if draft else {}
    overhead = {size: _timing(0.0011 + 0.00001 * size) for size in (1, 4, 16, 64, 128)}
    return LatencyProfile(target, levels, overhead)


def _timing(seconds: float) -> Timing:
    return Timing(seconds, 0.05 * seconds)


def option(shape: TreeShape, rates: AcceptanceProfile, times: LatencyProfile, batch: int = 1) -> Option:
    """An option whose tokens are those the profile gives."""
    tokens = expected_tokens(shape, rates) if shape.size > 1 else 1.0
    seconds = times.round_seconds(shape, batch=batch)
    error = 0.02 * (tokens - 1)
    return Option(kind_of(shape), shape, Prediction(tokens, error, seconds, 0.012 * seconds))


def plan(
    temperature: float,
    rates: AcceptanceProfile,
    times: LatencyProfile,
    *,
    tree: TreeShape | None = None,
    sizes: Sequence[int] = ROWS[1:],
    **params: Any,
) -> Plan:
    """The best of the optimal trees and chains of these sizes, or the `tree` given."""
    off = option(TreeShape.root_only(), rates, times)
    if not times.draft:
        return Plan({"temperature": temperature, **params}, rates, (off,))
    chains = [option(TreeShape.chain(depth), rates, times) for depth in range(1, 13)]
    trees = [option(optimal_shape(rates, size, 8), rates, times) for size in sizes]
    trees = [entry for entry in trees if entry.kind == "tree"]
    best = option(tree, rates, times) if tree else fastest(trees)
    return Plan({"temperature": temperature, **params}, rates, (off, fastest(chains), best), (*trees, *chains))


def batch_option(batch: int, rates: AcceptanceProfile, times: LatencyProfile) -> BatchOption:
    shapes = (TreeShape.root_only(), TreeShape.chain(2), TreeShape([-1, 0, 0, 1, 3]))
    return BatchOption(batch, tuple(option(shape, rates, times, batch) for shape in shapes), batch > 8)


def plan_file() -> PlanFile:
    """Three temperatures, and batches."""
    times = latency()
    plans = (
        plan(0.0, profile(0.62), times),
        plan(0.6, profile(0.55, bumps=True), times, top_p=0.9),
        plan(1.0, profile(0.35, 0.5), times),
    )
    batch = tuple(batch_option(count, plans[0].profile, times) for count in (1, 4, 16))
    return PlanFile(PAIR, MACHINE, DATA, times, plans, batch)


def without_draft() -> PlanFile:
    times = latency((128,), draft=False)
    return PlanFile(PAIR | {"draft": "none"}, MACHINE, DATA, times, (plan(0.0, AcceptanceProfile([[0.0]]), times),))


def useless_draft() -> PlanFile:
    """A draft that the target never agrees with: off is chosen."""
    times = latency((128,))
    rates = AcceptanceProfile([[0.001] * 8] * 3, {"errors": [[0.0005] * 8] * 3})
    return replace(plan_file(), latency=times, plans=(plan(0.6, rates, times),), batch=())


def large_tree() -> PlanFile:
    times = latency()
    rates = profile(0.85, 0.6, depths=12, ranks=24)
    tree = optimal_shape(rates, 128, 16)
    return replace(plan_file(), plans=(plan(0.6, rates, times, tree=tree),), batch=())


def hard(name: str = "a$b$<i>&\"'漢" + "x" * 90) -> PlanFile:
    """Names that mean something to HTML, to CSS and to Matplotlib, and one row in the profile."""
    file = plan_file()
    rates = AcceptanceProfile([[0.4, 0.0, 0.3, 0.05]])
    plans = (plan(0.0, rates, file.latency),)
    return replace(
        file, pair=PAIR | {"target": name, "draft": "/models/" + name}, data={"prompts": [name]}, plans=plans
    )
