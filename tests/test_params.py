"""SamplingParams: what is refused, and how it travels."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

from sequoia.errors import UsageError
from sequoia.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-300),
        ("temperature", 1e300),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e-45),
        ("presence_penalty", math.inf),
        ("presence_penalty", -1e39),
        ("frequency_penalty", 1e300),
        ("logit_bias", {1: 1e39}),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", "one"),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", "\ud800"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [1, 2]),
    ],
)
def test_out_of_range_is_one_clear_line(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown sampling parameter 'temprature'"):
        SamplingParams.from_dict({"temprature": 1})


def test_stop_may_be_one_string() -> None:
    assert SamplingParams(stop="x").stop == SamplingParams(stop=["x"]).stop == ("x",)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_it_can_be_copied_and_pickled(travel: Any) -> None:
    params = SamplingParams(temperature=0.3, stop=["x"], logit_bias={4: -1.0}, seed=2)
    assert travel(params) == params
    assert hash(travel(params)) == hash(params)


def test_top_k_0_keeps_all_as_in_transformers() -> None:
    assert SamplingParams(top_k=0) == SamplingParams(top_k=None)


def test_it_is_frozen() -> None:
    params = SamplingParams(logit_bias={4: -1.0})
    with pytest.raises(AttributeError):
        params.seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[4] = 2.0  # type: ignore[index]
