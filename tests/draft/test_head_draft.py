"""A head as draft: what it computes, what it keeps, and that what it says leaves the target's text alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_heads import FP32, VOCAB, PlainHead, tiny_head, tiny_target, true_features

from sequoia.draft.head_draft import HeadDraft, HeadProposer
from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.fused import PLAIN
from sequoia.model.placement import Numbers
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Draws
from sequoia.speculate.session import Session
from sequoia.speculate.token_tree import TokenTree
from sequoia.speculate.verify import VERIFIERS, Verdict
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.shape import TreeShape

_TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
_BUSHY = TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11))  # not in level order
_TREES = {"bushy": _BUSHY, "chain": TreeShape.chain(4), "dynamic": DynamicTree(9, 4)}


@pytest.fixture(params=["lean", "modules"])
def target(request: pytest.FixtureRequest) -> CausalLM:
    return tiny_target(lean=request.param == "lean")


@pytest.fixture
def draft(tmp_path: Path, target: CausalLM) -> HeadDraft:
    return tiny_head(tmp_path, target)


def _reading(draft: HeadDraft, target: CausalLM, tokens: Sequence[int]) -> HeadProposer:
    """A proposer whose target has read the tokens."""
    proposer = draft.start()
    cache = target.new_cache(proposer.taps)
    target.forward(torch.tensor(tokens), cache)
    proposer.follow(cache)  # type: ignore[arg-type]
    return proposer


def _grow(proposer: HeadProposer, tokens: Sequence[int], tree: Tree) -> TokenTree:
    params = SamplingParams(temperature=1.0)
    draws = Draws.TOP_K if isinstance(tree, DynamicTree) else Draws.WITHOUT_REPLACEMENT
    generator = torch.Generator().manual_seed(0)
    growth = Growth(tree, Processors(params, tokens, VOCAB), draws, proposer.proposable, generator, torch.device("cpu"))
    return proposer.propose(tokens, growth)


@pytest.mark.parametrize("tree", _TREES.values(), ids=_TREES)
def test_each_nodes_distribution_is_that_of_a_plain_computation(
    tmp_path: Path, draft: HeadDraft, target: CausalLM, tree: Tree
) -> None:
    """Of logits along the node's path, on the target's true features and from there on the head's own outputs."""
    grown = _grow(_reading(draft, target, _TEXT[:-1]), _TEXT, tree)
    plain, features = PlainHead(tmp_path, target), true_features(target, _TEXT[:-1], draft.model.taps)
    shape, ids = grown.shape, draft.model.support
    inner = [node for node in range(shape.size) if shape.children(node)]
    assert len(inner) > 3
    for node, probs in zip(inner, grown.draft_probs(inner, VOCAB), strict=True):
        path = [int(grown.tokens[step]) for step in shape.paths[node]]
        expected = plain.logits(features, [*_TEXT, *path], guesses=len(path)).softmax(-1)
        torch.testing.assert_close(probs[ids], expected, rtol=1e-4, atol=1e-6)
        assert probs.sum().item() == pytest.approx(1)


def test_logits_of_a_step_equal_a_plain_computation(tmp_path: Path, draft: HeadDraft, target: CausalLM) -> None:
    features = true_features(target, _TEXT, draft.model.taps)
    model, cache = draft.model, draft.model.new_cache()
    outputs = model.forward(model.fused(features[:-1]), torch.tensor(_TEXT[1:]), cache)
    plain = PlainHead(tmp_path, target)
    for end in range(2, len(_TEXT) + 1):
        expected = plain.logits(features[: end - 1], _TEXT[:end]).float()
        torch.testing.assert_close(model.logits(outputs)[end - 2], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tree", _TREES.values(), ids=_TREES)
@pytest.mark.parametrize("forced", [0, 1, 2, 5])
def test_after_every_round_the_cache_is_that_of_the_text_and_its_true_features(
    draft: HeadDraft, target: CausalLM, tree: Tree, forced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults 14 and 17, over rounds that accept as many nodes as there are on some path, up to `forced`."""

    def deepest(tokens: TokenTree, *args: object) -> Verdict:
        path = max(tokens.shape.paths, key=lambda nodes: (len(nodes), nodes[-1:] > (3,)))[:forced]
        return Verdict(tuple(path), 7)

    monkeypatch.setattr("sequoia.speculate.session.verify", deepest)
    proposer = draft.start()
    verifier = VERIFIERS["sampler_match" if isinstance(tree, DynamicTree) else "sequoia"]
    session = Session(target, proposer, tree, verifier, _TEXT, SamplingParams(max_tokens=25, ignore_eos=True))
    rounds = 0
    while session.finish_reason is None:
        before = len(session.tokens)
        grown = session.step().tree
        rounds += 1
        held = session.tokens[:-1]
        features = true_features(target, held, proposer.taps)
        kept = session.cache.features.read(0, len(held))  # type: ignore[attr-defined]
        torch.testing.assert_close(kept, features, rtol=1e-4, atol=1e-4)
        if grown.shape.size == 1:
            assert rounds == 1 or session.finish_reason is not None
            continue
        assert proposer.cache.length == before - 1
        again = draft.model.new_cache()
        following = torch.tensor(session.tokens[1:before])
        draft.model.forward(draft.model.fused(features[: before - 1]), following, again)
        for found, expected in zip(proposer.cache._slots.unbind(), again._slots.unbind(), strict=True):
            length = before - 1
            torch.testing.assert_close(found[..., :length, :], expected[..., :length, :], rtol=1e-4, atol=1e-4)
    assert rounds > 3


@pytest.mark.parametrize("tree", _TREES.values(), ids=_TREES)
@pytest.mark.parametrize("numbers", [FP32, Numbers(torch.bfloat16), Numbers(torch.bfloat16, bits=8)])
def test_greedy_output_is_the_targets(tmp_path: Path, target: CausalLM, tree: Tree, numbers: Numbers) -> None:
    draft, params = tiny_head(tmp_path, target, numbers), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    outputs = []
    for shape in (tree, TreeShape.root_only()):
        session = Session(target, draft.start(), shape, VERIFIERS["sampler_match"], _TEXT, params)
        rounds = 0
        while session.finish_reason is None:
            session.step()
            rounds += 1
        outputs.append(session.tokens)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("numbers", [Numbers(torch.bfloat16), Numbers(torch.bfloat16, bits=8)])
def test_short_numbers_are_near(tmp_path: Path, target: CausalLM, numbers: Numbers) -> None:
    features = true_features(target, _TEXT, (1, 1, 2))
    found = []
    for kind in (FP32, numbers):
        model = tiny_head(tmp_path, target, kind).model
        outputs = model.forward(model.fused(features[:-1]), torch.tensor(_TEXT[1:]), model.new_cache())
        found.append(model.logits(outputs).float())
    distance = (found[0] - found[1]).square().mean().sqrt() / found[0].std()
    assert 0 < distance < 0.05


def test_nothing_is_proposed_before_the_target_has_read(draft: HeadDraft, target: CausalLM) -> None:
    for proposer, text in ((draft.start(), _TEXT), (_reading(draft, target, _TEXT[:-2]), _TEXT)):
        assert _grow(proposer, text, _BUSHY).shape.size == 1
    one = _reading(draft, target, [3])
    assert _grow(one, [3], _BUSHY).shape.size == 1
    assert _grow(one, [3, 1], _BUSHY).shape.size == _BUSHY.size


def test_a_round_that_was_interrupted_leaves_no_trace(draft: HeadDraft, target: CausalLM) -> None:
    proposer = _reading(draft, target, _TEXT[:-1])
    first = _grow(proposer, _TEXT, _BUSHY)
    again = _grow(proposer, _TEXT, _BUSHY)
    torch.testing.assert_close(again.support_probs, first.support_probs)
    assert again.tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize("length", [511, 512, 513, 1025])
def test_long_prompts_are_passed_in_pieces(tmp_path: Path, length: int) -> None:
    target = tiny_target()
    draft = tiny_head(tmp_path, target)
    text = [index * 7 % VOCAB for index in range(length + 1)]
    tree = _grow(_reading(draft, target, text[:-1]), text, TreeShape.chain(2))
    model = draft.model
    features = true_features(target, text[:-1], model.taps)
    outputs = model.forward(model.fused(features), torch.tensor(text[1:]), model.new_cache())
    expected = model.logits(outputs[-1:]).softmax(-1)
    torch.testing.assert_close(tree.support_probs[:1], expected, rtol=1e-4, atol=1e-5)


def test_rounds_without_a_tree_are_caught_up_on(draft: HeadDraft, target: CausalLM) -> None:
    proposer = draft.start()
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    session = Session(target, proposer, TreeShape.root_only(), VERIFIERS["sequoia"], _TEXT, params)
    for _ in range(5):
        session.step()
    session.tree = _BUSHY
    text = list(session.tokens)
    tree = session.step().tree
    expected = _grow(_reading(draft, target, text[:-1]), text, TreeShape.chain(1))
    torch.testing.assert_close(tree.support_probs[:1], expected.support_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not any(shutil.which(name) for name in ("g++", "clang++")), reason="no C++ compiler here")
@pytest.mark.parametrize("numbers", [FP32, Numbers(torch.bfloat16, bits=8)])
def test_compiled_passes_are_the_same(tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    target, told = tiny_target(), list[str]()
    model = tiny_head(tmp_path, target, numbers).model
    text = [*_TEXT, *range(20)]
    features = true_features(target, text, model.taps)

    def logits() -> torch.Tensor:
        cache, found = model.new_cache(), list[torch.Tensor]()
        for start, end in ((0, 1), (1, 3), (3, 19), (19, 27)):
            rows = model.fused(features[start:end])
            found.append(model.logits(model.forward(rows, torch.tensor(text[start + 1 : end + 1]), cache)))
        return torch.cat(found)

    expected = logits()
    model.compile(tmp_path, told.append)
    model.wait_until_compiled()
    assert told == []
    assert model.kernels is not PLAIN
    error = (logits() - expected).square().mean().sqrt() / expected.std()
    assert float(error) < (0.02 if numbers.bits else 1e-5)


def test_requests_share_nothing(draft: HeadDraft, target: CausalLM) -> None:
    one, other = _reading(draft, target, _TEXT[:-1]), draft.start()
    _grow(one, _TEXT, _BUSHY)
    assert other.cache.length == 0
