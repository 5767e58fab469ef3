"""A model as draft: what it runs, what it proposes, what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sequoia.draft.model_draft import ModelDraft, ModelProposer
from sequoia.measure.toy import ToyModel
from sequoia.model.language_model import Block
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Draws
from sequoia.speculate.token_tree import TokenTree
from sequoia.tree.shape import TreeShape

_VOCAB = 9
_TEXT = [3, 1, 4, 1, 5]
_BUSHY = TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11))  # not in level order


class _Counted(ToyModel):
    """Notes how many rows each forward had."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.rows: list[int] = []

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        self.rows.append(len(tokens))
        return super().forward(tokens, cache, block, last)


@pytest.fixture
def model() -> _Counted:
    return _Counted(ToyModel.random(_VOCAB, seed=3).table)


def _grow(
    proposer: ModelProposer,
    tokens: Sequence[int],
    shape: TreeShape,
    draws: Draws = Draws.WITHOUT_REPLACEMENT,
    **params: Any,
) -> TokenTree:
    processors = Processors(SamplingParams(**params), tokens, _VOCAB)
    generator = torch.Generator().manual_seed(0)
    growth = Growth(shape, processors, draws, proposer.proposable, generator, torch.device("cpu"))
    return proposer.propose(tokens, growth)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_each_nodes_distribution_is_the_models_after_its_path(model: _Counted, temperature: float) -> None:
    tree = _grow(ModelDraft(model, _VOCAB).start(), _TEXT, _BUSHY, temperature=temperature)
    inner = [node for node in range(_BUSHY.size) if _BUSHY.children(node)]
    found = tree.draft_probs(inner, _VOCAB)
    for node, probs in zip(inner, found, strict=True):
        path = [int(tree.tokens[step]) for step in _BUSHY.paths[node]]
        expected = (model.logits_after([*_TEXT, *path]) / temperature).softmax(-1).double()
        torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)


def test_one_pass_for_each_level_that_has_children(model: _Counted) -> None:
    """Leaves are never passed through the draft."""
    proposer = ModelDraft(model, _VOCAB).start()
    _grow(proposer, _TEXT, _BUSHY)
    assert model.rows == [len(_TEXT), 3, 2, 1]
    assert proposer.cache.length == len(_TEXT) + 6


@pytest.mark.parametrize("node", range(_BUSHY.size))
def test_after_a_round_it_holds_the_accepted_tokens_it_has_passed(model: _Counted, node: int) -> None:
    """Fault 17: a leaf was not passed and is caught up on together with the next token."""
    proposer = ModelDraft(model, _VOCAB).start()
    tree = _grow(proposer, _TEXT, _BUSHY)
    path = _BUSHY.paths[node]
    proposer.keep(path)
    text = [*_TEXT, *(int(tree.tokens[step]) for step in path)]
    passed = len(text) - (node != 0 and not _BUSHY.children(node))
    assert proposer.cache.tokens == text[:passed]  # type: ignore[attr-defined]

    model.rows.clear()
    _grow(proposer, [*text, 7], TreeShape.chain(2))
    assert model.rows == [len(text) + 1 - passed, 1]


def test_rounds_without_a_tree_are_caught_up_on(model: _Counted) -> None:
    proposer = ModelDraft(model, _VOCAB).start()
    _grow(proposer, _TEXT, _BUSHY)
    proposer.keep(())
    model.rows.clear()
    longer = [*_TEXT, 2, 6, 5]
    tree = _grow(proposer, longer, TreeShape.chain(1))
    assert model.rows == [3]
    torch.testing.assert_close(tree.draft_probs([0], _VOCAB)[0], model.logits_after(longer).softmax(-1).double())


@pytest.mark.parametrize("length", [511, 512, 513, 1025])
def test_long_prompts_are_passed_in_pieces(model: _Counted, length: int) -> None:
    text = [index * 7 % _VOCAB for index in range(length)]
    tree = _grow(ModelDraft(model, _VOCAB).start(), text, TreeShape.chain(1))
    assert sum(model.rows) == length
    assert max(model.rows) <= 512
    torch.testing.assert_close(tree.draft_probs([0], _VOCAB)[0], model.logits_after(text).softmax(-1).double())


@pytest.mark.parametrize("draws", Draws)
@pytest.mark.parametrize("proposable", [4, _VOCAB])
def test_ids_past_the_shared_ones_are_never_proposed(model: _Counted, draws: Draws, proposable: int) -> None:
    """Fault 18."""
    model.table[..., 4:] += 9
    tree = _grow(ModelDraft(model, proposable).start(), [1, 2, 3], TreeShape.kary(4, 2), draws)
    if proposable == 4:
        assert int(tree.tokens[1:].max()) < 4
        assert (tree.draft_probs([0], _VOCAB)[:, 4:] == 0).all()
    assert tree.draft_probs([0], _VOCAB).sum().item() == pytest.approx(1)


def test_requests_share_nothing(model: _Counted) -> None:
    draft = ModelDraft(model, _VOCAB)
    one, other = draft.start(), draft.start()
    _grow(one, _TEXT, _BUSHY)
    assert other.cache.length == 0
