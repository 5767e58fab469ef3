"""Processors against transformers' own, node by node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sequoia.errors import ModelError, UsageError
from sequoia.params import SamplingParams
from sequoia.speculate.processors import Processors

VOCAB = 300
PROMPT = [5, 9, 5, 40]
OUTPUT = [7, 7, 9, 100]
PATHS = [[], [7], [250, 250, 8]]


def _logits(rows: int = len(PATHS), vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def _processors(**values: Any) -> Processors:
    processors = Processors(SamplingParams(**values), PROMPT, VOCAB)
    processors.observe(OUTPUT)
    return processors


def _ours(logits: Tensor, **values: Any) -> Tensor:
    processors = _processors(**values)
    return processors.probs(processors.scores(logits, PATHS))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_k": 1},
        {"top_k": 10_000},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_3_the_same_distribution_as_transformers(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    logits = _logits()
    for row, path in enumerate(PATHS):
        ids = torch.tensor([[*PROMPT, *OUTPUT, *path]])
        expected = chain(ids, logits[row : row + 1].clone()).softmax(-1)[0]
        torch.testing.assert_close(_ours(logits, **values)[row], expected, rtol=1e-5, atol=1e-7)


def test_20_presence_and_frequency_count_the_output_and_the_nodes_own_path() -> None:
    logits = _logits()
    found = _processors(presence_penalty=0.5, frequency_penalty=0.25).scores(logits, PATHS)
    expected = logits.clone()
    for row, path in enumerate(PATHS):
        for token in {*OUTPUT, *path}:
            expected[row, token] -= 0.5 + 0.25 * [*OUTPUT, *path].count(token)
    torch.testing.assert_close(found, expected)


def test_bias_comes_before_the_penalties() -> None:
    """As in transformers: the penalty sees the biased logit's sign."""
    logits = torch.full((1, VOCAB), -1.0)
    processors = _processors(logit_bias={9: 3.0}, repetition_penalty=2.0)
    assert processors.scores(logits, [[]])[0, 9] == 1.0


def test_10_temperature_0_is_the_limit() -> None:
    logits = _logits()
    for temperature in (1e-30, 1e-6, 0.01):
        torch.testing.assert_close(_ours(logits, temperature=temperature), _ours(logits, temperature=0.0))


def test_top_p_beyond_the_tokens_first_sorted() -> None:
    """A flat distribution needs the full sort."""
    logits = 0.01 * _logits(1, 40_000)
    processors = Processors(SamplingParams(top_p=0.9), [0], 40_000)
    probs = processors.probs(processors.scores(logits, [[]]))
    kept = int((probs > 0).sum())
    ordered = logits.softmax(-1).double().sort(descending=True).values[0].cumsum(0)
    assert kept == int((ordered < 0.9).sum()) + 1


def test_candidates_are_columns_of_the_whole() -> None:
    values: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "logit_bias": {9: 1.0, 250: -2.0}}
    logits, candidates = _logits(), torch.tensor([5, 7, 8, 9, 100, 250, 299])
    whole = _processors(**values).scores(logits, PATHS)
    part = _processors(**values).scores(logits[:, candidates], PATHS, candidates)
    torch.testing.assert_close(part, whole[:, candidates])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_distribution_is_an_error(value: float) -> None:
    logits = _logits()
    logits[1, 3] = value
    with pytest.raises(ModelError, match="the target's logits are no distribution"):
        _processors().scores(logits, PATHS)


def test_a_target_with_every_token_banned_is_an_error() -> None:
    with pytest.raises(UsageError, match="bans every token"):
        _processors(logit_bias=dict.fromkeys(range(VOCAB), float("-inf"))).scores(_logits(), PATHS)


def test_a_draft_with_every_token_banned_proposes_them_alike() -> None:
    processors = _processors(logit_bias={3: float("-inf"), 4: float("-inf")})
    scores = processors.scores(_logits()[:, [3, 4]], PATHS, torch.tensor([3, 4]), model="draft")
    torch.testing.assert_close(processors.probs(scores), torch.full((3, 2), 0.5))
