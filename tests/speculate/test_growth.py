"""Dynamic trees grown from a draft: which nodes they have, and what the draft's cache keeps of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sequoia.draft.model_draft import ModelDraft, ModelProposer
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.engine import load
from sequoia.errors import UsageError
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.measure.toy import ToyModel
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Draws
from sequoia.speculate.session import Session
from sequoia.speculate.token_tree import TokenTree
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.dynamic import DynamicTree

_VOCAB = 6
_TEXT = [2, 4, 1, 3, 4]
_MODEL = ToyModel.random(_VOCAB, seed=3)


def _grow(proposer: Any, rule: DynamicTree, tokens: Sequence[int] = _TEXT, **params: Any) -> TokenTree:
    processors = Processors(SamplingParams(**params), tokens, _VOCAB)
    generator = torch.Generator().manual_seed(0)
    growth = Growth(rule, processors, Draws.TOP_K, proposer.proposable, generator, torch.device("cpu"))
    return proposer.propose(tokens, growth)


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(path) for path in tree.layout.paths(range(1, tree.shape.size), tree.tokens)]


def _best(rule: DynamicTree, weights: Any, proposable: int = _VOCAB) -> set[tuple[int, ...]]:
    """The most probable paths by listing all, `weights(tokens)` being the law of the next token."""
    scores = {}
    for depth in range(1, rule.depth + 1):
        for path in itertools.product(range(proposable), repeat=depth):
            scores[path] = math.prod(weights([*_TEXT, *path[:end]])[path[end]].item() for end in range(depth))
    best = sorted(scores, key=lambda path: -scores[path])[: rule.size - 1]
    return {path for path in best if scores[path] > 0}


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.3])
@pytest.mark.parametrize(("size", "depth"), [(2, 3), (12, 3), (30, 2)])
def test_the_nodes_are_the_most_probable_of_all(size: int, depth: int, temperature: float) -> None:
    """At temperature 0, where the law is one token, by how sure the draft is of each."""
    rule = DynamicTree(size, depth, width=size)
    tree = _grow(ModelDraft(_MODEL, _VOCAB).start(), rule, temperature=temperature)
    expected = _best(rule, lambda tokens: (_MODEL.logits_after(tokens) / (temperature or 1.0)).softmax(-1))
    assert set(_paths(tree)) == expected
    assert len(_paths(tree)) == size - 1


def test_every_processor_has_its_say_with_each_nodes_own_prefix() -> None:
    params = SamplingParams(temperature=0.8, repetition_penalty=1.7, frequency_penalty=0.9, top_k=4)
    rule = DynamicTree(15, 3, width=15)

    def weights(tokens: list[int]) -> torch.Tensor:
        processors = Processors(params, _TEXT, _VOCAB)
        scores = processors.scores(_MODEL.logits_after(tokens)[None], [tokens[len(_TEXT) :]])
        return processors.probs(scores)[0]

    tree = _grow(
        ModelDraft(_MODEL, _VOCAB).start(),
        rule,
        temperature=0.8,
        repetition_penalty=1.7,
        frequency_penalty=0.9,
        top_k=4,
    )
    assert set(_paths(tree)) == _best(rule, weights)


def test_nodes_without_draft_probability_are_left_out() -> None:
    tree = _grow(ModelDraft(_MODEL, _VOCAB).start(), DynamicTree(40, 1), top_k=2)
    assert tree.shape.size == 3


def test_padding_is_never_proposed() -> None:
    tree = _grow(ModelDraft(_MODEL, _VOCAB - 2).start(), DynamicTree(60, 2, width=60))
    assert max(max(path) for path in _paths(tree)) < _VOCAB - 2
    assert tree.shape.size == 1 + 4 + 16


def test_n_grams_grow_one_too() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    tree = _grow(NgramDraft(_VOCAB).start(), DynamicTree(6, 3), tokens)
    assert (3,) in _paths(tree)
    assert (3, 1) in _paths(tree)
    assert set(itertools.chain(*_paths(tree))) <= set(tokens)


@pytest.mark.parametrize("node", range(12))
def test_the_drafts_cache_keeps_what_was_accepted_of_what_it_has_passed(node: int) -> None:
    """A node that was continued stays, even where nothing below it made it into the tree."""
    proposer: ModelProposer = ModelDraft(_MODEL, _VOCAB).start()
    tree = _grow(proposer, DynamicTree(12, 3, width=3))
    path = tree.shape.paths[node]
    proposer.keep(path)
    accepted = tree.tokens[list(path)].tolist()
    passed = [token for step, token in zip(path, accepted, strict=True) if step in tree.row]
    assert proposer.cache.tokens == [*_TEXT, *passed]  # type: ignore[attr-defined]


def test_each_expanded_nodes_law_is_the_models_after_its_path() -> None:
    tree = _grow(ModelDraft(_MODEL, _VOCAB).start(), DynamicTree(20, 3, width=4))
    inner = [node for node in range(tree.shape.size) if tree.shape.children(node)]
    assert len(inner) > 5
    for node, probs in zip(inner, tree.draft_probs(inner, _VOCAB), strict=True):
        path = [int(tree.tokens[step]) for step in tree.shape.paths[node]]
        torch.testing.assert_close(probs, _MODEL.logits_after([*_TEXT, *path]).softmax(-1).double())
    leaf = tree.shape.size - 1
    assert not tree.draft_probs([leaf], _VOCAB).any()


@pytest.mark.parametrize("verifier", sorted(set(VERIFIERS) - {"sampler_match"}))
def test_verifiers_that_need_draws_are_refused(verifier: str) -> None:
    proposer = ModelDraft(_MODEL, _VOCAB).start()
    with pytest.raises(UsageError, match="Use sampler_match"):
        Session(_MODEL, proposer, DynamicTree(8, 2), VERIFIERS[verifier], _TEXT, SamplingParams())
    with pytest.raises(UsageError, match="Use sampler_match"):
        load(tree="dynamic:8x2", verifier=verifier)


def test_an_engine_takes_the_verifier_that_fits() -> None:
    engine = load(tiny_llama(32, seed=1, device="cpu").model, tree="dynamic:8x2")
    assert engine.verifier.name == "sampler_match"
    other = engine.with_tree("chain:3")
    assert other.verifier.name == "sequoia"
    assert other.target is engine.target
    assert other.draft is engine.draft


def test_greedy_text_of_a_transformers_model_is_that_of_plain_decoding() -> None:
    engine = load(tiny_llama(32, seed=1, device="cpu").model, tiny_llama(32, 1, blur=0.3, device="cpu").model, "off")
    params = SamplingParams(max_tokens=40, temperature=0)
    dynamic = engine.with_tree("dynamic:24x5").generate([5, 3, 8], params)
    assert dynamic.token_ids == engine.generate([5, 3, 8], params).token_ids
    assert dynamic.stats.mean_accepted_length > 1.5
