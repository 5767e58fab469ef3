"""Engines that run by a plan: which plan, whether it fits, and what they learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import (
    CHAIN,
    FREE,
    GREEDY,
    OFF,
    OPTIONS,
    PROMPT,
    TREE,
    Clock,
    ScriptedDraft,
    engine,
    option,
    plain_answer,
    plan,
    plan_file,
    tiny,
)

import sequoia
from sequoia.engine import Engine, load
from sequoia.errors import FileError, UsageError
from sequoia.model.machine import cpu_name
from sequoia.params import SamplingParams
from sequoia.tree.plan import PlanFile
from sequoia.tree.plan_cache import plan_path, store

OFF_IS_BEST = (OPTIONS[0], option(CHAIN, 1.1, 0.024), option(TREE, 1.2, 0.028))


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return load(tiny(), ScriptedDraft(), "off", device="cpu").pair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The target on disk, which has a name."""
    tiny().save_pretrained(tmp_path / "named")
    return tmp_path / "named"


def test_each_request_takes_the_plan_for_its_parameters(pair: dict[str, Any]) -> None:
    chains = (OPTIONS[0], option(CHAIN, 2.5, 0.024), option(TREE, 2.6, 0.028))
    tested = engine(file=plan_file(pair, plan(), plan(chains, temperature=0.6), plan(OFF_IS_BEST, temperature=1.0)))
    trees = {0: TREE, 0.2: TREE, 0.6: CHAIN, 0.7: CHAIN, 1.0: OFF, 1.5: OFF}
    for temperature, tree in trees.items():
        params = SamplingParams(temperature=temperature, **FREE)
        assert tested.tree_for(params) == tested.session(PROMPT, params).tree == tree
        assert next(tested.rounds(PROMPT, params)).tree.shape == tree
        assert tested.stats.plan is not None
        assert tested.stats.plan.option.shape == tree


def test_a_plan_that_says_off_runs_plain(pair: dict[str, Any]) -> None:
    tested = engine(ScriptedDraft(), plan_file(pair, plan(OFF_IS_BEST)), Clock())
    assert tested.generate(PROMPT, GREEDY).token_ids == plain_answer()
    assert tested.stats.drafted_tokens == 0
    assert tested.stats.plan is not None
    assert list(tested.stats.plan.kinds) == ["off"]
    assert tested.stats.plan.events == []


def test_the_guard_never_falls_back_to_what_is_predicted_to_be_slower_than_plain(pair: dict[str, Any]) -> None:
    options = (OPTIONS[0], option(CHAIN, 1.1, 0.024), OPTIONS[2])
    tested = engine(ScriptedDraft(plain_answer(), useful=0), plan_file(pair, plan(options)), Clock())
    tested.generate(PROMPT, GREEDY)
    assert tested.stats.plan is not None
    assert set(tested.stats.plan.kinds) == {"tree", "off"}


def test_the_output_by_a_plan_is_plain_decodings(pair: dict[str, Any]) -> None:
    answer = plain_answer()
    assert engine(ScriptedDraft(answer, useful=20)).generate(PROMPT, GREEDY).token_ids == answer


def test_requests_side_by_side_do_not_share_a_guard() -> None:
    answer = plain_answer()
    alone = engine(ScriptedDraft(answer, useful=40), clock=Clock()).generate(PROMPT, GREEDY).stats.plan
    tested = engine(ScriptedDraft(answer, useful=40), clock=Clock())
    first = tested.stream(PROMPT, GREEDY)
    first_stats = tested.stats
    second = tested.stream(PROMPT, GREEDY)
    second_stats = tested.stats
    for _ in zip(first, second, strict=True):
        pass
    assert alone is not None
    assert alone.events
    for stats in (first_stats, second_stats):
        assert stats.plan is not None
        assert stats.plan.events == alone.events


def test_guards_come_to_know_the_machine() -> None:
    """Where plain decoding takes half of what the plan says, the next request needs not find out again."""
    tested = engine(ScriptedDraft(plain_answer(), useful=0), clock=Clock(base=0.0095, row=0.0005))
    plain = []
    for _ in range(2):
        tested.generate(PROMPT, GREEDY)
        assert tested.planned is not None
        ((_, guard),) = tested.planned._places[0].idle
        plain.append(guard._plain)
    assert plain == pytest.approx([0.010, 0.010])


def test_a_plan_can_be_a_file(pair: dict[str, Any], tmp_path: Path) -> None:
    plan_file(pair).save(tmp_path / "mine.json")
    for path in (tmp_path / "mine.json", str(tmp_path / "mine.json")):
        tested = load(tiny(), ScriptedDraft(), device="cpu", plan=path)
        assert tested.tree_for(GREEDY) == TREE
        assert "plan=mine.json" in repr(tested)


# Whether it fits.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "Qwen3-8B"}, "the plan was tuned for Qwen3-8B, not LlamaForCausalLM. Run `sequoia tune` for"),
        ({"draft": "ngram"}, "the plan was tuned for draft ngram, not ScriptedDraft. Run"),
        ({"vocab_size": 9}, "tuned for 9 token ids, not 32"),
        ({"target_dtype": "int8"}, "tuned for a target in int8, not fp32"),
        ({"draft_dtype": "bf16"}, "tuned for a draft in bf16, not None"),
        ({"offload": "disk"}, "tuned for offload disk, not off"),
    ],
)
def test_another_pairs_plan_is_refused_in_one_line(pair: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError) as error:
        engine(file=plan_file(pair | changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_refusal_names_the_file(pair: dict[str, Any], tmp_path: Path) -> None:
    plan_file(pair | {"target": "Qwen3-8B"}).save(tmp_path / "plan.json")
    with pytest.raises(
        FileError, match=r"^plan\.json was tuned for Qwen3-8B, not LlamaForCausalLM\. Run `sequoia tune`"
    ):
        load(tiny(), ScriptedDraft(), device="cpu", plan=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("pair_changes", "machine", "params", "told"),
    [
        ({}, {}, {}, None),
        ({}, {"cpu": cpu_name(), "gpu": None}, {}, None),
        ({}, {"cpu": "Abacus 3000"}, {}, f"Abacus 3000, not {cpu_name()}"),
        ({"threads": 7}, {}, {}, "7 threads, not 1"),
        ({"device": "cuda"}, {}, {}, "cuda, not cpu"),
        ({}, {}, {"temperature": 0.7}, "temperature 0, not temperature 0.7"),
        ({}, {}, {"temperature": 0, "top_k": 9}, None),
        ({}, {}, {"temperature": 1.0, "top_p": 0.9}, "temperature 0, not temperature 1, top_p 0.9"),
        ({"threads": 7}, {}, {"temperature": 1.0}, "temperature 0, not temperature 1; 7 threads, not 1"),
    ],
)
def test_differences_are_told_in_one_line(
    pair: dict[str, Any],
    pair_changes: dict[str, Any],
    machine: dict[str, Any],
    params: dict[str, Any],
    told: str | None,
) -> None:
    file = replace(plan_file(pair | pair_changes), machine=machine)
    planned = engine(file=file).planned
    assert planned is not None
    line = planned.notice(SamplingParams(**({"temperature": 0} | params)))
    expected = f"the plan was tuned for {told}. Its predictions may be off: run `sequoia tune`."
    assert line == (expected if told else None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tree": "chain:2"}, "a plan chooses the tree, and tree is 'chain:2'"),
        ({"tree": TREE}, "a plan chooses the tree"),
        ({"profile": sequoia.AcceptanceProfile([[0.5]])}, "a plan chooses the tree, and a profile plans another"),
        ({"plan": 5}, "plan is a PlanFile or a plan file, not 5"),
        ({"plan": None, "adapt": True}, "adapt needs a plan, and this pair has none yet. Run `sequoia tune`"),
        ({"plan": None, "adapt": True, "tree": "off"}, "adapt plans anew, and a tree is given"),
    ],
)
def test_contradictions_are_refused(pair: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tiny(), ScriptedDraft(), device="cpu", **({"plan": plan_file(pair)} | arguments))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "sequoia-plan", "version": 9}'])
def test_a_damaged_plan_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FileError, match=r"plan\.json") as error:
        load(tiny(), ScriptedDraft(), device="cpu", plan=tmp_path / "plan.json")
    assert "\n" not in str(error.value)


# The user's cache.


def test_a_plan_tuned_earlier_is_found(folder: Path) -> None:
    without = load(folder, dtype="fp32", device="cpu")
    assert without.planned is None
    store(plan_file(without.pair))
    found = load(folder, dtype="fp32", device="cpu")
    assert (found.tree_for(GREEDY), without.tree_for(GREEDY).size) == (TREE, 16)
    for arguments in ({"tree": "off"}, {"profile": sequoia.AcceptanceProfile([[0.5, 0.2]])}):
        assert load(folder, dtype="fp32", device="cpu", **arguments).planned is None


def test_a_plan_for_other_numbers_of_the_same_model_is_not_found(folder: Path) -> None:
    store(plan_file(load(folder, dtype="fp32", device="cpu").pair))
    assert load(folder, dtype="bf16", device="cpu").planned is None
    assert load(folder, dtype="fp32", draft=str(folder), device="cpu").planned is None


def test_a_plan_tuned_on_other_threads_is_found_and_told(folder: Path) -> None:
    pair = load(folder, dtype="fp32", device="cpu").pair
    store(plan_file(pair | {"threads": 7}))
    planned = load(folder, dtype="fp32", device="cpu").planned
    assert planned is not None
    assert "7 threads, not 1" in str(planned.notice(GREEDY))


def test_objects_find_no_plan() -> None:
    """Their names are those of their classes."""
    named = load(tiny(), device="cpu")
    store(plan_file(named.pair))
    assert load(tiny(), device="cpu").planned is None


def test_a_damaged_plan_in_the_cache_is_told_and_left_out(folder: Path) -> None:
    path = store(plan_file(load(folder, dtype="fp32", device="cpu").pair))
    path.write_text("{")
    told: list[str] = []
    assert load(folder, dtype="fp32", device="cpu", notice=told.append).planned is None
    assert [line.startswith("the plan for this pair is left out: ") for line in told] == [True]
    assert path.name in told[0]


def test_another_tree_leaves_the_plan(folder: Path) -> None:
    store(plan_file(load(folder, dtype="fp32", device="cpu").pair))
    found = load(folder, dtype="fp32", device="cpu")
    assert found.with_tree("chain:2").tree_for(GREEDY).size == 3
    assert found.with_tree("auto").tree_for(GREEDY) == TREE


def test_the_pair_says_what_runs(folder: Path) -> None:
    tested = load(folder, draft=str(folder), dtype="fp32", draft_dtype="bf16", device="cpu", tree="off")
    assert tested.pair == {
        "target": "named",
        "draft": "named",
        "vocab_size": 32,
        "target_dtype": "fp32",
        "draft_dtype": "bf16",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "compiled": False,
        "offload": "off",
    }
    assert plan_path(tested.pair).name.startswith("named-named-")


# Adapting.


def _adapting(useful: int, file: Callable[[dict[str, Any]], PlanFile] = plan_file, **arguments: Any) -> Engine:
    draft = ScriptedDraft(plain_answer(), useful)
    pair = load(tiny(), draft, "off", device="cpu").pair
    return engine(draft, file(pair), Clock(), adapt=True, **arguments)


def test_a_better_draft_than_planned_for_gets_a_deeper_tree() -> None:
    tested = _adapting(10**6)
    before = tested.tree_for(GREEDY)
    for _ in range(4):
        assert tested.generate(PROMPT, GREEDY).token_ids == plain_answer()
    after = tested.tree_for(GREEDY)
    assert before == TREE
    assert after.depth > TREE.depth
    assert tested.stats.plan is not None
    assert tested.stats.plan.option.shape.depth > TREE.depth
    assert tested.stats.plan.option.prediction.tokens_per_round > 4


def test_only_requests_that_ran_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = _adapting(10**6)
    assert tested.planned is not None
    adaptation = tested.planned._places[0].adaptation
    assert adaptation is not None
    seen: list[int] = []
    monkeypatch.setattr(adaptation, "add", lambda walks: seen.append(len(walks)))
    tested.stream(PROMPT, GREEDY)
    assert seen == []
    tested.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert seen == [2]
    stream = tested.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()
    assert seen == [2, 1]


def test_a_useless_draft_is_left_to_the_guard() -> None:
    """A plan that adapted to "off" would never learn of better times."""
    tested = _adapting(0)
    for _ in range(4):
        tested.generate(PROMPT, GREEDY)
    assert tested.tree_for(GREEDY).size > 1
    assert tested.stats.plan is not None
    assert "off" in tested.stats.plan.kinds


def test_without_adapt_nothing_is_learned() -> None:
    tested = engine(ScriptedDraft(plain_answer()), clock=Clock())
    for _ in range(3):
        tested.generate(PROMPT, GREEDY)
    assert tested.tree_for(GREEDY) == TREE
