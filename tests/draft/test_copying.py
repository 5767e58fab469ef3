"""Copies in another draft's distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_heads import DRAFT_VOCAB, FP32, VOCAB, tiny_target

import sequoia
from sequoia.draft.copying import (
    Copies,
    Copy,
    CopyingDraft,
    CopyingReader,
    Support,
    copies_along,
    with_raised,
    without_copies,
)
from sequoia.draft.head_draft import HeadDraft
from sequoia.draft.heads import load_head
from sequoia.draft.model_draft import ModelDraft
from sequoia.errors import FileError, UsageError
from sequoia.measure.random_head import save_random_head
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.measure.toy import ToyModel
from sequoia.params import SamplingParams
from sequoia.planning.pair import draft_name, models_of, require_pair
from sequoia.speculate.session import FeatureReader, Session
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.shape import TreeShape

_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def _after(tokens: Sequence[int], path: Sequence[int] = (), proposable: int = 10) -> Copy | None:
    copies = Copies(proposable)
    copies.read(tokens)
    return copies.after(path)


@settings(max_examples=200, deadline=None)
@given(_TOKENS, st.lists(st.integers(0, 3), max_size=5))
def test_what_followed_the_longest_run_last(tokens: list[int], path: list[int]) -> None:
    """Against a search from the end; 3 is never copied."""
    context, expected = [*tokens, *path], None
    for length in range(1, 9):
        if length > len(context):
            break
        run = context[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == run and tokens[e] < 3]
        if ends:
            expected = tokens[ends[-1]]
    found = _after(tokens, path, proposable=3)
    assert (None if found is None else found.token) == expected


def test_longer_runs_are_trusted_more_from_the_beginning() -> None:
    long, short = _after([1, 2, 3, 4, 5, 1, 2, 3, 4]), _after([4, 5, 1, 4])
    assert long is not None
    assert short is not None
    assert long.token == short.token == 5
    assert 0 < short.rate < long.rate < 1


def test_trust_follows_what_copies_turned_out_to_be() -> None:
    """0 is followed by something new each time, after a token that was not there before."""
    text = [0, 1, 5, 0, 2, 6, 0, 3, 7, 0, 4, 8, 0]
    copies = Copies(10)
    copies.read(text[:2])
    before = copies.after([0])
    for end in range(3, len(text) + 1):
        copies.read(text[:end])
    after = copies.after([])
    assert before is not None
    assert after is not None
    assert after.rate < before.rate
    good = Copies(10)
    for end in range(4, 20):
        good.read(([5, 6] * 10)[:end])
    best = good.after([])
    assert best is not None
    assert best.rate > 0.8


def test_a_prompt_says_nothing_of_how_good_copies_are() -> None:
    wrong = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    first, second = _after(wrong), _after([9, 1, 5, 9, 8, 1])
    assert first is not None
    assert second is not None
    assert first.rate == second.rate


@settings(max_examples=60, deadline=None)
@given(_TOKENS, st.data())
def test_reading_a_text_again_changes_nothing(tokens: list[int], data: st.DataObject) -> None:
    """A round that was interrupted proposes from the same tokens once more."""
    middle = data.draw(st.integers(1, len(tokens)))
    once, twice = Copies(10), Copies(10)
    for copies in (once, twice):
        copies.read(tokens[:middle])
    twice.read(tokens[:middle])
    once.read(tokens)
    twice.read(tokens)
    assert [once.after([token]) for token in range(4)] == [twice.after([token]) for token in range(4)]


def test_a_copy_becomes_as_probable_as_its_rate_and_the_others_keep_their_shares() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]] * 4)
    ids = torch.tensor([3, 5, 7, 9])
    kept = logits.clone()
    raised = with_raised(logits, ids, [Copy(5, 0.9), None, Copy(9, 0.25), Copy(7, 0.1)])
    assert torch.equal(logits, kept)
    probs, before = raised.softmax(-1), logits.softmax(-1)
    assert probs[0, 1].item() == pytest.approx(0.9)
    assert (probs[0, 2] / probs[0, 0]).item() == pytest.approx((before[0, 2] / before[0, 0]).item())
    assert torch.equal(probs[1], before[1])
    assert probs[2, 3].item() == pytest.approx(0.25)
    assert torch.equal(raised[3], logits[3])  # it is more probable already


def test_where_nothing_else_is_possible_a_copy_is_certain() -> None:
    logits = torch.tensor([[-torch.inf, 1.0]])
    assert with_raised(logits, torch.tensor([0, 1]), [Copy(1, 0.3)]).softmax(-1).tolist() == [[0.0, 1.0]]


def test_a_support_holds_what_can_be_copied() -> None:
    own = torch.tensor([2, 5, 8])
    assert Support.of(own, [5]).own is None
    wide = Support.of(own, [3, 5, 9])
    assert wide.ids.tolist() == [2, 3, 5, 8, 9]
    inf = torch.inf
    assert wide.widen(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[1.0, -inf, 2.0, 3.0, -inf]]


def _counting(vocab: int) -> ToyModel:
    """Says 0 1 2 … over and over."""
    table = torch.zeros(vocab, vocab, vocab)
    last = torch.arange(vocab)
    table[:, last, (last + 1) % vocab] = 12.0
    return ToyModel(table)


@pytest.mark.parametrize("tree", [TreeShape.chain(4), TreeShape((-1, 0, 0, 1, 1, 2, 3)), DynamicTree(7, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_repeats_takes_fewer_rounds(tree: Tree, temperature: float) -> None:
    target, useless = _counting(6), ModelDraft(ToyModel.random(6, seed=0), 6)
    rounds = {}
    for name, draft in (("alone", useless), ("copying", CopyingDraft(useless))):
        verifier = VERIFIERS["sampler_match" if isinstance(tree, DynamicTree) else "sequoia"]
        params = SamplingParams(max_tokens=48, temperature=temperature, seed=0)
        session = Session(target, draft.start(), tree, verifier, [0, 1, 2, 3, 4, 5, 0, 1], params)
        count = 0
        while session.finish_reason is None:
            session.step()
            count += 1
        rounds[name] = count
    assert rounds["copying"] < 0.6 * rounds["alone"]


def test_a_head_copies_tokens_outside_its_own_vocabulary(tmp_path: Path) -> None:
    target = tiny_target()
    save_random_head(tmp_path, target, draft_vocab_size=DRAFT_VOCAB, spread=3.0)
    draft = CopyingDraft(load_head(tmp_path, target, FP32))
    proposer = draft.start()
    assert isinstance(proposer, FeatureReader)
    assert isinstance(proposer, CopyingReader)
    assert not isinstance(CopyingDraft(ModelDraft(target, VOCAB)).start(), FeatureReader)
    outside = next(token for token in range(VOCAB) if token not in draft.model.support.tolist())
    params = SamplingParams(max_tokens=40, temperature=0, logit_bias={outside: 100.0})
    session = Session(target, proposer, TreeShape.chain(3), VERIFIERS["sequoia"], [1, 2], params)
    lengths = []
    while session.finish_reason is None:
        lengths.append(len(session.step().token_ids))
    assert session.tokens[2:] == [outside] * 40
    assert max(lengths) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_said_stays_the_targets(tmp_path: Path, temperature: float) -> None:
    """The joint laws of selftest hold for it; here long texts at temperature 0, and that seeds repeat."""
    folder = save_random_head(tmp_path / "clever", tiny_target(), draft_vocab_size=DRAFT_VOCAB, spread=3.0)
    engine = sequoia.load(tiny_llama(VOCAB, 3, device="cpu").model, f"{folder}+ngram", "optimal:12x4")
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=5, ignore_eos=True)
    once, again = (engine.generate([3, 1, 4], params).token_ids for _ in range(2))
    assert once == again
    if temperature == 0:
        assert once == engine.with_tree("off").generate([3, 1, 4], params).token_ids


def test_a_name_that_ends_in_ngram(tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "clever", tiny_target(), draft_vocab_size=DRAFT_VOCAB)
    target = tiny_llama(VOCAB, 3, device="cpu").model
    engine, alone = sequoia.load(target, f"{folder}+ngram"), sequoia.load(target, str(folder))
    assert isinstance(engine.draft, CopyingDraft)
    assert isinstance(engine.draft.own, HeadDraft)
    assert draft_name(engine.draft) == "clever+ngram"
    assert engine.pair == {**alone.pair, "draft": "clever+ngram"}
    assert models_of(engine.target, engine.draft) == [engine.target, engine.draft.model]
    file: Any = type("File", (), {"pair": alone.pair})
    with pytest.raises(FileError, match="tuned for draft clever, not clever\\+ngram"):
        require_pair(file, "plan.json", engine.target, engine.draft)


@pytest.mark.parametrize("draft", ["ngram+ngram", "auto+ngram", "+ngram"])
def test_what_copies_already_is_refused(draft: str) -> None:
    with pytest.raises(UsageError, match="ngram"):
        sequoia.load(tiny_llama(VOCAB, 3, device="cpu").model, draft)


def test_other_drafts_stay_as_they_are() -> None:
    own = ModelDraft(ToyModel.random(6, seed=0), 6)
    for draft in ("ngram", "auto", own, Path("folder"), None):
        assert without_copies(draft) == (draft, False)
    assert without_copies(Path("folder+ngram")) == ("folder", True)


def test_copies_along_a_text_know_it_up_to_each_root() -> None:
    prompt, text = [1, 2, 3], [4, 1, 2, 3, 4]
    found = copies_along(prompt, text, 3, 10)
    assert [len(copies) for copies in found] == [3, 3, 3, 2, 1]
    tokens = [[None if copy is None else copy.token for copy in copies] for copies in found]
    assert tokens == [[None, None, 2], [None, 2, 3], [2, 3, 4], [3, 4], [4]]
