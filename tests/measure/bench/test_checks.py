"""Every check finds what it is for, and lets honest answers pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from synthetic import result
from tiny_engine import PROMPTS, tiny_engine, write_method

from sequoia.engine import Engine
from sequoia.measure.bench import checks
from sequoia.measure.bench.checks import Limits
from sequoia.measure.bench.records import Finding, Result, Setting
from sequoia.measure.bench.run import Job, run_bench

LIMITS = Limits(vocab_size=50, eos_ids=frozenset({1}), max_tokens=4)
EPSILON = torch.finfo(torch.float32).eps


def greedy(*tokens: int, finish: str = "length", **changes: object) -> Result:
    made = result("mine", tokens=tokens, passes=len(tokens))
    return replace(made, counts=(1,) * len(tokens), finish=finish, **changes)  # type: ignore[arg-type]


def kinds(answer: Result) -> list[str]:
    return [finding.kind for finding in checks.alone(answer, LIMITS)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (greedy(5, 6, 7, 8), []),
        (greedy(5, 1, finish="stop"), []),
        (greedy(passes=0), ["no token"]),
        (greedy(5, 6, finish="early"), ["early end"]),
        (greedy(5, 50, 7, 8), ["beyond the vocabulary"]),
        (greedy(5, -1, 7, 8), ["beyond the vocabulary"]),
        (greedy(5, 6, 7, 8, 9), ["too many tokens"]),
        (greedy(5, 1, 7, 8), ["too many tokens"]),
        (greedy(5, 6, 7, 8, passes=0, rows=0), ["reused answer"]),
        (greedy(5, 6, 7, 8, passes=0, rows=3), ["reused answer"]),
        (greedy(5, 6, 7, 8, passes=None, rows=None), []),  # a model of its own
        (greedy(5, 6, 7, 8, drafted_tokens=9), []),
        (greedy(5, 6, 7, 8, drafted_tokens=9, passes=5), ["passes do not add up"]),
        (greedy(5, 6, 7, 8, passes=5), []),  # only rounds say how many passes they took
        (greedy(5, 6, 7, 8, first_token_passes=1), []),
        (greedy(5, 6, 7, 8, passes=2, first_token_passes=1), []),
        (greedy(5, 6, 7, 8, passes=1, first_token_passes=1), []),
        (greedy(5, 6, 7, 8, passes=8, first_token_passes=2), []),  # two passes for each token
        (greedy(5, 6, 7, 8, first_token_passes=4), ["tokens held back"]),
        (greedy(5, 6, 7, 8, passes=2, first_token_passes=2), []),
        (greedy(5, 6, 7, 8, passes=None, rows=None, first_token_passes=None), []),
    ],
)
def test_an_answer_alone(answer: Result, expected: list[str]) -> None:
    assert kinds(answer) == expected


def compared(ours: Sequence[int], theirs: Sequence[int], *logits: float, epsilon: float = EPSILON) -> Finding | None:
    def logits_from(count: int) -> torch.Tensor:
        assert ours[:count] == theirs[:count]
        return torch.tensor([[0.0, *logits]])

    return checks.against(greedy(*ours), replace(greedy(*theirs), method="plain"), logits_from, epsilon)


def test_equal_answers_have_nothing_to_find() -> None:
    assert compared([1, 2, 3], [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("first", "second", "epsilon", "kind"),
    [
        (20.0, 20.0, EPSILON, "near tie"),
        (20.0, 20.0 + 15e-6, EPSILON, "near tie"),
        (20.0, 20.0 + 25e-6, EPSILON, "wrong tokens"),
        (20.0, 20.75, torch.finfo(torch.bfloat16).eps, "near tie"),
        (20.0, 22.0, torch.finfo(torch.bfloat16).eps, "wrong tokens"),
        (-20.0, 20.0, EPSILON, "wrong tokens"),
        (0.0, 0.0, EPSILON, "near tie"),
    ],
)
def test_a_difference_is_a_near_tie_or_wrong(first: float, second: float, epsilon: float, kind: str) -> None:
    found = compared([3, 1, 9], [3, 2, 9], first, second, epsilon=epsilon)
    assert found is not None
    assert (found.method, found.kind) == ("mine", kind)
    assert found.detail.startswith("token 2 is 1 where plain has 2; their logits")


@pytest.mark.parametrize(
    ("later", "kind"),
    [([[0.0, 5.0, 9.0]], "near tie"), ([[0.0, 9.0, 5.0]], "wrong tokens"), ([[0.0, 9.0, 9.0 - 5e-6]], "near tie")],
)
def test_a_near_tie_excuses_nothing_that_follows(later: list[list[float]], kind: str) -> None:
    rows = torch.tensor([[0.0, 20.0, 20.0], *later])
    found = checks.against(greedy(0, 1, 2), replace(greedy(0, 2, 9), method="plain"), lambda count: rows, EPSILON)
    assert found is not None
    assert found.kind == kind
    assert ("token 3 is 2, " in found.detail) == (kind == "wrong tokens")


@pytest.mark.parametrize(("ours", "theirs"), [([3, 4], [3, 4, 5]), ([3, 4, 5], [3, 4])])
def test_a_beginning_is_not_the_answer(ours: list[int], theirs: list[int]) -> None:
    found = compared(ours, theirs)
    assert found is not None
    assert found.kind == "wrong tokens"


def test_the_probability_of_an_answer() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    probs = (logits.double() / 0.5).softmax(-1)
    expected = (probs[0, 2] * probs[1, 0]).log().item()
    assert checks.log_probability(logits, [2, 0], Setting(0.5)) == pytest.approx(expected)
    # With top-p 0.8 only the likeliest token is left in both rows, and the bound may not fall below log 1.
    assert checks.log_probability(logits, [2, 0], Setting(0.5, 0.8)) >= 0


# Whole runs


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def found_in(
    engine: Engine, folder: Path, *methods: str, temperatures: tuple[float, ...] = (0.0, 0.9), repeats: int = 2
) -> set[tuple[str, str, bool]]:
    """(method, kind, whether sampled) of all findings."""
    job = Job(methods, temperatures=temperatures, top_ps=(0.95,), max_tokens=20, repeats=repeats)
    results = run_bench(engine, PROMPTS, job, folder / "out")
    return {(finding.method, finding.kind, finding.setting.temperature > 0) for finding in results.findings}


HONEST = (
    "chain:3",
    "chains:2x3",
    "beam:2x3",
    "optimal:8x3",
    "dynamic:8x3",
    "specinfer:kary:2x2",
    "spectr:kary:2x2",
    "sampler-match:kary:2x2",
    "transformers",
    "transformers-assisted",
    "transformers-lookup",
)


@pytest.mark.slow
def test_honest_methods_have_no_findings(engine: Engine, tmp_path: Path) -> None:
    assert found_in(engine, tmp_path, *HONEST) == set()


@pytest.mark.slow
def test_answers_that_end_have_none_either(tmp_path: Path) -> None:
    assert found_in(tiny_engine(seed=2), tmp_path, *HONEST, repeats=1) == set()


def test_answers_that_repeat_by_themselves_have_none_either(engine: Engine, tmp_path: Path) -> None:
    """Hardly any noise: both repeats come out the same, and are likely enough to."""
    assert found_in(engine, tmp_path, "chain:3", "transformers", temperatures=(0.001,)) == set()


SESSION = """
session = engine.session(prompt, params)
while session.finish_reason is None:
    round_ = session.step()
    {}
"""

WRONG = SESSION.format("emit([(token + 1) % 48 if token > 40 else token for token in round_.token_ids])")
CHUNKS = SESSION.format("emit(round_.token_ids[-1:])")
UNCHECKED = SESSION.format("emit([*round_.token_ids, 7])")
SAYS_MORE = SESSION.format("emit(round_)\n    engine.target.forward(round_.tree.tokens, engine.target.new_cache())")
FOREIGN = SESSION.format("emit([token + 1000 for token in round_.token_ids])")

AT_ONCE = SESSION.format("pass") + "for token in session.tokens[len(prompt):]:\n    emit([token])"

LATE = """
import sys
kept = sys.modules[__name__].__dict__.setdefault("kept", [])
session = engine.session(prompt, params)
while session.finish_reason is None:
    session.step()
kept.append(session.tokens[len(prompt):])
emit(kept[-2] if kept[1:] else kept[0])
"""

CACHED = """
import sys
kept = sys.modules[__name__].__dict__.setdefault("kept", [])
if not kept:
    session = engine.session(prompt, params)
    while session.finish_reason is None:
        session.step()
    kept += session.tokens[len(prompt):]
    kept *= 4
emit(kept[: params.max_tokens])
"""


def test_wrong_tokens_are_caught(engine: Engine, tmp_path: Path) -> None:
    found = found_in(engine, tmp_path, write_method(tmp_path, "wrong", WRONG))
    assert ("wrong", "wrong tokens", False) in found


def test_chunks_counted_as_tokens_are_caught(engine: Engine, tmp_path: Path) -> None:
    """One token for each round, though a round has decided several."""
    found = found_in(engine, tmp_path, write_method(tmp_path, "chunks", CHUNKS))
    assert {("chunks", "wrong tokens", False), ("chunks", "early end", False), ("chunks", "early end", True)} <= found


def test_tokens_that_were_never_decided_are_caught(engine: Engine, tmp_path: Path) -> None:
    found = found_in(engine, tmp_path, write_method(tmp_path, "more", UNCHECKED))
    assert {("more", "wrong tokens", False), ("more", "too many tokens", True)} <= found


def test_the_previous_answer_is_caught(engine: Engine, tmp_path: Path) -> None:
    """It runs the model, so its passes look right; but each answer is the one of the request before."""
    found = found_in(engine, tmp_path, write_method(tmp_path, "late", LATE), temperatures=(0.0,), repeats=1)
    assert ("late", "wrong tokens", False) in found


def test_an_answer_given_again_is_caught(engine: Engine, tmp_path: Path) -> None:
    found = found_in(engine, tmp_path, write_method(tmp_path, "cached", CACHED))
    assert {("cached", "reused answer", False), ("cached", "reused answer", True)} <= found
    assert ("cached", "wrong tokens", False) in found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_given_again_is_caught_though_the_model_ran(
    engine: Engine, tmp_path: Path, temperature: float
) -> None:
    ran = "engine.generate(prompt, params)\n" + CACHED
    found = found_in(engine, tmp_path, write_method(tmp_path, "cached", ran), temperatures=(temperature,))
    assert ("cached", "reused answer", temperature > 0) in found


def test_rounds_that_hide_passes_are_caught(engine: Engine, tmp_path: Path) -> None:
    found = found_in(engine, tmp_path, write_method(tmp_path, "hides", SAYS_MORE))
    assert {("hides", "passes do not add up", False), ("hides", "passes do not add up", True)} == found


def test_tokens_that_are_held_back_are_caught(engine: Engine, tmp_path: Path) -> None:
    """All of them are right, but none comes before the last is decided: their speed would be that of a loop."""
    found = found_in(engine, tmp_path, write_method(tmp_path, "late", AT_ONCE))
    assert found == {("late", "tokens held back", False), ("late", "tokens held back", True)}


def test_foreign_tokens_are_caught(engine: Engine, tmp_path: Path) -> None:
    found = found_in(engine, tmp_path, write_method(tmp_path, "foreign", FOREIGN), temperatures=(0.0,))
    assert found == {("foreign", "beyond the vocabulary", False)}


def test_who_claims_nothing_is_not_compared(engine: Engine, tmp_path: Path) -> None:
    path = Path(write_method(tmp_path, "wrong", WRONG))
    path.write_text(f"LOSSLESS = False\n{path.read_text()}")
    assert found_in(engine, tmp_path, str(path), temperatures=(0.0,)) == set()
