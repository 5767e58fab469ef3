"""Texts that a target writes, many at once."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tiny_training import VOCAB, tiny_family, tiny_openings, tiny_target

import sequoia
from sequoia.errors import ModelError, UsageError
from sequoia.measure.prompts import PromptRecord
from sequoia.model.causal_lm import CausalLM
from sequoia.training.frame import Frame, Opening, Openings
from sequoia.training.texts import _Dice, _Writer, write_shard


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_texts_side_by_side_are_what_they_are_alone(family: str) -> None:
    """Three texts, of which one begins anew halfway, against passes over each of them."""
    target = tiny_family(family)
    taps = (0, 1, target.layer_count, target.layer_count + 1)
    decoder = target.side_by_side(3, taps)
    texts = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
    restart = 7
    places = torch.arange(12).repeat(3, 1)
    places[2, restart:] -= restart
    steps = [decoder.step(texts[:, step], places[:, step]) for step in range(12)]
    logits, features = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    pieces = [(0, 0, 12), (1, 0, 12), (2, 0, restart), (2, restart, 12)]
    for row, start, end in pieces:
        cache = target.new_cache(taps)
        expected = target.forward(texts[row, start:end], cache)
        torch.testing.assert_close(logits[row, start:end], expected, rtol=1e-4, atol=1e-4)
        kept = cache.features.read(0, end - start)
        torch.testing.assert_close(features[row, start:end], kept, rtol=1e-4, atol=1e-4)


def test_many_texts_at_once_need_a_lean_decoder() -> None:
    from sequoia.measure.tiny_llama import tiny_llama

    with pytest.raises(ModelError, match="need the lean decoder"):
        CausalLM(tiny_llama(VOCAB, 3, device="cpu"), lean=False).side_by_side(2, (1,))


def test_a_shard_depends_on_its_seed_alone() -> None:
    target = tiny_target()
    one, same, other = (write_shard(target, tiny_openings(), (1, 3), 4, 40, seed, lambda n: None) for seed in "aab")
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.features, same.features)
    assert not torch.equal(one.tokens, other.tokens)


def test_a_shards_texts_begin_with_an_opening_and_keep_to_the_context() -> None:
    target = tiny_target()
    shard = write_shard(target, tiny_openings(), (1, 3), 4, 150, "0", lambda n: None)
    begins = (shard.positions == 0).nonzero()
    assert len(begins) == 4 * 3  # the context is 64
    for row, place in begins.tolist():
        assert shard.tokens[row, place] == 7
        assert 8 <= shard.tokens[row, place + 1] < 16
        assert shard.leads[row, place]
        assert not shard.leads[row, place + 1]
    assert int(shard.positions.max()) == 63


def test_a_shards_features_are_those_of_its_texts() -> None:
    target = tiny_target()
    shard = write_shard(target, tiny_openings(), (1, 3), 2, 40, "0", lambda n: None)
    cache = target.new_cache((1, 3))
    target.forward(shard.tokens[1].long(), cache)
    torch.testing.assert_close(shard.features[1], cache.features.read(0, 40), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_dice_draw_by_the_distribution() -> None:
    """By chi squared, over a vocabulary that fills no whole number of blocks; temperature 0 takes the largest."""
    logits = (2 * torch.randn(1, 300, generator=torch.Generator().manual_seed(0))).expand(64, -1)
    dice, counts, rounds = _Dice(64, 300, 0), torch.zeros(300), 600
    for _ in range(rounds):
        counts += torch.bincount(dice.draw(logits, [0.7] * 64), minlength=300)
    expected = 64 * rounds * (logits[0] / 0.7).softmax(-1)
    often = expected > 5
    squares = ((counts - expected).square() / expected)[often].sum().item()
    freedom = int(often.sum())
    assert abs(squares - freedom) < 5 * (2 * freedom) ** 0.5
    assert set(dice.draw(logits, [0.0] * 64).tolist()) == {int(logits[0].argmax())}


def _read(writer: _Writer, drawn: list[int]) -> list[int]:
    return [writer.read(token)[0] for token in drawn]


def test_a_conversation_takes_turns() -> None:
    """Request, answer and request follow each other in the frame, and a text ends after an answer at last."""
    frame = Frame((1, 2), (3, 4), (5, 6))
    openings = Openings([Opening((1, 2, 30), lead=2, is_request=True)], frame)
    writer = _Writer(openings, frozenset({0}), 1000, Random(0))
    assert writer.temperature == 0.75
    assert _read(writer, [99, 99, 99, 40, 41, 0, 99, 50]) == [1, 2, 30, 40, 41, 3, 4, 50]
    assert writer.temperature in (0.0, 0.6, 1.0)
    after = set()
    for _ in range(20):
        after.add(writer.read(0)[0])
        while writer._forced:
            writer.read(99)
        if writer._is_request:
            writer.read(31), _read(writer, [0, 99])
    assert after == {1, 5}


def test_a_request_that_does_not_end_is_answered() -> None:
    openings = Openings([Opening((1,), is_request=True)], Frame((1,), (3,), (5,)))
    writer = _Writer(openings, frozenset({0}), 1000, Random(0))
    read = _read(writer, [40] * 300)
    assert read.index(3) == 193


def test_without_a_frame_a_text_ends_where_the_model_ends_it() -> None:
    writer = _Writer(Openings([Opening((1, 2))], None), frozenset({0}), 1000, Random(0))
    assert _read(writer, [9, 9, 40, 0, 9, 41]) == [1, 2, 40, 1, 2, 41]


def test_the_frame_of_a_chat_template_is_what_it_renders() -> None:
    engine = sequoia.load(tree="off")
    frame = Frame.of(engine.tokenizer)
    assert frame is not None
    asked = [{"role": "user", "content": "Hi"}]
    rendered = engine.tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert rendered == [*frame.lead, *engine.tokenizer.encode("Hi"), *frame.to_answer]


def test_prompts_without_room_for_an_answer_are_left_out() -> None:
    tokenizer = sequoia.load(tree="off").tokenizer
    short, long = PromptRecord("a", "a", "One two"), PromptRecord("b", "b", "word " * 200)
    kept = Openings.given([short, long], tokenizer, 49152, 128)
    assert {kept.draw(Random(seed)).tokens for seed in range(20)} == {tuple(tokenizer.encode("One two"))}
    with pytest.raises(UsageError, match="no prompt is 64 shorter"):
        Openings.given([long], tokenizer, 49152, 128)
