"""Rounds under a guard: what it does to speed, and that it does nothing to the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from scripted import CHAIN, FREE, GREEDY, OFF, OPTIONS, PROMPT, TREE, Clock, ScriptedDraft, engine, option, plain_answer

from sequoia.draft.model_draft import ModelDraft
from sequoia.engine import Engine
from sequoia.measure.distance import Distance, distance
from sequoia.measure.joint_law import PROMPT as TOY_PROMPT
from sequoia.measure.joint_law import Case, Run, cases, count_outcomes
from sequoia.measure.toy import ToyModel
from sequoia.params import SamplingParams
from sequoia.planning.rounds import timed_rounds
from sequoia.speculate.session import Round, Session
from sequoia.speculate.stats import PlanRun, Stats
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.guard import Guard, GuardSettings
from sequoia.tree.option import Option
from sequoia.tree.shape import TreeShape

NERVOUS = GuardSettings(window_rounds=2, margin=0.0, patience=1, probe_after_tokens=1, probe_rounds=2)


def _rounds(engine_: Engine, params: SamplingParams = GREEDY) -> list[Round]:
    return list(engine_.rounds(PROMPT, params))


def test_a_draft_that_turns_useless_is_caught_within_64_tokens() -> None:
    """As at a change of topic: the draft is right about 60 tokens, and then about none."""
    answer = plain_answer()
    tested = engine(ScriptedDraft(answer, useful=60), clock=Clock())
    rounds = _rounds(tested)
    assert tuple(token for round_ in rounds for token in round_.token_ids) == answer
    ends = [0]
    for round_ in rounds:
        ends.append(ends[-1] + len(round_.token_ids))
    sizes = [round_.tree.shape.size for round_ in rounds]
    assert {size for size, end in zip(sizes, ends, strict=False) if end < 56} == {TREE.size}
    caught = next(end for size, end in zip(sizes, ends, strict=False) if size == 1)
    assert 60 <= caught <= 60 + 64
    run = tested.stats.plan
    assert run is not None
    assert (run.events[0].from_kind, run.events[0].reason) == ("tree", "slower than plain decoding")
    assert run.kinds["off"].seconds_per_round == pytest.approx(0.020)
    assert run.kinds["tree"].seconds_per_round == pytest.approx(0.027)


def test_without_a_guard_a_plan_is_kept_to() -> None:
    tested = engine(ScriptedDraft(plain_answer(), useful=60), clock=Clock(), guard=False)
    _rounds(tested)
    run = tested.stats.plan
    assert run is not None
    assert list(run.kinds) == ["tree"]
    assert run.events == []


def test_a_good_draft_is_never_dropped() -> None:
    tested = engine(ScriptedDraft(plain_answer()), clock=Clock())
    _rounds(tested)
    run = tested.stats.plan
    assert run is not None
    assert list(run.kinds) == ["tree"]
    assert run.measured is not None
    assert run.measured.tokens_per_round == TREE.depth + 1


def test_the_first_round_and_cut_trees_are_not_held_against_the_plan() -> None:
    tested = engine(ScriptedDraft(plain_answer()), clock=Clock())
    rounds = _rounds(tested, SamplingParams(temperature=0, max_tokens=18, ignore_eos=True))
    assert [round_.tree.shape.depth for round_ in rounds] == [4, 4, 4, 2]
    run = tested.stats.plan
    assert run is not None
    assert run.measured is not None
    assert (run.measured.rounds, run.measured.tokens) == (2, 10)
    assert tested.stats.seconds == pytest.approx(sum(0.019 + 0.001 * rows for rows in (15, 8, 8, 4)), abs=2e-3)


def test_a_useless_draft_costs_little_over_a_long_request() -> None:
    clock = Clock()
    tested = engine(ScriptedDraft(plain_answer(), useful=0), clock=clock)
    _rounds(tested)
    assert tested.stats.seconds < 1.15 * 200 * 0.020


def _jumpy(seed: int) -> Callable[[], float]:
    """A clock that runs now fast, now slow, without any sense."""
    random, now = Random(seed), 0.0

    def clock() -> float:
        nonlocal now
        now += random.choice([0.001, 0.02, 0.5])
        return now

    return clock


def _flapping() -> Guard:
    return Guard([OPTIONS[2], option(CHAIN, 2.5, 0.0201), OPTIONS[0]], 0.02, NERVOUS)


TOY = ToyModel.random(12, seed=1)
TOY_DRAFT = TOY.blended(ToyModel.random(12, seed=2), 0.6)


def _session(params: SamplingParams, tree: TreeShape = TREE) -> Session:
    return Session(TOY, ModelDraft(TOY_DRAFT, 12).start(), tree, VERIFIERS["sequoia"], PROMPT, params)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_output_under_a_guard_that_flaps_is_plain_decodings(seed: int) -> None:
    plain = _session(GREEDY, OFF)
    while plain.finish_reason is None:
        plain.step()
    session, guard = _session(GREEDY), _flapping()
    stats = Stats(plan=PlanRun(OPTIONS[2]))
    shapes = [round_.tree.shape for round_ in timed_rounds(session, stats, _jumpy(seed), guard)]
    assert session.tokens == plain.tokens
    assert {TREE, CHAIN, OFF} <= set(shapes)
    changes = sum(before != after for before, after in pairwise(shapes))
    assert changes >= 4
    assert stats.plan is not None
    assert len(stats.plan.events) == len(guard.events) >= changes - 2


# The joint law, where the tree of a round depends on what came before.


class FollowsTokens:
    """Chooses the next tree by the last tokens, so that trees and text are as entangled as past and present can be."""

    events: Sequence[Any] = ()

    def __init__(self, session: Session) -> None:
        self._session = session
        self._options = (option(OFF, 1, 1), option(TreeShape.chain(1), 1, 1), option(TreeShape((-1, 0, 0)), 1, 1))

    @property
    def _option(self) -> Option:
        return self._options[sum(self._session.tokens[-2:]) % 3]

    shape = property(lambda self: self._option.shape)
    kind = property(lambda self: self._option.kind)

    def observe(self, tokens: int, seconds: float) -> None:
        pass


class ByTokens:
    """A clock that goes by what has been said: a round is slow after one token and fast after another."""

    def __init__(self, session: Session) -> None:
        self._session, self._now = session, 0.0

    def __call__(self) -> float:
        self._now += (0.001, 0.1, 0.02, 0.05)[self._session.tokens[-1]]
        return self._now


def _case_session(case: Case, request: int) -> Session:
    return Session(case.target, case.proposer(), OFF, case.verifier, TOY_PROMPT, case.params, request=request)


def by_a_guard(case: Case, request: int) -> Sequence[int]:
    session = _case_session(case, request)
    star, chain = option(TreeShape((-1, 0, 0)), 1.5, 0.02), option(TreeShape.chain(1), 1.4, 0.02)
    guard = Guard([star, chain, OPTIONS[0]], 0.02, NERVOUS)
    for _ in range(3 if request % 2 else 1):  # so that it is about to leave the tree, or the chain
        guard.observe(1, 1.0)
    list(timed_rounds(session, Stats(plan=PlanRun(star)), ByTokens(session), guard))
    return session.tokens[len(TOY_PROMPT) :]


def by_tokens(case: Case, request: int) -> Sequence[int]:
    session = _case_session(case, request)
    guard: Any = FollowsTokens(session)
    list(timed_rounds(session, Stats(plan=PlanRun(OPTIONS[0])), count().__next__, guard))
    return session.tokens[len(TOY_PROMPT) :]


def by_outcome(case: Case, request: int) -> Sequence[int]:
    """What a guard must not do: drop a round for what came of it."""
    for attempt in range(4 * request, 4 * request + 4):
        session = _case_session(case, attempt)
        session.tree = TreeShape.chain(2)
        first, *_ = timed_rounds(session, Stats(), count().__next__)
        if len(first.token_ids) > 1:
            break
    return session.tokens[len(TOY_PROMPT) :]


def _compared(run: Run, verifier: str = "sequoia", samples: int = 250, laws: int = 2) -> list[Distance]:
    """With all processors, and with a draft so wrong that most rounds end in a residual."""
    chosen = [case for case in cases(VERIFIERS[verifier], 0, run) if case.processors == "all" or case.effort > 1]
    rng = np.random.default_rng(0)
    return [
        distance(case.law(), count_outcomes([case.sample(request) for request in range(samples)]), rng)
        for case in chosen[-laws:]
    ]


@pytest.mark.parametrize("verifier", ["sequoia", "sampler_match"])
@pytest.mark.parametrize("run", [by_a_guard, by_tokens])
def test_the_joint_law_is_the_targets_under_any_guard(run: Run, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, add = set(), Stats.add
    monkeypatch.setattr(Stats, "add", lambda stats, round_: sizes.add(round_.tree.shape.size) or add(stats, round_))
    assert all(found.ok for found in _compared(run, verifier))
    assert sizes == {1, 2, 3}


def test_choosing_by_a_rounds_own_outcome_would_be_seen() -> None:
    (found,) = _compared(by_outcome, laws=1)
    assert not found.ok


def test_seeded_sampling_repeats_with_a_guard_in_the_plan() -> None:
    params = SamplingParams(temperature=1.0, seed=5, **FREE)
    plan_engine = engine(ScriptedDraft(plain_answer(), useful=30))
    plan_engine.clock = _jumpy(1)
    assert plan_engine.generate(PROMPT, params).token_ids == plan_engine.generate(PROMPT, params).token_ids
    assert plan_engine.stats.plan is not None
    assert plan_engine.stats.plan.events == []
