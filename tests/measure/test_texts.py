"""Texts written side by side are what each would be alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from sequoia.draft.ngram_draft import NgramDraft
from sequoia.errors import UsageError
from sequoia.measure.reference import joint_law
from sequoia.measure.texts import Ask, Text, batches, plan_asks, text_logits, write_texts
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.measure.toy import ToyModel
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import LanguageModel
from sequoia.model.loading import load_model
from sequoia.params import SamplingParams
from sequoia.speculate.session import Session
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.shape import TreeShape

VOCAB = 12
TOY = ToyModel.random(VOCAB, seed=1)
PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (3, 1, 4, 1, 5), (7,) * 11]


def _window_model() -> CausalLM:
    """One layer sees three tokens back, the next sees all."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return CausalLM(load_model((Gemma3ForCausalLM(config), None), device="cpu"), lean=False)


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    llama = tiny_llama(VOCAB, 1, device="cpu")
    return {"toy": TOY, "lean": CausalLM(llama), "modules": CausalLM(llama, lean=False), "window": _window_model()}


def _alone(model: LanguageModel, prompt: Sequence[int], params: SamplingParams, eos: frozenset[int]) -> list[int]:
    """Plain decoding by a session of its own."""
    proposer = NgramDraft(VOCAB).start()
    session = Session(model, proposer, TreeShape.root_only(), VERIFIERS["sequoia"], prompt, params, eos)
    tokens: list[int] = []
    while session.finish_reason is None:
        tokens += session.step().token_ids
    return tokens


def _written(model: LanguageModel, params: SamplingParams, asks: Sequence[Ask], eos: frozenset[int]) -> dict[Ask, Text]:
    return {text.ask: text for text in write_texts(model, params, asks, eos)}


@pytest.mark.parametrize("name", ["toy", "lean", "modules", "window"])
@pytest.mark.parametrize(
    "settings", [{}, {"repetition_penalty": 1.8, "frequency_penalty": 0.4}, {"logit_bias": {5: -torch.inf}}]
)
def test_greedy_texts_are_those_of_a_session(
    models: dict[str, LanguageModel], name: str, settings: dict[str, object]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=17, **settings)  # type: ignore[arg-type]
    asks = [Ask(prompt, repeat) for repeat, prompt in enumerate(PROMPTS)]
    texts = _written(models[name], params, asks, frozenset({8}))
    if name == "toy" and not settings:
        assert len({len(text.tokens) for text in texts.values()}) > 1  # they end at different times
    for ask in asks:
        assert list(texts[ask].tokens) == _alone(models[name], ask.prompt, params, frozenset({8})), ask


def test_texts_end_with_the_end_token_or_at_the_limit_and_can_ignore_it() -> None:
    params = SamplingParams(temperature=1, max_tokens=20, seed=0)
    asks = [Ask((3, 1), repeat) for repeat in range(30)]
    texts = _written(TOY, params, asks, frozenset({4}))
    ended = [text for text in texts.values() if len(text.tokens) < 20]
    assert ended
    assert all(text.tokens.index(4) == len(text.tokens) - 1 for text in ended)
    endless = SamplingParams(temperature=1, max_tokens=20, seed=0, ignore_eos=True)
    assert {len(text.tokens) for text in _written(TOY, endless, asks, frozenset({4})).values()} == {20}


def test_a_text_does_not_depend_on_what_is_written_beside_it() -> None:
    params = SamplingParams(temperature=1, max_tokens=12, seed=3)
    asks = [Ask(prompt, repeat) for prompt in dict.fromkeys(PROMPTS) for repeat in range(3)]
    together = _written(TOY, params, asks, frozenset())
    for ask in asks:
        assert together[ask] == _written(TOY, params, [ask], frozenset())[ask]
    assert len({text.tokens for text in together.values()}) == len(asks)
    other = _written(TOY, SamplingParams(temperature=1, max_tokens=12, seed=4), asks, frozenset())
    assert all(other[ask].tokens != together[ask].tokens for ask in asks)


def test_sampled_texts_follow_the_law() -> None:
    params = SamplingParams(temperature=0.7, top_k=4, max_tokens=2, seed=0)
    prompt, count = (2, 3), 3000
    law = joint_law(lambda tokens: TOY.logits_after(tokens).tolist(), params, prompt, 2)
    found = Counter(text.tokens for text in write_texts(TOY, params, [Ask(prompt, i) for i in range(count)]))
    statistic = sum(
        (found[(a, b)] - count * law[a, b]) ** 2 / (count * law[a, b])
        for a in range(VOCAB)
        for b in range(VOCAB)
        if law[a, b] > 0
    )
    assert set(found) <= {(a, b) for a in range(VOCAB) for b in range(VOCAB) if law[a, b] > 0}
    assert statistic < 45  # 15 degrees of freedom; beyond 45 once in 10,000


def test_a_context_limits_texts_and_prompts() -> None:
    narrow = ToyModel(TOY.table, context_length=8)
    params = SamplingParams(temperature=1, max_tokens=20, seed=0)
    text = next(write_texts(narrow, params, [Ask((1, 2, 3, 4, 5))]))
    assert len(text.tokens) == 3
    with pytest.raises(UsageError, match="1 to 7 tokens for this target, and here is one of 8"):
        next(write_texts(narrow, params, [Ask((1,) * 8)]))
    with pytest.raises(UsageError, match="here is one of 0"):
        next(write_texts(TOY, params, [Ask(())]))


def test_a_long_prompt_is_read_in_parts(models: dict[str, LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequoia.measure.texts._ROWS", 4)
    params = SamplingParams(temperature=0, max_tokens=9)
    asks = [Ask(tuple(range(11))), Ask((5, 4, 3)), Ask(tuple(range(8)))]
    for name in ("toy", "window"):
        texts = _written(models[name], params, asks, frozenset())
        assert [list(texts[ask].tokens) for ask in asks] == [
            _alone(models[name], ask.prompt, params, frozenset()) for ask in asks
        ]


@pytest.mark.parametrize("name", ["toy", "lean", "modules", "window"])
def test_one_pass_reads_several_texts_as_each_alone(models: dict[str, LanguageModel], name: str) -> None:
    model, prompt, texts = models[name], (3, 1, 4, 1, 5, 9), [(2, 6, 5, 3), (5,), (8, 9, 7)]
    for text, logits in zip(texts, text_logits(model, prompt, texts), strict=True):
        expected = model.forward(torch.tensor([*prompt, *text[:-1]]), model.new_cache())[len(prompt) - 1 :]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_prompts_have_equal_shares_and_one_text_each_at_temperature_0() -> None:
    asks = plan_asks(PROMPTS, 8, temperature=1)
    assert Counter(ask.prompt for ask in asks) == {PROMPTS[0]: 3, PROMPTS[1]: 3, PROMPTS[3]: 2}
    assert len(set(asks)) == 8
    assert plan_asks(PROMPTS, 8, temperature=0) == [Ask(PROMPTS[0]), Ask(PROMPTS[1]), Ask(PROMPTS[3])]
    assert [ask.prompt for ask in plan_asks(PROMPTS, 2, temperature=1)] == PROMPTS[:2]


def test_batches_keep_the_order_and_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequoia.measure.texts._SLOTS", 60)
    asks = plan_asks([(1,) * 10, (2,) * 10, (3,) * 100], 9, temperature=1)
    parts = list(batches(asks, tokens=10, together=4))
    assert [ask for part in parts for ask in part] == asks
    # A prompt takes its slots once: 10 + 3 · 10, then 10 + 10 more; one that is too long stands alone.
    assert [len(part) for part in parts] == [4, 2, 1, 1, 1]


def test_texts_share_no_more_slots_than_memory_is_planned_for() -> None:
    asks = [Ask((prompt, prompt)) for prompt in range(5)]
    assert [len(batch) for batch in batches(asks, tokens=10, slots=25)] == [2, 2, 1]
    assert [len(batch) for batch in batches(asks, tokens=10, slots=5)] == [1] * 5
