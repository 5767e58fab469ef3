"""Time of the planner: python benchmarks/planner.py"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from sequoia.tree.choice import plan
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.planner import optimal_shape, optimal_tokens
from sequoia.tree.profile import AcceptanceProfile

RANKS, DEPTH, VISITS = 32, 32, 667
REPEATS = 3


def rates(depth: int) -> np.ndarray:
    """Falling rates [RANKS] that sum to less than 1, lower at greater depth."""
    return (0.9 - 0.01 * depth) * np.arange(1, RANKS + 1) ** -2.0 / 1.65


def measured(depth: int, generator: np.random.Generator) -> np.ndarray:
    """The same rates as counted in a sample, so not falling any more."""
    share = rates(depth)
    return generator.multinomial(VISITS, [*share, 1 - share.sum()])[:-1] / VISITS


def latency() -> LatencyProfile:
    """Passes of up to 128 rows with a cliff, draft levels that grow with their width."""
    rows = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), 80, 96, 112, 128)
    return LatencyProfile(
        {128: {row: Timing(0.03 if row <= 64 else 0.06, 0.001) for row in rows}},
        {width: Timing(0.001 + 0.0005 * width, 0.0001) for width in (1, 2, 4, 8, 16, 32)},
        {1: Timing(0.001, 0.0001)},
    )


def best_time(call: Callable[[], object]) -> float:
    """Least wall-clock seconds of a few calls."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    generator = np.random.default_rng(0)
    falling = AcceptanceProfile([rates(0)])
    falling_by_depth = AcceptanceProfile([rates(depth) for depth in range(DEPTH)])
    one_row = AcceptanceProfile([measured(0, generator)])
    few_rows = AcceptanceProfile([measured(depth, generator) for depth in range(8)])
    many_rows = AcceptanceProfile([measured(depth, generator) for depth in range(DEPTH)])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("table 1024, programme, 1 row", lambda: optimal_tokens(one_row, 1024, DEPTH, "programme")),
        ("table 1024, programme, 8 rows", lambda: optimal_tokens(few_rows, 1024, DEPTH, "programme")),
        (f"table 1024, programme, {DEPTH} rows", lambda: optimal_tokens(many_rows, 1024, DEPTH, "programme")),
        (f"shape 1024, programme, {DEPTH} rows", lambda: optimal_shape(many_rows, 1024, DEPTH, "programme")),
        ("shape 8192, programme, 1 row", lambda: optimal_shape(one_row, 8192, DEPTH, "programme")),
        ("table 1024, heap, 1 row", lambda: optimal_tokens(falling, 1024, DEPTH, "heap")),
        ("shape 8192, heap, 1 row", lambda: optimal_shape(falling, 8192, DEPTH, "heap")),
        (f"shape 8192, heap, {DEPTH} rows", lambda: optimal_shape(falling_by_depth, 8192, DEPTH, "heap")),
        ("table 8192, heap, 1 row", lambda: optimal_tokens(falling, 8192, DEPTH, "heap")),
        ("plan 128x16, falling rates", lambda: plan(falling_by_depth, latency(), params={})),
        (f"plan 128x16, {DEPTH} measured rows", lambda: plan(many_rows, latency(), params={})),
    ]
    print(f"{RANKS} ranks, depth {DEPTH}; best of {REPEATS}")
    for name, call in cases:
        print(f"{name:34} {best_time(call):8.3f} s", flush=True)


if __name__ == "__main__":
    main()
