"""The front door: what `load` accepts, what a stream gives, and the real model against transformers' generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sequoia
from sequoia.engine import Engine, load
from sequoia.errors import FileError, UsageError, VocabularyError
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.loading import LoadedModel
from sequoia.speculate.stats import Stats
from sequoia.text import encode_prompt
from sequoia.tree.specs import parse_tree

PROMPTS = (
    "Why is the sky blue?",
    "Repeat this list twice, one item per line: apple, banana, cherry, date, fig.",
    "Write a Python function that returns the longest run of equal elements in a list.",
)
TREES = ("off", "optimal:8x4", "optimal:32x6", "optimal:128x8")


@pytest.fixture(scope="session")
def engine(smollm2: LoadedModel) -> Engine:
    return load((smollm2.model, smollm2.tokenizer))


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _with_tree(engine: Engine, tree: str) -> Engine:
    profile = sequoia.AcceptanceProfile.shipped("ngram")
    return Engine(engine.target, engine.draft, parse_tree(tree, profile), engine.verifier)


def _generated(smollm2: LoadedModel, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = smollm2.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_text_equals_generate(smollm2: LoadedModel, engine: Engine, text: str) -> None:
    """In fp32, token for token, for every size of tree. benchmarks/equality.py does the same on more prompts."""
    prompt = encode_prompt(engine.tokenizer, _chat(text))
    expected = _generated(smollm2, prompt, 24)
    params = sequoia.SamplingParams(max_tokens=24, temperature=0)
    for tree in TREES:
        assert list(_with_tree(engine, tree).generate(prompt, params).token_ids) == expected, tree


@pytest.mark.slow
def test_repeating_text_takes_fewer_rounds(engine: Engine) -> None:
    """The n-gram draft sees a list once and drafts its repetition."""
    out = engine.generate(_chat(PROMPTS[1]), sequoia.SamplingParams(max_tokens=48, temperature=0))
    assert out.stats.rounds < out.stats.emitted_tokens
    assert out.stats.mean_accepted_length > 1.2


@pytest.mark.slow
def test_streamed_text_is_the_final_text(engine: Engine) -> None:
    params = sequoia.SamplingParams(max_tokens=24, temperature=0.8, seed=5)
    chunks = list(engine.stream(_chat(PROMPTS[0]), params))
    out = engine.generate(_chat(PROMPTS[0]), params)
    assert "".join(chunk.text for chunk in chunks) == out.text == str(out)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == out.token_ids
    assert out.text == engine.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == out.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["off", "optimal:16x4"])
def test_19_stop_string_ends_the_text_before_it(engine: Engine, tree: str) -> None:
    """The stop string is cut out, tokens behind the one that completes it are not reported, and the counts agree."""
    params = {"max_tokens": 40, "temperature": 0}
    whole = engine.generate(_chat(PROMPTS[1]), sequoia.SamplingParams(**params))
    stop = whole.text[11:15]
    out = _with_tree(engine, tree).generate(_chat(PROMPTS[1]), sequoia.SamplingParams(**params, stop=[stop]))
    assert out.text == whole.text[: whole.text.index(stop)]
    assert out.finish_reason == "stop"
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    decoded = engine.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert stop in decoded
    assert stop not in engine.tokenizer.decode(out.token_ids[:-1], skip_special_tokens=True)
    assert out.stats.emitted_tokens == len(out.token_ids)
    assert out.stats.emitted_tokens == out.stats.accepted_tokens + out.stats.rounds - out.stats.cut_tokens


@pytest.mark.slow
def test_end_of_text_finishes_with_stop(engine: Engine) -> None:
    out = engine.generate(_chat("Answer with one word: yes or no?"), sequoia.SamplingParams(temperature=0))
    assert out.finish_reason == "stop"
    assert out.token_ids[-1] in engine.target.loaded.eos_ids
    assert all(token not in engine.target.loaded.eos_ids for token in out.token_ids[:-1])


@pytest.mark.slow
def test_text_messages_and_ids_are_the_same_prompt(engine: Engine) -> None:
    params = sequoia.SamplingParams(max_tokens=6, temperature=0)
    ids = engine.tokenizer.encode("The capital of France is")
    assert engine.generate("The capital of France is", params).token_ids == engine.generate(ids, params).token_ids


@pytest.mark.slow
def test_stats_are_those_of_the_latest_request(engine: Engine) -> None:
    out = engine.generate("One, two,", sequoia.SamplingParams(max_tokens=5, temperature=0))
    assert engine.stats is out.stats
    assert 0 < out.stats.first_round_seconds < out.stats.seconds
    assert out.stats.tokens_per_second == out.stats.emitted_tokens / out.stats.seconds


def _tiny(vocab_size: int = 32) -> Any:
    return tiny_llama(vocab_size, seed=1, device="cpu").model


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return load(_tiny(), device="cpu")


def test_models_can_be_objects(tiny: Engine) -> None:
    out = load(_tiny(), draft=_tiny(), tree="chain:2").generate([1, 2, 3], sequoia.SamplingParams(max_tokens=9))
    assert len(out.token_ids) == 9
    assert tiny.target_model.config.vocab_size == 32
    assert tiny.tokenizer is None


def test_a_shape_and_a_profile_can_be_objects() -> None:
    shape = sequoia.TreeShape([-1, 0, 0, 1])
    assert load(_tiny(), tree=shape).tree == shape
    profile = sequoia.AcceptanceProfile([[0.9]])
    assert load(_tiny(), tree="optimal:4x3", profile=profile).tree == sequoia.TreeShape.chain(3)


def test_a_profile_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    sequoia.AcceptanceProfile([[0.9]]).save(path)
    assert load(_tiny(), tree="optimal:4x3", profile=path).tree == sequoia.TreeShape.chain(3)
    path.write_text(json.dumps({"rates": [[2]]}))
    with pytest.raises(FileError, match=r"rates\.json"):
        load(_tiny(), tree="optimal:4x3", profile=path)


def test_different_vocabularies_are_refused() -> None:
    with pytest.raises(VocabularyError):
        load(_tiny(32), draft=_tiny(2048))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verifier": "guess"}, "unknown verifier"),
        ({"tree": "bush:3"}, "tree bush:3: no such form"),
        ({"tree": "chain:-1"}, "tree chain:-1: depth must be"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "abacus"}, "abacus"),
        ({"tree": None}, "tree is a TreeShape"),
        ({"tree": [-1, 0]}, "tree is a TreeShape"),
        ({"profile": 5}, "profile is an AcceptanceProfile"),
        ({"tree": "chain:2", "profile": sequoia.AcceptanceProfile([[0.5]])}, "a profile plans optimal trees"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        load(_tiny(), **arguments)
    assert "\n" not in str(error.value)


def test_a_tree_can_be_a_file(tmp_path: Path) -> None:
    shape = sequoia.TreeShape([-1, 0, 0, 1])
    shape.save(tmp_path / "mine")
    assert load(_tiny(), tree=tmp_path / "mine").tree == load(_tiny(), tree=str(tmp_path / "mine")).tree == shape


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {}, 0, sequoia.SamplingParams])
def test_params_of_another_kind_are_refused(tiny: Engine, params: Any) -> None:
    with pytest.raises(UsageError, match="params are SamplingParams"):
        tiny.generate([1], params)


def test_a_negative_request_is_refused(tiny: Engine) -> None:
    with pytest.raises(UsageError, match="request must be"):
        tiny.generate([1], request=-1)


def test_ids_may_come_as_an_array(tiny: Engine) -> None:
    params = sequoia.SamplingParams(max_tokens=5, seed=1)
    assert tiny.generate(torch.tensor([1, 2]), params).token_ids == tiny.generate([1, 2], params).token_ids


def test_an_engine_says_what_it_is(tiny: Engine) -> None:
    assert "verifier=sequoia" in repr(tiny)
    assert "TreeShape(size=16, depth=4)" in repr(tiny)


def test_stop_strings_need_a_tokenizer(tiny: Engine) -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        tiny.stream([1], sequoia.SamplingParams(stop=["x"]))


def test_12_requests_under_one_seed_do_not_share_noise(tiny: Engine) -> None:
    params = sequoia.SamplingParams(max_tokens=20, seed=4)
    first, again, other = (tiny.generate([1, 2], params, request=request).token_ids for request in (0, 0, 1))
    assert first == again != other


def test_bias_beyond_the_vocabulary_is_refused(tiny: Engine) -> None:
    with pytest.raises(UsageError, match="logit_bias names token 99"):
        tiny.stream([1], sequoia.SamplingParams(logit_bias={99: 1.0}))


def test_merged_stats_keep_their_identity(tiny: Engine) -> None:
    total = Stats()
    for request in range(3):
        total.merge(tiny.generate([1, 2], sequoia.SamplingParams(max_tokens=11), request=request).stats)
    assert total.emitted_tokens == 33 == total.accepted_tokens + total.rounds - total.cut_tokens
    assert total.accepted_tokens == sum(map(sum, total.accepted))


def test_public_names_exist() -> None:
    assert all(getattr(sequoia, name) is not None for name in sequoia.__all__)
    assert set(sequoia.__all__) <= set(dir(sequoia))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sequoia.nonsense


def test_shipped_profiles_plan() -> None:
    for draft in ("ngram", "model"):
        profile = sequoia.AcceptanceProfile.shipped(draft)
        assert profile.provenance
        assert sequoia.expected_tokens(sequoia.optimal_shape(profile, 16, 4), profile) > 1
