"""The n-gram draft as a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sequoia.draft.ngram_draft import NgramDraft, NgramProposer
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Draws
from sequoia.speculate.token_tree import TokenTree
from sequoia.tree.shape import TreeShape

_VOCAB = 10


def _grow(
    proposer: NgramProposer, tokens: Sequence[int], shape: TreeShape, draws: Draws = Draws.WITHOUT_REPLACEMENT
) -> TokenTree:
    processors = Processors(SamplingParams(), tokens, _VOCAB)
    generator = torch.Generator().manual_seed(0)
    growth = Growth(shape, processors, draws, proposer.proposable, generator, torch.device("cpu"))
    return proposer.propose(tokens, growth)


def _law(tokens: Sequence[int], draft: NgramDraft | None = None) -> Tensor:
    """[vocab] distribution of the next token."""
    return _grow((draft or NgramDraft(_VOCAB)).start(), tokens, TreeShape.chain(1)).draft_probs([0], _VOCAB)[0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, _VOCAB - 1), min_size=1, max_size=40), st.integers(1, _VOCAB), st.integers(1, 6))
def test_a_distribution_over_the_tokens_seen(tokens: list[int], proposable: int, longest: int) -> None:
    law = _law(tokens, NgramDraft(proposable, longest))
    assert law.sum().item() == pytest.approx(1, abs=1e-5)
    assert (law[proposable:] == 0).all()
    seen = [token for token in set(tokens) if token < proposable]
    if seen:
        assert set(law.nonzero()[:, 0].tolist()) == set(seen)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, _VOCAB - 1), min_size=2, max_size=30), st.data())
def test_the_same_whether_counted_at_once_or_round_by_round(tokens: list[int], data: st.DataObject) -> None:
    proposer = NgramDraft(_VOCAB).start()
    for end in sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1)))):
        tree = _grow(proposer, tokens[:end], TreeShape.kary(2, 2))
        proposer.keep((1,))
        assert len(tree.tokens) == 7
    found = _grow(proposer, tokens, TreeShape.chain(1)).draft_probs([0], _VOCAB)[0]
    torch.testing.assert_close(found, _law(tokens))


def test_guesses_are_never_counted() -> None:
    """Fault 17: only what became text changes the counts, however many trees were drawn."""
    tokens, proposer = [1, 2, 3, 1, 2], NgramDraft(_VOCAB).start()
    first = _grow(proposer, tokens, TreeShape.chain(1)).draft_probs([0], _VOCAB)
    for _ in range(5):
        _grow(proposer, tokens, TreeShape.beam(3, 4))
        proposer.keep(())
    again = _grow(proposer, tokens, TreeShape.chain(1)).draft_probs([0], _VOCAB)
    assert torch.equal(first, again)


def test_the_longest_suffix_counts_most() -> None:
    # After 2 comes 9 three times, but after "1 2" it was 3.
    law = _law([2, 9, 2, 9, 2, 9, 1, 2, 3, 5, 1, 2])
    assert law.argmax().item() == 3
    assert law[9] > law[5]


def test_interpolated_counts_in_numbers() -> None:
    """a b a c a: order 1 has b and c once each after a, so half goes to them; the rest to a 3/5, b 1/5, c 1/5."""
    law = _law([0, 1, 0, 2, 0], NgramDraft(_VOCAB, longest_suffix=1))
    assert law[:3].tolist() == pytest.approx([0.3, 0.25 + 0.1, 0.25 + 0.1])


def test_longer_suffixes_than_asked_for_are_not_read() -> None:
    tokens = [1, 2, 3, 4, 2, 9, 2, 9, 1, 2]
    assert _law(tokens, NgramDraft(_VOCAB, longest_suffix=1)).argmax().item() == 9
    assert _law(tokens, NgramDraft(_VOCAB, longest_suffix=2)).argmax().item() == 3


def test_a_context_of_one_token() -> None:
    law = _law([4])
    assert law.tolist() == [float(token == 4) for token in range(_VOCAB)]
    tree = _grow(NgramDraft(_VOCAB).start(), [4], TreeShape([-1] + [0] * _VOCAB))
    assert sorted(tree.tokens[1:].tolist()) == list(range(_VOCAB))


def test_a_context_without_a_token_that_may_be_proposed() -> None:
    tree = _grow(NgramDraft(5).start(), [7, 8, 9], TreeShape.kary(3, 2))
    assert int(tree.tokens[1:].max()) < 5
    assert tree.draft_probs([0], _VOCAB).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("draws", Draws)
def test_padded_ids_are_never_proposed(draws: Draws) -> None:
    """Fault 18: not even where the text is full of them."""
    tree = _grow(NgramDraft(4).start(), [9, 9, 1, 9, 9, 2, 9, 9], TreeShape.kary(4, 3), draws)
    assert int(tree.tokens[1:].max()) < 4


def test_nodes_are_read_with_their_own_path() -> None:
    """Fault 9: what follows a child is what followed it in the text."""
    tree = _grow(NgramDraft(_VOCAB).start(), [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1], TreeShape.chain(4), Draws.TOP_K)
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5]
    assert tree.draft_probs([0, 1, 2, 3], _VOCAB).argmax(-1).tolist() == [2, 3, 4, 5]


def test_requests_share_nothing() -> None:
    draft = NgramDraft(_VOCAB)
    _grow(draft.start(), [1, 2, 3], TreeShape.chain(1))
    assert _law([4], draft)[4] == 1
