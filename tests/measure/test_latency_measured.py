"""Timing real rounds against a scripted clock: what is measured, in which order, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_pair import ScriptedClock, scripted_engine

from sequoia.errors import UsageError
from sequoia.measure.latency import SIZES, STORE_NAME, measure_latency, refined
from sequoia.measure.round_parts import Parts, TimedRequest
from sequoia.measure.timings import Sweep, Timings, Trial
from sequoia.params import SamplingParams
from sequoia.speculate.session import Session
from sequoia.speculate.verify import verifier_named
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

LAWS = (SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=1.0, seed=1))
SMALL: dict[str, Any] = {"params": LAWS, "contexts": (16, 48), "max_rows": 8, "seconds": 1.0}


def cost(rows: int) -> float:
    return 0.04 + 0.001 * rows


def draft_cost(rows: int) -> float:
    return 0.003 + 0.0005 * rows


def timed(clock: ScriptedClock | None = None, engine: Any = None, **changes: Any) -> Timings:
    clock = clock or ScriptedClock()
    engine = engine or scripted_engine(clock, cost, draft_cost, overhead=0.002)
    return measure_latency(engine, clock=clock, **SMALL | changes)


def test_times_are_those_of_passes_levels_and_the_rest():
    profile = timed().profile()
    assert profile.contexts == (16, 48)
    assert profile.rows == (1, 2, 3, 4, 6, 8)
    for context in profile.contexts:
        assert {rows: timing.seconds for rows, timing in profile.target[context].items()} == pytest.approx(
            {rows: cost(rows) for rows in profile.rows}
        )
    assert {width: timing.seconds for width, timing in profile.draft.items()} == pytest.approx(
        {width: draft_cost(width) for width in profile.draft}
    )
    assert min(profile.draft) == 1
    assert profile.overhead_seconds(1) == pytest.approx(0.0)
    # The draft catches up on what it has not passed through: at least the root, at most all of the last round.
    assert 0.002 <= profile.overhead_seconds(8) <= 0.002 + 6 * 0.0005


@pytest.mark.parametrize(
    "shape", [TreeShape.root_only(), TreeShape.chain(3), TreeShape.kary(2, 2), TreeShape.chains(3, 2)]
)
def test_rounds_take_what_the_profile_says(shape: TreeShape):
    clock = ScriptedClock()
    engine = scripted_engine(clock, cost, draft_cost, overhead=0.002)
    profile = timed(clock, engine, params=LAWS[1:], max_rows=16, seconds=4.0).profile()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=300)
    session = Session(engine.target, engine.draft.start(), shape, engine.verifier, [1] * 16, params)
    session.step()
    rounds, started = 0, clock.now
    while session.finish_reason is None and len(session.tokens) < 250:
        session.step()
        rounds += 1
    assert profile.round_seconds(shape) == pytest.approx((clock.now - started) / rounds, rel=0.02)


def test_all_sizes_take_turns_upwards_and_downwards_and_so_do_parameters():
    timings = timed(seconds=0.0)
    assert [sweep.law for sweep in timings.sweeps] == [0, 1, 0, 1]
    up = [(size, context) for size in timings.sizes for context in timings.contexts]
    orders = [[(trial.size, trial.context) for trial in sweep.trials] for sweep in timings.sweeps]
    assert orders == [up, up, up[::-1], up[::-1]]


def test_more_seconds_make_more_sweeps_the_same_for_all_parameters():
    few, many = timed(seconds=0.0), timed(seconds=10.0)
    assert len(few.sweeps) == 4
    assert len(many.sweeps) > 8
    assert len(many.sweeps) % len(LAWS) == 0
    assert many.seconds == pytest.approx(10.0, rel=0.2)


def test_a_machine_that_becomes_slow_is_not_waited_for():
    clock = ScriptedClock()
    engine = scripted_engine(clock, cost, draft_cost)

    def slow_down(done: int, total: int) -> None:
        clock.speed = 10.0

    timings = timed(clock, engine, seconds=20.0, progress=slow_down)
    assert 4 <= len(timings.sweeps) == timings.planned
    assert timings.seconds < 20.0 * 1.5 + 20.0


def test_speed_that_drifts_does_not_favour_a_size():
    clock = ScriptedClock()
    engine = scripted_engine(clock, cost, draft_cost)

    def drift(done: int, total: int) -> None:
        clock.speed = (1.0, 1.0, 2.0, 1.5, 1.0)[done % 5]

    profile = timed(clock, engine, seconds=15.0, progress=drift).profile()
    times = [profile.target_seconds(rows) for rows in profile.rows]
    assert [time / times[0] for time in times] == pytest.approx([cost(rows) / cost(1) for rows in profile.rows])
    assert times[0] == pytest.approx(cost(1))
    assert profile.target[16][8].spread == pytest.approx(0.0, abs=1e-9)
    assert profile.provenance["slowest_sweep"] == pytest.approx(2.0)
    assert profile.provenance["scatter"] == 0.0


def test_one_slow_round_moves_nothing():
    clock = ScriptedClock()
    hiccups = iter([0.0] * 150 + [3.0] + [0.0] * 10_000)
    engine = scripted_engine(clock, lambda rows: cost(rows) + next(hiccups), draft_cost)
    profile = timed(clock, engine, seconds=12.0).profile()
    assert next(hiccups) == 0.0
    assert [profile.target_seconds(rows) for rows in profile.rows] == pytest.approx(
        [cost(rows) for rows in profile.rows]
    )


def test_a_busy_machine_scatters():
    clock = ScriptedClock()
    turns = cycle([1.0, 1.5, 1.0, 1.9, 1.2])
    engine = scripted_engine(clock, lambda rows: cost(rows) * next(turns), draft_cost)
    assert timed(clock, engine, seconds=20.0).profile().provenance["scatter"] > 0.3


def test_parameters_have_draft_and_overhead_of_their_own():
    timings = timed()
    apart = [timings.profile(law) for law in range(len(LAWS))]
    assert apart[0].target == apart[1].target == timings.profile().target
    assert apart[0].overhead.keys() == apart[1].overhead.keys()
    assert apart[0].overhead != apart[1].overhead  # more is caught up on where more is accepted


def test_sizes_are_added_where_the_time_jumps():
    def with_cliff(rows: int) -> float:
        return 0.04 if rows <= 19 else 0.07

    clock = ScriptedClock()
    timings = timed(clock, scripted_engine(clock, with_cliff, draft_cost), max_rows=32, seconds=30.0)
    assert timings.sizes == (1, 2, 3, 4, 6, 8, 12, 16, 18, 19, 20, 24, 32)


def test_a_straight_line_gets_one_point_more_and_not_all():
    assert refined([1, 64, 128], lambda rows: 0.01 * rows + 0.1, 8) == (1, 32, 64, 96, 128)
    assert refined([1, 2, 4], lambda rows: rows, 8) == (1, 2, 3, 4)
    assert refined([1, 2, 64, 128], lambda rows: 0.05, 8) == (1, 2, 64, 128)
    assert len(refined([1, 1000], lambda rows: float(rows**3), 5)) == 7


def test_slow_passes_are_timed_less_often_and_no_sizes_are_added():
    clock = ScriptedClock()
    timings = timed(clock, scripted_engine(clock, lambda rows: 5.0 + rows, draft_cost), seconds=1.0)
    assert timings.sizes == (1, 2, 3, 4, 6, 8)
    assert len(timings.sweeps) == 4
    assert clock.now < 6 * 2 * 10 * 4 + 6 * 10 * 2 + 200


def test_the_largest_size_is_always_timed():
    assert timed(max_rows=7).sizes == (1, 2, 3, 4, 6, 7)
    assert timed(max_rows=1).sizes == (1,)
    assert timed(max_rows=1).profile().draft == {}
    assert SIZES[-1] == 128


def test_contexts_are_cut_to_what_the_models_have():
    clock = ScriptedClock()
    engine = scripted_engine(clock, cost, draft_cost, context=80)
    timings = timed(clock, engine, contexts=(16, 128, 1024))
    assert timings.contexts == (16, 48)
    with pytest.raises(UsageError, match="does not fit the context"):
        timed(clock, scripted_engine(clock, cost, draft_cost, context=9))


def test_a_draft_of_few_tokens_gets_narrow_trees():
    clock = ScriptedClock()
    timings = timed(clock, scripted_engine(clock, cost, draft_cost, vocab=2), max_rows=16)
    assert timings.sizes[-1] == 16


def test_an_interrupted_timing_goes_on(tmp_path: Path):
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timed(store=tmp_path, progress=stop)
    before = Timings.load(tmp_path / STORE_NAME)
    assert len(before.sweeps) == 3
    seen: list[tuple[int, int]] = []
    after = timed(store=tmp_path, progress=lambda *counts: seen.append(counts))
    assert after.sweeps[:3] == before.sweeps
    assert len(after.sweeps) == before.planned == after.planned
    assert seen[0] == (3, before.planned)
    assert Timings.load(tmp_path / STORE_NAME) == after
    assert timed(ScriptedClock(), object_that_must_not_run(), store=tmp_path) == after


def object_that_must_not_run() -> Any:
    def fail(rows: int) -> float:
        raise AssertionError("nothing was missing")

    return scripted_engine(ScriptedClock(), fail, fail)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"sequoia-timings"', '"sequoia-plan"'),
        lambda text: text.replace('"size": 8', '"size": 7', 1),
        lambda text: text.replace('"law": 1', '"law": 2'),
        lambda text: text.replace('"total": ', '"total": -', 1),
    ],
)
def test_a_damaged_store_is_started_anew_with_a_line(tmp_path: Path, spoil: Any):
    whole = timed(store=tmp_path)
    path = tmp_path / STORE_NAME
    spoiled = spoil(path.read_text())
    assert spoiled != path.read_text()
    path.write_text(spoiled)
    lines: list[str] = []
    assert timed(store=tmp_path, notice=lines.append) == whole
    assert len(lines) == 1
    assert "starts anew" in lines[0]


def test_a_store_of_other_sizes_is_started_anew(tmp_path: Path):
    timed(store=tmp_path)
    lines: list[str] = []
    assert timed(store=tmp_path, max_rows=6, notice=lines.append).sizes == (1, 2, 3, 4, 6)
    assert lines == ["what was timed before is of no use, so timing starts anew: trees have 1 to 8 nodes, not 1 to 6."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": ()}, "no sampling parameters"),
        ({"contexts": ()}, "contexts is empty"),
        ({"contexts": (0,)}, "contexts must be an integer"),
        ({"max_rows": 0}, "max_rows must be an integer"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        timed(**changes)


def test_the_text_is_repeated_to_the_context_and_read_once():
    clock = ScriptedClock()
    engine = scripted_engine(clock, cost, draft_cost)
    timed(clock, engine, text=[1, 2, 3], params=LAWS[:1], seconds=10.0)
    longest = [rows for rows in engine.target.passes if rows > 8]
    # The first round of a request reads its text, together with a chain of one; requests that begin anew do not.
    assert longest == [15 + 2, 47 + 2]
    begun = [rows for rows in engine.draft.model.passes if rows > 8]
    assert len(begun) > 4


class TestTimedRequest:
    def rounds(self, text: Sequence[int], reach: int, count: int) -> tuple[Any, list[Any], TimedRequest]:
        clock = ScriptedClock()
        engine = scripted_engine(clock, cost, draft_cost)
        request = TimedRequest(engine, SamplingParams(temperature=1.0, seed=3), text, reach, clock)
        return engine, [request.measure(TreeShape.kary(2, 2)) for _ in range(count)], request

    def test_parts_add_up(self):
        _, rounds, _ = self.rounds([1, 2, 3], 40, 5)
        for parts in rounds:
            assert parts.target == pytest.approx(cost(7))
            assert [width for width, _ in parts.levels] == [1, 2]
            assert parts.levels[1][1] == pytest.approx(draft_cost(2))
            assert parts.total == pytest.approx(parts.target + sum(seconds for _, seconds in parts.levels))

    def test_it_stays_near_its_place(self):
        text = [1, 2, 3] * 4
        _, _, request = self.rounds(text, 8, 30)
        assert request._session.tokens[: len(text)] == text
        assert len(request._session.tokens) <= len(text) + 8

    def test_rounds_are_those_of_a_session(self):
        """Nothing that is watched is changed: same noise, same tokens."""
        clock = ScriptedClock()
        engine = scripted_engine(clock, cost, draft_cost)
        params = SamplingParams(temperature=1.0, seed=3)
        request = TimedRequest(engine, params, [1, 2], 1000, clock)
        shape = TreeShape.kary(2, 3)
        for _ in range(20):
            request.measure(shape)
        plain = Session(engine.target, engine.draft.start(), TreeShape.chain(1), engine.verifier, [1, 2], params)
        plain.step()
        plain.tree = shape
        for _ in range(20):
            plain.step()
        assert plain.tokens == request._session.tokens


def test_the_real_thing_runs():
    """On a tiny Llama with an n-gram draft, by the real clock."""
    from sequoia.engine import load
    from sequoia.measure.tiny_llama import tiny_llama

    engine = load(tiny_llama(48, 1, device="cpu").model, tree="off", dtype="fp32", device="cpu")
    profile = measure_latency(engine, params=LAWS, contexts=(20, 1000), max_rows=16, seconds=0.1).profile()
    assert profile.contexts == (20, 32)
    shape = optimal_shape(AcceptanceProfile.shipped("ngram"), 12, 4)
    assert 0 < profile.target_seconds(12) < profile.round_seconds(shape) < 1
    assert all(timing.seconds > 0 for timing in (*profile.draft.values(), *profile.overhead.values()))
    assert verifier_named("sequoia") is engine.verifier
    assert torch.get_num_threads() == 1


def streamed_timings(link: dict[int, float]) -> Timings:
    """Two sweeps of rounds that take 1 s of reading, or 8 ms a row if that is more; for some sizes the link took `link`
    times as long. What is read while the draft works is not in the pass."""
    trials = []
    for size in (1, 8, 32, 64, 128, 256):
        levels = tuple((width, 0.05) for width in (1, *[size // 4] * 5)) if size > 1 else ()
        drafted = sum(seconds for _, seconds in levels)
        total = max(1.0, 0.008 * size) * link.get(size, 1.0)
        trials.append(Trial(128, size, Parts(total - drafted, levels, total)))
    sweep = Sweep(0, tuple(trials), 5.0)
    return Timings((128,), (1, 8, 32, 64, 128, 256), 2, (sweep, sweep))


def test_rounds_over_streamed_weights_never_fall_with_the_rows():
    steady = streamed_timings({}).profile(rising=True)
    assert steady == streamed_timings({}).profile()
    timings = streamed_timings({8: 1.5, 32: 1.2, 64: 0.9})
    rough, smooth = timings.profile(), timings.profile(rising=True)
    drafted = 6 * 0.05
    assert rough.target_seconds(64) + drafted == pytest.approx(0.9)
    for size in (8, 32, 64, 128):  # 1.5, 1.2, 0.9 and 1.024 seconds
        assert smooth.target_seconds(size) + drafted == pytest.approx((1.5 + 1.2 + 0.9 + 1.024) / 4)
    assert smooth.target_seconds(1) == pytest.approx(1.0)
    assert smooth.target_seconds(256) == pytest.approx(rough.target_seconds(256))
