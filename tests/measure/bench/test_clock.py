"""The clock sees every pass of the target, by whoever, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import answer, tiny_engine

from sequoia.engine import Engine
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.methods import build_method
from sequoia.params import SamplingParams
from sequoia.speculate.stats import Stats

PROMPT = [3, 5, 7, 3, 5]
PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def rows(engine: Engine, *counts: int) -> None:
    for count in counts:
        engine.target_model(input_ids=torch.ones(1, count, dtype=torch.long))


@pytest.mark.parametrize(
    ("counts", "passes", "beyond"),
    [((5,), 1, 0), ((8, 4), 2, 7), ((2, 2, 4, 1), 2, 4), ((5, 6, 7), 3, 13), ((2, 2), 0, 0), ((), 0, 0)],
)
def test_passes_count_from_the_prompts_end(engine: Engine, counts: tuple[int, ...], passes: int, beyond: int) -> None:
    with PassClock(engine.target) as clock:
        clock.start(5)
        rows(engine, *counts)
    assert (clock.seen, clock.passes, clock.rows) == (len(counts), passes, beyond)
    assert (clock.prefill_seconds is None) == (passes == 0)


def test_the_prefill_ends_between_start_and_now(engine: Engine) -> None:
    with PassClock(engine.target) as clock:
        clock.start(4)
        rows(engine, 2)
        before = clock.now()
        rows(engine, 2)
        after = clock.now()
        rows(engine, 1)
    assert clock.prefill_seconds is not None
    assert before < clock.prefill_seconds < after


@pytest.mark.parametrize("tree", ["plain", "chain:3", "optimal:8x3", "dynamic:8x3"])
def test_passes_of_our_trees_are_rounds(engine: Engine, tree: str) -> None:
    stats = Stats()
    with PassClock(engine.target) as clock:
        method = build_method(tree, engine, clock)
        clock.start(len(PROMPT))
        method.generate(PROMPT, PARAMS, stats.add)  # type: ignore[arg-type]
    assert clock.passes == stats.rounds
    assert clock.rows == stats.drafted_tokens + stats.rounds - 1  # the first root is the prompt's last token
    assert (stats.rounds < 16) == (tree != "plain")


def test_a_long_prompt_is_read_in_several_passes() -> None:
    engine = tiny_engine("ngram")
    engine.target.context_length = None
    with PassClock(engine.target) as clock:
        clock.start(1100)
        answer(build_method("chain:2", engine, clock), [3] * 1100, PARAMS)
        assert clock.seen == clock.passes + 2


def test_passes_of_transformers_are_tokens(engine: Engine) -> None:
    with PassClock(engine.target) as clock:
        for name in ("transformers", "transformers-assisted", "transformers-lookup"):
            clock.start(len(PROMPT))
            tokens = answer(build_method(name, engine, clock), PROMPT, PARAMS)
            assert len(tokens) == 16
            assert clock.passes == 16 if name == "transformers" else 1 < clock.passes < 16


def test_the_hook_comes_off(engine: Engine) -> None:
    hooks = engine.target_model._forward_hooks
    with PassClock(engine.target):
        assert len(hooks) == 1
    assert not hooks
