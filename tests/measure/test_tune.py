"""Tuning a tiny pair: what is measured where, what is planned, and that nothing finished is lost."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import PROMPTS, tiny_engine

import sequoia.measure.acceptance
import sequoia.measure.tune as tune_module
from sequoia.engine import Engine
from sequoia.errors import UsageError
from sequoia.measure.acceptance import measure
from sequoia.measure.round_parts import Parts
from sequoia.measure.runs import RunCounts
from sequoia.measure.timings import Sweep, Timings, Trial
from sequoia.measure.tune import ACCEPTING, PLANNING, TIMING, TuneSettings, about, prompts_hash, tune
from sequoia.params import SamplingParams
from sequoia.tree.latency import level_widths
from sequoia.tree.plan import PlanFile
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
SETTINGS = TuneSettings((GREEDY, SAMPLED), samples=6, tokens=8, depth=4, ranks=4, max_size=8, max_depth=4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine("model")


def timings(row: float = 0.0, level: float = 0.0, laws: int = 2) -> Timings:
    """As if passes took 10 ms and `row` more for each row; the second law is slower by 1 ms for each level."""
    sizes = (1, 2, 3, 4, 6, 8)
    profile = AcceptanceProfile.shipped("ngram")
    sweeps = []
    for law in range(laws):
        trials = []
        for size in sizes:
            shape = TreeShape.root_only() if size == 1 else optimal_shape(profile, size, 4)
            target = 0.01 + row * size
            levels = tuple((width, level + 0.001 * law) for width in level_widths(shape))
            trials.append(Trial(20, size, Parts(target, levels, target + sum(seconds for _, seconds in levels))))
        sweeps.append(Sweep(law, tuple(trials), 0.1))
    return Timings((20,), sizes, laws, tuple(sweeps))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Timing gives what it is told to."""

    def script(**costs: float) -> None:
        monkeypatch.setattr(tune_module, "measure_latency", lambda engine, **_: timings(**costs))

    script()
    return script


def test_a_plan_for_each_of_the_parameters(engine: Engine, scripted: Any, tmp_path: Path):
    file = tune(engine, PROMPTS, SETTINGS, sources=["mine.jsonl"])
    assert [plan.params for plan in file.plans] == [{"temperature": 0.0}, {"temperature": 0.8}]
    for plan in file.plans:
        assert [option.kind for option in plan.options] == ["off", "chain", "tree"]
    assert file.pair == engine.pair
    assert file.machine["threads"] == 1
    assert file.data["prompts"] == ["mine.jsonl"]
    assert (file.data["hash"], file.data["samples"], file.data["count"]) == (prompts_hash(PROMPTS), 6, 4)
    assert [option.batch for option in file.batch] == [1, 4, 16]
    file.save(tmp_path / "plan.json")
    assert PlanFile.load(tmp_path / "plan.json").to_dict() == file.to_dict()


def test_predictions_are_simulated_along_the_texts(engine: Engine, scripted: Any):
    file = tune(engine, PROMPTS, SETTINGS)
    prompts = [prompt.token_ids(engine.tokenizer) for prompt in PROMPTS]
    samples = measure(engine.target, engine.draft, SAMPLED, prompts, samples=6, tokens=8, depth=4, ranks=4)
    plan = file.plans[1]
    assert plan.profile.rates == samples.profile().rates
    assert plan.profile.provenance["errors"] == samples.errors().tolist()
    assert plan.profile.provenance["power_law"]["exponent"] == samples.power_law.exponent
    for option in plan.options[1:]:
        tokens = option.prediction.tokens_per_round, option.prediction.tokens_error
        assert tokens == pytest.approx(tuple(samples.tokens_per_round(option.shape)))


def test_each_plan_is_charged_the_times_of_its_own_parameters(engine: Engine, scripted: Any):
    scripted(level=0.002)
    file = tune(engine, PROMPTS, SETTINGS)
    for plan, seconds in zip(file.plans, (0.002, 0.003), strict=True):
        for option in plan.options:
            assert option.prediction.seconds_per_round == pytest.approx(0.01 + seconds * option.shape.depth)


@pytest.mark.parametrize(("costs", "kind"), [({"row": 0.02}, "off"), ({"level": 0.05}, "off"), ({}, "tree")])
def test_what_costs_too_much_is_not_chosen(engine: Engine, scripted: Any, costs: dict[str, float], kind: str):
    scripted(**costs)
    assert {plan.chosen.kind for plan in tune(engine, PROMPTS, SETTINGS).plans} == {kind}


def test_one_prompt_alone_has_no_errors_and_still_makes_a_file(engine: Engine, scripted: Any, tmp_path: Path):
    file = tune(engine, PROMPTS[:1], SETTINGS)
    errors = file.plans[0].profile.provenance["errors"]
    assert all(0 <= error <= 1 for row in errors for error in row)
    assert all(math.isfinite(option.prediction.tokens_error) for option in file.plans[0].options)
    file.save(tmp_path / "plan.json")


def test_progress_goes_through_the_parts_in_order(engine: Engine):
    told: list[tuple[str, int, int]] = []
    settings = dataclasses.replace(SETTINGS, seconds=0.0, max_size=4, contexts=(8,))
    tune(engine, PROMPTS, settings, None, lambda *what: told.append(what))
    assert list(dict.fromkeys(part for part, _, _ in told)) == [ACCEPTING, TIMING, PLANNING]
    texts = 4 + 6  # at temperature 0 one for each prompt
    for part, total in ((ACCEPTING, texts), (TIMING, 4), (PLANNING, 2)):
        counts = [done for name, done, _ in told if name == part]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, total)
        assert {all_ for name, _, all_ in told if name == part} == {total}


def test_nothing_finished_is_lost(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = dataclasses.replace(SETTINGS, seconds=0.0, max_size=4, contexts=(8,))

    def stop(part: str, done: int, total: int) -> None:
        if (part, done) == (TIMING, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(engine, PROMPTS, settings, tmp_path, stop)

    write = sequoia.measure.acceptance.write_texts
    asked: list[Any] = []
    monkeypatch.setattr(sequoia.measure.acceptance, "write_texts", lambda *args: asked.extend(args[2]) or write(*args))
    begun: list[int] = []
    file = tune(
        engine, PROMPTS, settings, tmp_path, lambda part, done, total: begun.append(done) if part == TIMING else None
    )
    assert asked == []
    assert begun[0] == 2
    assert file.latency.provenance["sweeps"] == 4


def test_a_stop_among_the_texts_keeps_those_of_the_first_parameters(
    engine: Engine, tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
):
    def stop(part: str, done: int, total: int) -> None:
        if (part, done) == (ACCEPTING, 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(engine, PROMPTS, SETTINGS, tmp_path, stop)
    write = sequoia.measure.acceptance.write_texts
    asked: list[Any] = []
    monkeypatch.setattr(sequoia.measure.acceptance, "write_texts", lambda *args: asked.extend(args[2]) or write(*args))
    again = tune(engine, PROMPTS, SETTINGS, tmp_path)
    assert len(asked) == 6
    assert again.plans == tune(engine, PROMPTS, SETTINGS).plans


def counted(engine: Engine, accepted: int, params: SamplingParams = SAMPLED, **changes: Any) -> RunCounts:
    """A run of 1000 rounds with a chain of one."""
    names = {"target": engine.pair["target"], "draft": engine.pair["draft"]}
    law = {"temperature": params.temperature}
    run = RunCounts(**names, law=law, shape=TreeShape.chain(1), visits=(1000,), accepted=((accepted,),))
    return dataclasses.replace(run, **changes)


def test_runs_move_the_plan_of_their_parameters(engine: Engine, scripted: Any):
    plans = {
        accepted: tune(engine, PROMPTS, SETTINGS, runs=[counted(engine, accepted)]).plans for accepted in (0, 1000)
    }
    measured = tune(engine, PROMPTS, SETTINGS).plans
    assert plans[0][0] == plans[1000][0] == measured[0]

    def first_rate(accepted: int) -> float:
        return plans[accepted][1].profile.rates[0][0]

    assert first_rate(0) < measured[1].profile.rates[0][0] < first_rate(1000)
    assert plans[1000][1].profile.provenance["rounds_of_runs"] == 1000

    def chain_tokens(plan: Any) -> float:
        return next(o for o in plan.sizes if o.shape == TreeShape.chain(1)).prediction.tokens_per_round

    assert chain_tokens(plans[0][1]) < chain_tokens(measured[1]) < chain_tokens(plans[1000][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "other"}, "a run is of other with draft"),
        ({"draft": "ngram"}, "with draft ngram, and this pair"),
        (
            {"law": {"temperature": 0.3}},
            "a run had temperature 0.3, and plans are made for temperature 0; temperature 0.8",
        ),
    ],
)
def test_runs_of_something_else_are_refused(engine: Engine, changes: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        tune(engine, PROMPTS, SETTINGS, runs=[counted(engine, 500, **changes)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": ()}, "nothing to plan for"),
        ({"params": (GREEDY, SAMPLED, SamplingParams(temperature=0, seed=3))}, "temperature 0 is asked for twice"),
        ({"samples": 0}, "samples must be"),
        ({"max_size": 0}, "max_size must be"),
        ({"batch": (0,)}, "batch must be"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(SETTINGS, **changes)


def test_no_prompts_are_refused(engine: Engine):
    with pytest.raises(UsageError, match="no prompts"):
        tune(engine, [], SETTINGS)


def test_about_tells_apart_what_finished_parts_are_worth_to(engine: Engine):
    mine = about(engine, PROMPTS, SETTINGS)
    assert mine == about(engine, PROMPTS, SETTINGS)
    others = [
        about(engine, PROMPTS[1:], SETTINGS),
        about(engine, PROMPTS, dataclasses.replace(SETTINGS, samples=7)),
        about(engine, PROMPTS, dataclasses.replace(SETTINGS, params=(SAMPLED,))),
        about(tiny_engine("ngram"), PROMPTS, SETTINGS),
    ]
    assert mine not in others
