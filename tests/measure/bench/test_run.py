"""The comparison itself: fair turns, results that a killed run resumes from, and nothing measured twice."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import PROMPTS, VOCAB, tiny_engine, tokenizer, write_method

from sequoia.engine import Engine, load
from sequoia.errors import FileError, SequoiaError, UsageError
from sequoia.measure.bench import machine as machine_module
from sequoia.measure.bench.job import turned
from sequoia.measure.bench.machine import commit, cpu_name
from sequoia.measure.bench.records import Results, ResultsFile, Setting
from sequoia.measure.bench.run import Job, run_bench
from sequoia.measure.prompts import PromptRecord, read_prompts
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.loading import LoadedModel

ROOT = Path(__file__).parents[3]
JOB = Job(("chain:3", "transformers"), temperatures=(0.0, 0.7), max_tokens=10)
COUNT = len(PROMPTS) * 2 * 3  # prompts, settings, methods


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def keys(results: Results) -> list[Any]:
    return [result.key for result in results.results]


def interrupt_after(count: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, what: str) -> None:
        if done == count:
            raise KeyboardInterrupt

    return progress


def test_everything_is_measured_once(engine: Engine, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    results = run_bench(engine, PROMPTS, JOB, tmp_path, progress=lambda *step: told.append(step))
    assert len(keys(results)) == len(set(keys(results))) == COUNT
    assert {result.prompt for result in results.results} == {"a", "b", "c", "d"}  # the warm-up is not recorded
    assert results.run.sampling == (Setting(0.0), Setting(0.7))
    assert [method.name for method in results.run.methods] == ["plain", "chain:3", "transformers"]
    assert ResultsFile(tmp_path).load().results == results.results
    assert [done for done, _, _ in told] == list(range(1, COUNT + 1))
    assert {total for _, total, _ in told} == {COUNT}
    assert results.findings == []


def test_what_a_result_holds(engine: Engine, tmp_path: Path) -> None:
    results = run_bench(engine, PROMPTS[:1], replace(JOB, temperatures=(0.0,)), tmp_path)
    by_method = {result.method: result for result in results.results}
    plain, chain, peer = by_method["plain"], by_method["chain:3"], by_method["transformers"]
    assert plain.token_ids == chain.token_ids == peer.token_ids
    assert (plain.prompt_tokens, plain.category, plain.finish, len(plain.token_ids)) == (5, "odd", "length", 10)
    assert (plain.passes, plain.rows, plain.counts) == (10, 9, (1,) * 10)
    assert {result.first_token_passes for result in by_method.values()} == {1}
    assert (peer.passes, peer.rows, peer.counts) == (10, 9, (1,) * 10)
    assert chain.passes == len(chain.counts) < 10
    assert chain.drafted_tokens == chain.rows - chain.passes + 1  # type: ignore[operator]
    assert (peer.drafted_tokens, peer.visits, plain.drafted_tokens) == (None, (), 0)
    assert sum(map(sum, chain.accepted)) >= 10 - len(chain.counts)
    for result in by_method.values():
        assert list(result.times) == sorted(result.times)
        assert 0 < (result.prefill_seconds or 0) <= result.times[0]


def test_methods_take_turns_in_going_first(engine: Engine, tmp_path: Path) -> None:
    order: list[str] = []
    job = replace(JOB, temperatures=(0.0,))
    run_bench(engine, PROMPTS, job, tmp_path, progress=lambda done, total, what: order.append(what))
    turns = [tuple(what.split(" on ")[0] for what in order[start : start + 3]) for start in range(0, 12, 3)]
    assert all(sorted(turn) == ["chain:3", "plain", "transformers"] for turn in turns)
    assert {turn[0] for turn in turns[:3]} == {"chain:3", "plain", "transformers"}
    assert [what.split(" on ")[1] for what in order[::3]] == ["a", "b", "c", "d"]


def test_neighbours_change_as_well() -> None:
    turns = [turned("abcd", turn, seed=0) for turn in range(400)]
    pairs = Counter(pair for turn in turns for pair in pairwise(turn))
    assert Counter(turn[0] for turn in turns) == dict.fromkeys("abcd", 100)
    assert min(pairs[left, right] for left, right in permutations("abcd", 2)) > 60  # of 1,200 among 12 pairs


def test_a_folder_in_use_is_refused(engine: Engine, tmp_path: Path) -> None:
    with ResultsFile(tmp_path).locked(), pytest.raises(FileError, match="in use by another run"):
        run_bench(engine, PROMPTS, JOB, tmp_path)


def test_a_start_that_measured_nothing_does_not_stand_in_the_way(engine: Engine, tmp_path: Path) -> None:
    failing = write_method(tmp_path, "fails", "raise ValueError('no')")
    with pytest.raises(SequoiaError):
        run_bench(engine, PROMPTS, replace(JOB, methods=(failing,)), tmp_path / "out")
    assert len(run_bench(engine, PROMPTS[:1], JOB, tmp_path / "out").results) > 0


def test_each_request_has_noise_of_its_own_and_methods_share_it(engine: Engine) -> None:
    job = replace(JOB, temperatures=(0.5, 0.7), repeats=3)
    requests = [request for index in range(4) for request in job.requests(PROMPTS[index], [3], index)]
    assert len({request.params.seed for request in requests}) == len(requests) == 4 * 2 * 3
    again = replace(job, seed=1).requests(PROMPTS[0], [3], 0)
    assert {request.params.seed for request in again}.isdisjoint(request.params.seed for request in requests)
    assert {request.params.max_tokens for request in requests} == {10}


def test_top_p_makes_no_greedy_settings() -> None:
    job = Job(("plain",), temperatures=(0.0, 0.5), top_ps=(1.0, 0.9))
    assert job.settings == (Setting(0.0), Setting(0.5), Setting(0.5, 0.9))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": ()},
        {"top_ps": ()},
        {"temperatures": (-1.0,)},
        {"top_ps": (0.0,)},
        {"max_tokens": 0},
        {"repeats": 0},
        {"seed": -1},
        {"seconds": 0},
        {"seconds": float("nan")},
    ],
)
def test_a_job_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(JOB, **changes)


# Resuming


@pytest.mark.parametrize("count", [0, 1, 6, 8, 17, COUNT])
def test_a_killed_run_is_gone_on_from(engine: Engine, tmp_path: Path, count: int) -> None:
    whole = run_bench(engine, PROMPTS, JOB, tmp_path / "whole")
    if count:
        with pytest.raises(KeyboardInterrupt):
            run_bench(engine, PROMPTS, JOB, tmp_path / "killed", progress=interrupt_after(count))
        assert len(ResultsFile(tmp_path / "killed").load().results) == (count - 1) // 6 * 6
    told: list[str] = []
    resumed = run_bench(engine, PROMPTS, JOB, tmp_path / "killed", notice=told.append)
    assert Counter(keys(resumed)) == Counter(keys(whole))
    assert ResultsFile(tmp_path / "killed").load().results == resumed.results
    answers = {result.key: result.token_ids for result in whole.results}
    assert {result.key: result.token_ids for result in resumed.results} == answers
    assert told == ([f"going on after {(count - 1) // 6 * 6} of {COUNT} requests"] if count > 6 else []) + [
        "warming up"
    ]


def test_an_interrupt_inside_a_method(engine: Engine, tmp_path: Path) -> None:
    flag = tmp_path / "interrupted"
    body = f"""
import pathlib
flag, calls = pathlib.Path({str(flag)!r}), pathlib.Path({str(flag)!r} + ".calls")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
emit(engine.session(prompt, params).step())
if len(calls.read_text()) == 4 and not flag.exists():
    flag.touch()
    raise KeyboardInterrupt
"""
    path = write_method(tmp_path, "fragile", body)
    job = Job((path,), max_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        run_bench(engine, PROMPTS, job, tmp_path / "out")
    assert [result.prompt for result in ResultsFile(tmp_path / "out").load().results] == ["a", "a", "b", "b"]
    assert not engine.target_model._forward_hooks
    assert gc.isenabled()
    resumed = run_bench(engine, PROMPTS, job, tmp_path / "out")
    assert sorted(keys(resumed), key=str) == sorted({*keys(resumed)}, key=str)
    assert len(resumed.results) == 8
    calls = len(Path(f"{flag}.calls").read_text())
    assert calls == 2 + 4 + 1  # two warm-ups, four prompts, and the one that was interrupted


@pytest.mark.parametrize("cut", [1, 40, 900, 3000])
def test_half_a_line_at_the_end(engine: Engine, tmp_path: Path, cut: int) -> None:
    """Whatever was lost, a part of a prompt's results too, is measured again; nothing else is."""
    run_bench(engine, PROMPTS[:2], JOB, tmp_path)
    path = ResultsFile(tmp_path).path
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    kept = ResultsFile(tmp_path).load().results
    assert len(kept) < 12
    told: list[int] = []
    resumed = run_bench(engine, PROMPTS[:2], JOB, tmp_path, progress=lambda done, total, what: told.append(done))
    assert resumed.results[: len(kept)] == kept
    assert told == list(range(len(kept) + 1, 13))
    assert len(set(keys(resumed))) == len(keys(ResultsFile(tmp_path).load())) == 12
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_complete_run_is_not_touched(engine: Engine, tmp_path: Path) -> None:
    first = run_bench(engine, PROMPTS[:1], JOB, tmp_path)
    before = ResultsFile(tmp_path).path.read_bytes()
    told: list[str] = []
    again = run_bench(engine, PROMPTS[:1], JOB, tmp_path, notice=told.append)
    assert (again.results, told) == (first.results, [])
    assert ResultsFile(tmp_path).path.read_bytes() == before


def test_findings_survive_a_kill(engine: Engine, tmp_path: Path) -> None:
    """They stand before the results they belong to, so that these never stand without them."""
    body = "session = engine.session(prompt, params)\nemit(session.step().token_ids[:1])"
    job = Job((write_method(tmp_path, "short", body),), max_tokens=6)
    run_bench(engine, PROMPTS[:2], job, tmp_path / "out")
    path = ResultsFile(tmp_path / "out").path
    whole = ResultsFile(tmp_path / "out").load()
    path.write_bytes(path.read_bytes()[:-10])
    resumed = run_bench(engine, PROMPTS[:2], job, tmp_path / "out")
    assert {(found.prompt, found.kind) for found in resumed.findings} == {
        (prompt, kind) for prompt in "ab" for kind in ("early end", "wrong tokens")
    }
    assert ResultsFile(tmp_path / "out").load().findings == whole.findings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 11}, "settings max_tokens was 10 and is now 11"),
        ({"seed": 4}, "settings seed was 0 and is now 4"),
        ({"methods": ("chain:3",)}, "methods was a list of 3 and is now a list of 2"),
        ({"methods": ("chain:4", "transformers")}, "methods 2 name was chain:3 and is now chain:4"),
        ({"temperatures": (0.0, 0.8)}, "sampling 2 temperature was 0.7 and is now 0.8"),
        ({"repeats": 2}, "settings repeats was 1 and is now 2"),
    ],
)
def test_another_run_in_the_folder_is_refused(
    engine: Engine, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "out"
    run_bench(engine, PROMPTS[:1], JOB, folder)
    before = ResultsFile(folder).path.read_bytes()
    with pytest.raises(UsageError, match=f"out holds a run that differs: {message}. .* --out .*out-2"):
        run_bench(engine, PROMPTS[:1], replace(JOB, **change), folder)
    assert ResultsFile(folder).path.read_bytes() == before


def test_other_prompts_or_another_machine_are_refused(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_bench(engine, PROMPTS[:1], JOB, tmp_path, sources=["x"])
    for prompts, options, message in [
        (PROMPTS[:2], {"sources": ["x"]}, "settings prompts_digest was"),
        ([replace(PROMPTS[0], content="w3 w4")], {"sources": ["x"]}, "settings prompts_digest was"),
        (PROMPTS[:1], {"sources": ["y"]}, "settings sources 1 was x and is now y"),
        (PROMPTS[:1], {"sources": ["x"], "prompt_tokens": 64}, "settings prompt_tokens was 128 and is now 64"),
    ]:
        with pytest.raises(UsageError, match=message):
            run_bench(engine, prompts, JOB, tmp_path, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(machine_module, "cpu_name", lambda: "Abacus")
    with pytest.raises(UsageError, match=r"machine cpu was .* and is now Abacus"):
        run_bench(engine, PROMPTS[:1], JOB, tmp_path, sources=["x"])


def test_a_time_limit_ends_between_prompts(engine: Engine, tmp_path: Path) -> None:
    hasty = replace(JOB, seconds=1e-6)
    first = run_bench(engine, PROMPTS, hasty, tmp_path)
    assert {result.prompt for result in first.results} == {"a"}
    assert len(first.results) == 6
    told: list[str] = []
    again = run_bench(engine, PROMPTS, hasty, tmp_path, notice=told.append)  # all processes share the time
    assert (again.results, told) == (first.results, [])
    assert len(run_bench(engine, PROMPTS, JOB, tmp_path).results) == COUNT


# What goes wrong


def test_a_prompt_that_leaves_no_room_is_named(engine: Engine, tmp_path: Path) -> None:
    long = PromptRecord("long", "odd", " ".join(["w3"] * 60))
    with pytest.raises(UsageError, match=r"prompt long has 60 tokens and 10 are to follow, .* context is 64"):
        run_bench(engine, [*PROMPTS, long], JOB, tmp_path)
    assert not list(tmp_path.iterdir())
    assert run_bench(engine, [long], replace(JOB, temperatures=(0.0,)), tmp_path, prompt_tokens=54).results


def test_no_prompts_and_prompts_of_one_name(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no prompts"):
        run_bench(engine, [], JOB, tmp_path)
    with pytest.raises(UsageError, match="two prompts have the same id"):
        run_bench(engine, [PROMPTS[0], replace(PROMPTS[1], id="a")], JOB, tmp_path)


def test_a_method_that_fails_is_named_before_anything_is_measured(engine: Engine, tmp_path: Path) -> None:
    for body, message in [
        ("raise ValueError('no such luck')", "method mine failed on prompt warm-up: ValueError: no such luck. Mend it"),
        ("raise ZeroDivisionError", "method mine failed on prompt warm-up: ZeroDivisionError. Mend it"),
        ("raise SystemExit(0)", "method mine failed on prompt warm-up: SystemExit: 0. Mend it"),
        ("if params.temperature:\n    raise ValueError\nemit([3])", "method mine failed on prompt warm-up: ValueError"),
        ("emit(3)", "method mine failed on prompt warm-up: .*not iterable"),
        ("emit([])", "method mine emits no token"),
    ]:
        job = replace(JOB, methods=(write_method(tmp_path, "mine", body),))
        with pytest.raises(SequoiaError, match=message) as caught:
            run_bench(engine, PROMPTS, job, tmp_path / "out")
        assert caught.value.__cause__ is not None or "emits no token" in message
        assert ResultsFile(tmp_path / "out").load().results == []
    assert not engine.target_model._forward_hooks


def test_a_method_that_fails_later_leaves_what_was_measured(engine: Engine, tmp_path: Path) -> None:
    body = "if len(prompt) == 2:\n    raise ValueError('too short')\nemit(engine.session(prompt, params).step())"
    job = Job((write_method(tmp_path, "picky", body),), max_tokens=5)
    with pytest.raises(SequoiaError, match="method picky failed on prompt d: ValueError: too short"):
        run_bench(engine, PROMPTS, job, tmp_path / "out")
    assert {result.prompt for result in ResultsFile(tmp_path / "out").load().results} == {"a", "b", "c"}


def test_a_method_may_not_spoil_the_prompt_for_others(engine: Engine, tmp_path: Path) -> None:
    body = "emit(engine.session(list(prompt), params).step())\nprompt.clear()"
    job = Job((write_method(tmp_path, "rude", body), "chain:2"), max_tokens=5)
    results = run_bench(engine, PROMPTS, job, tmp_path / "out")
    assert {finding.method for finding in results.findings} == {"rude"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("set_num_threads(torch.get_num_threads() + 1)", r"method rude changes torch's number of threads from \d+ to"),
        ("set_default_dtype(torch.float64)", r"method rude changes torch's default dtype from torch\.float32"),
    ],
)
def test_a_method_may_not_change_what_others_run_with(
    engine: Engine, tmp_path: Path, change: str, message: str
) -> None:
    before = torch.get_num_threads(), torch.get_default_dtype()
    body = f"import torch\ntorch.{change}\nemit(engine.session(prompt, params).step())"
    with pytest.raises(UsageError, match=message):
        run_bench(engine, PROMPTS, Job((write_method(tmp_path, "rude", body),), max_tokens=5), tmp_path / "out")
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before


def test_target_and_draft_must_be_two_objects(tmp_path: Path) -> None:
    pair = tiny_llama(VOCAB, 1, device="cpu").model, tokenizer()
    with pytest.raises(UsageError, match="one model object"):
        run_bench(load(pair, pair), PROMPTS, JOB, tmp_path)


def test_a_targets_own_rounded_weights_may_draft(tmp_path: Path) -> None:
    target = tiny_llama(VOCAB, 1, device="cpu").model, tokenizer()
    results = run_bench(load(target, "self:int4", device="cpu"), PROMPTS, JOB, tmp_path)
    assert results.rounds


# Pictures, the machine, and the page of the docs


def test_the_best_round_of_each_tree_is_kept(engine: Engine, tmp_path: Path) -> None:
    job = Job(("optimal:12x3", "chain:3", "transformers"), max_tokens=20)
    results = run_bench(engine, PROMPTS, job, tmp_path)
    last = {entry.method: entry for entry in results.rounds}
    assert set(last) == {"optimal:12x3", "chain:3"}
    for name, entry in last.items():
        accepted = max(len(ranks) for ranks in [result.accepted for result in results.results if result.method == name])
        assert len(entry.path) == accepted
        assert len(entry.words) == len(entry.parents)
        assert [entry.parents[node] for node in entry.path] == [0, *entry.path[:-1]]
        assert {*entry.words, entry.next_word} <= {"<unk>", "</s>", *(f"w{number}" for number in range(2, VOCAB))}


def test_the_machine_is_described(tmp_path: Path) -> None:
    described = machine_module.machine(torch.device("cpu"))
    assert described["threads"] == torch.get_num_threads()
    assert set(described["versions"]) == {"torch", "transformers", "sequoia"}
    assert all(described["versions"].values())
    assert described["gpu"] is None
    assert described == machine_module.machine(torch.device("cpu"))
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 3000\nmodel name\t: Abacus 3000\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Abacus 3000"
    assert cpu_name(tmp_path / "nothing")
    assert commit(tmp_path) is None
    if (ROOT / ".git").exists():
        name = commit(ROOT)
        assert name is not None
        assert len(name.rstrip("+")) == 12


def test_the_docs_example_runs(engine: Engine, tmp_path: Path) -> None:
    source = (ROOT / "docs" / "examples" / "no_cache.py").read_text()
    assert len(source.splitlines()) <= 40
    assert f"```python\n{source}```" in (ROOT / "docs" / "harness.md").read_text()
    path = str(ROOT / "docs" / "examples" / "no_cache.py")
    results = run_bench(engine, PROMPTS, Job((path,), max_tokens=12), tmp_path)
    assert [method.name for method in results.run.methods] == ["plain", "no_cache"]
    assert results.findings == []
    assert len(results.results) == 8


@pytest.mark.slow
def test_the_real_model_has_no_findings(smollm2: LoadedModel, tmp_path: Path) -> None:
    """In fp32, all lossless methods say the same."""
    engine = load((smollm2.model, smollm2.tokenizer))
    methods = ("plain", "optimal:8x3", "dynamic:8x3", "transformers", "transformers-lookup")
    results = run_bench(engine, read_prompts(["built-in"], 1), Job(methods, max_tokens=8), tmp_path)
    assert results.findings == []
    assert len({result.token_ids for result in results.results}) == 1
    assert len(results.results) == 5
