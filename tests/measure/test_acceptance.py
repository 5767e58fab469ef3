"""Acceptance along texts predicts what real rounds accept, costs less than counting, and goes on after a kill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sequoia.draft.model_draft import ModelDraft
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.errors import FileError, UsageError
from sequoia.measure.acceptance import measure
from sequoia.measure.samples import Samples
from sequoia.measure.texts import plan_asks, write_texts
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.measure.toy import ToyModel
from sequoia.model.causal_lm import CausalLM
from sequoia.params import SamplingParams
from sequoia.speculate.session import Session
from sequoia.speculate.stats import Stats
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.shape import TreeShape

VOCAB, TOKENS = 12, 20
TARGET = ToyModel.random(VOCAB, seed=1)
DRAFTS: dict[str, Any] = {
    "model": ModelDraft(TARGET.blended(ToyModel.random(VOCAB, seed=2), 0.35), VOCAB),
    "ngram": NgramDraft(VOCAB),
}
SHAPES = {
    "tree": TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11)),
    "chain": TreeShape.chain(4),
    "beam": TreeShape.beam(4, 3),
}
END = frozenset({7})


def _prompts(count: int, seed: int = 0, length: int = 10) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, length).tolist() for _ in range(count)]


def _measured(draft: str, prompts: Sequence[Sequence[int]], temperature: float = 1.0, **options: Any) -> Samples:
    settings = {"eos_ids": END, "samples": len(prompts), "tokens": TOKENS, "depth": 4, "ranks": 5} | options
    return measure(TARGET, DRAFTS[draft], SamplingParams(temperature=temperature), prompts, **settings)


def _session(draft: str, shape: TreeShape, prompt: Sequence[int], request: int = 0, **params: Any) -> Session:
    verifier, sampling = VERIFIERS[params.pop("verifier", "sequoia")], SamplingParams(max_tokens=TOKENS, **params)
    return Session(TARGET, DRAFTS[draft].start(), shape, verifier, prompt, sampling, END, request)


def _run(draft: str, shape: TreeShape, prompts: Sequence[Sequence[int]], **params: Any) -> tuple[Stats, list[int]]:
    """Counts of all requests together, and the rounds of each."""
    total, rounds = Stats(), []
    for request, prompt in enumerate(prompts):
        session, stats = _session(draft, shape, prompt, request, seed=11, **params), Stats()
        while session.finish_reason is None:
            stats.add(session.step())
        total.merge(stats)
        rounds.append(stats.rounds)
    return total, rounds


@cache
def _sampled(draft: str, verifier: str) -> Samples:
    return _measured(draft, _prompts(120), verifier=VERIFIERS[verifier])


@pytest.mark.parametrize("shape", SHAPES)
def test_at_temperature_0_the_prediction_is_what_happens(shape: str) -> None:
    prompts = _prompts(40)
    samples = _measured("model", prompts, 0.0, samples=200)
    stats, rounds = _run("model", SHAPES[shape], prompts, temperature=0.0)
    assert len(samples.texts) == 40  # a prompt has one text only
    predicted = samples.tokens_per_round(SHAPES[shape]).mean
    assert predicted == pytest.approx(stats.emitted_tokens / sum(rounds), rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_at_temperature_0_the_ngram_draft_differs_by_ties_alone(shape: str) -> None:
    prompts = _prompts(40)
    stats, rounds = _run("ngram", SHAPES[shape], prompts, temperature=0.0)
    predicted = _measured("ngram", prompts, 0.0).tokens_per_round(SHAPES[shape]).mean
    assert predicted == pytest.approx(stats.emitted_tokens / sum(rounds), rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("draft", "verifier"), [("model", "sequoia"), ("ngram", "sequoia"), ("model", "sampler_match")]
)
def test_sampled_rounds_take_as_many_tokens_as_predicted(draft: str, verifier: str, shape: str) -> None:
    """On prompts that were not used for the prediction."""
    predicted = _sampled(draft, verifier).tokens_per_round(SHAPES[shape])
    stats, rounds = _run(draft, SHAPES[shape], _prompts(120, seed=1), temperature=1.0, verifier=verifier)
    mean = stats.emitted_tokens / stats.rounds
    spread = mean * np.std(rounds) / np.mean(rounds) / len(rounds) ** 0.5  # texts that end early only make it wider
    assert abs(predicted.mean - mean) <= 3 * np.hypot(predicted.error, spread)
    assert predicted.error < 0.04 * mean


@pytest.mark.parametrize("draft", DRAFTS)
def test_rates_on_policy_are_the_predicted_ones(draft: str) -> None:
    shape = SHAPES["tree"]
    stats, _ = _run(draft, shape, _prompts(120, seed=1), temperature=1.0)
    visits, accepted = _sampled(draft, "sequoia").counts(shape)
    for depth in range(3):
        for rank, count in enumerate(stats.accepted[depth]):
            rate = accepted[depth, rank] / visits[depth]
            error = np.sqrt(rate * (1 - rate) / stats.visits[depth])
            assert abs(count / stats.visits[depth] - rate) <= 4 * error + 0.01, (depth, rank)


def test_the_estimate_agrees_with_counting_at_a_fifth_of_its_variance() -> None:
    """Both at the same places of the same texts; the variance is that over sets of texts."""
    star, sets, ranks = TreeShape((-1, 0, 0, 0)), 24, 3
    computed, counted = np.zeros((sets, ranks)), np.zeros((sets, ranks))
    for index in range(sets):
        prompts = _prompts(5, seed=100 + index)
        samples = _measured("model", prompts, eos_ids=frozenset(), tokens=12, seed=index)
        computed[index] = np.mean([text.marginal[:, 0, :ranks] for text in samples.texts], axis=(0, 1))
        texts = _texts_of(prompts, index)
        for request, tokens in enumerate(tokens[:end] for tokens in texts for end in range(10, 22)):
            round_ = _session("model", star, tokens, request, temperature=1.0, seed=1000 + index).step()
            for node in round_.verdict.path:
                counted[index, node - 1] += 1 / 60
    gap = computed - counted
    assert (np.abs(gap.mean(0)) <= 3 * gap.std(0, ddof=1) / sets**0.5).all()
    assert (counted.var(0) >= 5 * computed.var(0)).all()


def _texts_of(prompts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
    """The texts that `measure` judges, prompts included."""
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed)
    written = write_texts(TARGET, params, plan_asks(prompts, len(prompts), 1.0))
    return [[*text.ask.prompt, *text.tokens] for text in written]


def _same(one: Samples, other: Samples) -> bool:
    return len(one.texts) == len(other.texts) and all(
        np.array_equal(a.rates, b.rates) and np.array_equal(a.marginal, b.marginal) and a.prompt == b.prompt
        for a, b in zip(one.texts, other.texts, strict=True)
    )


class Counting(ToyModel):
    """A target that counts its passes."""

    def __init__(self) -> None:
        super().__init__(TARGET.table)
        self.passes = 0

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        self.passes += 1
        return super().forward(*args, **options)


def _stored(target: ToyModel, folder: Path, draft: str = "model", **options: Any) -> Samples:
    settings = {"samples": 9, "tokens": 8, "depth": 3, "ranks": 3, "store": folder} | options
    return measure(target, DRAFTS[draft], SamplingParams(), _prompts(4), **settings)


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_interrupted_measurement_goes_on_to_the_same_result(draft: str, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        assert total == 9
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _stored(Counting(), tmp_path, draft, progress=interrupt)
    again, steps = Counting(), list[int]()
    resumed = _stored(again, tmp_path, draft, progress=lambda done, total, what: steps.append(done))
    assert steps == list(range(1, 10))
    assert again.passes == 2  # all texts are there; those of the last two prompts are read once more
    assert _same(resumed, _stored(Counting(), tmp_path / "new", draft))
    finished = Counting()
    assert _same(resumed, _stored(finished, tmp_path, draft))
    assert finished.passes == 0


def test_texts_serve_another_draft_and_more_samples(tmp_path: Path) -> None:
    _stored(Counting(), tmp_path)
    other = Counting()
    names = {"target": "Counting", "draft": "ModelDraft"}
    assert _same(_stored(other, tmp_path, depth=2), _stored(Counting(), tmp_path / "new", depth=2))
    assert other.passes == 4  # one for the texts of each prompt
    more = Counting()
    _stored(more, tmp_path, samples=10, names=names)
    assert 0 < more.passes < 14


@pytest.mark.parametrize("change", [{"seed": 1}, {"tokens": 9}, {"eos_ids": END}, {"names": {"target": "another"}}])
def test_what_was_measured_otherwise_is_not_used(change: dict[str, Any], tmp_path: Path) -> None:
    _stored(Counting(), tmp_path)
    assert _same(_stored(Counting(), tmp_path, **change), _stored(Counting(), tmp_path / "new", **change))


def test_half_written_files_are_not_trusted(tmp_path: Path) -> None:
    expected = _stored(Counting(), tmp_path)
    (texts,) = tmp_path.glob("texts-*.jsonl")
    lines = texts.read_text().splitlines(keepends=True)
    texts.write_text("".join(lines[:-1]) + lines[-1][:20])
    for number, file in enumerate(sorted(tmp_path.glob("rates-*/*.npz"))):
        file.write_bytes(file.read_bytes()[: 100 * number])
    assert _same(_stored(Counting(), tmp_path), expected)
    assert texts.read_text().splitlines(keepends=True)[: len(lines) - 1] == lines[:-1]
    assert len(texts.read_text().splitlines()) == len(lines)
    assert not list(tmp_path.rglob("*.part"))


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=re.escape(f"cannot write {tmp_path / 'file'}")):
        _stored(Counting(), tmp_path / "file")


@pytest.mark.parametrize("draft", DRAFTS)
def test_nodes_may_be_judged_in_pieces(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank needs no noise, so it is the same."""
    whole = _measured(draft, _prompts(3), ranks=1)
    monkeypatch.setattr("sequoia.measure.judge._ELEMENTS", 5 * VOCAB)
    for one, other in zip(whole.texts, _measured(draft, _prompts(3), ranks=1).texts, strict=True):
        np.testing.assert_allclose(one.rates, other.rates, atol=1e-6)
        np.testing.assert_allclose(one.marginal, other.marginal, atol=1e-6)


def test_length_seed_and_stop_of_the_request_do_not_matter() -> None:
    params = SamplingParams(max_tokens=3, seed=9, stop=("x",), logprobs=2)
    found = measure(TARGET, DRAFTS["model"], params, _prompts(3), samples=3, tokens=8, ranks=3)
    assert _same(found, measure(TARGET, DRAFTS["model"], SamplingParams(), _prompts(3), samples=3, tokens=8, ranks=3))
    assert [len(text.rates) for text in found.texts] == [8, 8, 8]


def test_a_loaded_pair_is_named_and_has_its_own_end_of_text() -> None:
    target = CausalLM(tiny_llama(VOCAB, 1, device="cpu"))
    target.loaded.model.generation_config.eos_token_id = 4
    draft = ModelDraft(CausalLM(tiny_llama(VOCAB, 1, blur=0.06, device="cpu")), VOCAB)
    samples = measure(target, draft, SamplingParams(temperature=1.0), _prompts(4), samples=12, tokens=30, ranks=3)
    facts = samples.profile().provenance
    assert (facts["target"], facts["texts"], facts["prompts"]) == (target.loaded.name, 12, 4)
    assert facts["tokens"] == sum(len(text.rates) for text in samples.texts) < 12 * 30
    assert facts["verifier"] == "sequoia"
    assert "threads" not in facts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be an integer of at least 1"),
        ({"ranks": 0}, "ranks must be"),
        ({"verifier": VERIFIERS["spectr"]}, "not spectr"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _measured("model", _prompts(2), **options)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(UsageError, match="no prompts"):
        _measured("model", [], samples=3)
