"""The reference law, against transformers' own processors and against counting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sequoia.measure.reference import joint_law, reference_probs
from sequoia.params import SamplingParams

VOCAB, PROMPT, OUTPUT = 12, [3, 5, 3], [7, 3, 7]

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-k of more than there are": {"top_k": 40},
    "top-p": {"top_p": 0.7},
    "a tiny top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {2: 3.0, 7: -4.0}},
    "all": {
        "temperature": 1.5,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "logit_bias": {2: 1.0, 7: -1.0},
    },
}


def transformers_probs(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    processors: list[Any] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    processors += [
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k or VOCAB),
        TopPLogitsWarper(params.top_p),
        MinPLogitsWarper(params.min_p),
    ]
    scores = LogitsProcessorList(processors)(torch.tensor([PROMPT + OUTPUT]), logits[None].clone())
    return scores[0].softmax(-1).numpy()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_processors_mean_what_they_mean_in_transformers(options: dict[str, Any], seed: int) -> None:
    logits = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    params = SamplingParams(**options)
    found = reference_probs(logits.numpy(), params, PROMPT, OUTPUT)
    assert np.abs(found - transformers_probs(logits, params)).max() < 1e-7


def test_output_penalties_count_the_output_alone() -> None:
    """Once for presence, each time for frequency; the prompt does not matter."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logs = np.log(reference_probs(np.zeros(VOCAB), params, PROMPT, OUTPUT))
    lowered = logs.max() - logs
    expected = np.zeros(VOCAB)
    expected[7], expected[3] = 0.5 + 2 * 0.25, 0.5 + 0.25
    assert np.abs(lowered - expected).max() < 1e-12


def test_the_token_that_crosses_p_stays() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    assert reference_probs(logits, SamplingParams(top_p=0.6), [0], []) == pytest.approx([0.625, 0.375, 0])
    assert reference_probs(logits, SamplingParams(top_p=0.49), [0], []) == pytest.approx([1, 0, 0])


def test_temperature_zero_is_certain() -> None:
    assert reference_probs([0.1, 0.3, 0.2], SamplingParams(temperature=0), [0], []).tolist() == [0, 1, 0]


def test_the_joint_law_multiplies_along_the_way() -> None:
    def logits_after(tokens: Any) -> np.ndarray:
        return np.log([[0.9, 0.1], [0.2, 0.8]][tokens[-1]])

    law = joint_law(logits_after, SamplingParams(), [0], 3)
    assert law.shape == (2, 2, 2)
    assert law.sum() == pytest.approx(1)
    assert law[0, 1, 1] == pytest.approx(0.9 * 0.1 * 0.8)
