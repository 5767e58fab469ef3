"""A draft walked along a text thinks what it would think in the rounds themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sequoia.draft.copying import CopyingDraft
from sequoia.draft.heads import load_head
from sequoia.draft.model_draft import ModelDraft
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.measure.random_head import save_random_head
from sequoia.measure.rolling import DraftNodes, Reach, draft_nodes
from sequoia.measure.texts import Ask, Text
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.measure.toy import ToyModel
from sequoia.model.causal_lm import CausalLM
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Frontier, LevelLogits
from sequoia.speculate.sampling import Draws

VOCAB = 12
TOY = ToyModel.random(VOCAB, seed=1)
TEXT = Text(Ask((3, 1, 4, 1, 5, 9)), (2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3))
EVERY = Draws.WITHOUT_REPLACEMENT


class Foreign:
    """A draft that nobody knows to be a model."""

    def __init__(self, draft: Any) -> None:
        self.start = draft.start


def _nodes(
    draft: Any, draws: Draws = EVERY, depth: int = 4, ranks: int = 3, text: Text = TEXT, **params: Any
) -> DraftNodes:
    return draft_nodes(TOY, draft, SamplingParams(**params), text, draws, Reach(depth, ranks))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_p": 0.9}, {"repetition_penalty": 1.5}])
def test_a_model_rolled_from_each_start_thinks_what_one_pass_says(settings: dict[str, Any]) -> None:
    """So the independent model has no drift, and the walk's positions, masks and paths are right."""
    model = CausalLM(tiny_llama(VOCAB, 3, device="cpu"))
    draft = ModelDraft(model, VOCAB)
    passed, rolled = _nodes(draft, **settings), _nodes(Foreign(draft), **settings)
    assert not passed.drifts
    assert rolled.drifts
    assert len(passed) == len(TEXT.tokens)
    nodes = set(zip(rolled.starts.tolist(), rolled.depths.tolist(), strict=True))
    if not settings.get("top_p"):
        assert nodes == {(s, d) for s in range(12) for d in range(4) if s + d < 12}
    places = rolled.starts + rolled.depths
    torch.testing.assert_close(rolled.candidates.probs, passed.candidates.probs[places], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rolled.candidates.scores, passed.candidates.scores[places], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rolled", [False, True])
def test_at_the_end_of_its_context_a_draft_proposes_nothing(rolled: bool) -> None:
    draft = ModelDraft(ToyModel(TOY.table, context_length=9), VOCAB)
    nodes = _nodes(Foreign(draft) if rolled else draft)
    # Six prompt tokens: the rows of places 5 to 8 fit, which text tokens 0 to 3 follow from.
    assert sorted(set((nodes.starts + nodes.depths).tolist())) == [0, 1, 2, 3]
    full = Text(Ask((1,) * 10), (2, 3))
    assert len(_nodes(Foreign(draft) if rolled else draft, text=full)) == 0


class _Path:
    """Stands for a growth, as far as the n-gram draft looks at one, that takes this path alone."""

    device = torch.device("cpu")

    def __init__(self, path: Sequence[int]) -> None:
        self.path = list(path)

    def run(self, root: int, support: Tensor, level_logits: LevelLogits) -> None:
        nothing: Any = None
        self.support = support
        frontier = Frontier(len(self.path), torch.tensor([0]), lambda: [self.path], nothing, torch.tensor([0]))
        self.logits = level_logits(frontier)[0]


def test_an_ngram_node_knows_the_text_up_to_its_root_only() -> None:
    draft = NgramDraft(VOCAB)
    nodes = _nodes(draft, depth=3)
    assert len(nodes) > 12
    for start, depth, scores in zip(nodes.starts.tolist(), nodes.depths.tolist(), nodes.candidates.scores, strict=True):
        growth: Any = _Path(TEXT.tokens[start : start + depth])
        draft.start().propose([*TEXT.ask.prompt, *TEXT.tokens[:start]], growth)
        columns = torch.searchsorted(nodes.candidates.tokens, growth.support)
        torch.testing.assert_close(scores[columns], growth.logits)
        assert int((scores > -torch.inf).sum()) == len(growth.support)


def test_a_walk_ends_where_no_round_passes() -> None:
    """2 was never seen before the first start, so nothing is asked behind it."""
    nodes = _nodes(NgramDraft(VOCAB), depth=5)
    reached = {start: int(nodes.depths[nodes.starts == start].max()) for start in range(12)}
    assert reached[0] == 0
    seen = set(TEXT.ask.prompt)
    for start in range(12):
        ahead = TEXT.tokens[start : start + 5]
        known = next((i for i, token in enumerate(ahead) if token not in seen), len(ahead) - 1)
        assert reached[start] == known
        seen.add(TEXT.tokens[start])


def test_with_likeliest_children_a_walk_ends_behind_a_token_of_too_high_a_rank() -> None:
    draft = Foreign(ModelDraft(TOY, VOCAB))
    nodes = _nodes(draft, Draws.TOP_K, depth=6, ranks=2, temperature=0.0)
    for start in range(12):
        own = nodes.starts == start
        *inner, last = nodes.candidates.scores[own]
        ranks = [
            int((scores > scores[TEXT.tokens[start + depth]]).sum()) for depth, scores in enumerate([*inner, last])
        ]
        assert all(rank < 2 for rank in ranks[:-1])
        assert ranks[-1] >= 2 or len(ranks) == min(6, 12 - start)


@pytest.mark.parametrize("draws", [EVERY, Draws.TOP_K])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_p": 0.9}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("prompt", [TEXT.ask.prompt, (3,)])
def test_a_head_rolled_from_all_starts_at_once_thinks_what_its_rounds_think(
    tmp_path: Path, draws: Draws, settings: dict[str, Any], prompt: tuple[int, ...]
) -> None:
    """Foreign to the walk it is rolled by its own proposer, start by start; it proposes nothing in the first round."""
    target, text = CausalLM(tiny_llama(VOCAB, 3, device="cpu")), Text(Ask(prompt), TEXT.tokens)
    save_random_head(tmp_path, target, draft_vocab_size=9, spread=2.0)
    draft = load_head(tmp_path, target, "fp32")
    params, reach = SamplingParams(**settings), Reach(4, 3)
    rolled = draft_nodes(target, Foreign(draft), params, text, draws, reach)
    at_once = draft_nodes(target, draft, params, text, draws, reach)
    assert rolled.drifts
    assert at_once.drifts
    places = [list(zip(found.starts.tolist(), found.depths.tolist(), strict=True)) for found in (rolled, at_once)]
    assert sorted(places[0]) == sorted(places[1])
    assert {start for start, _ in places[0]} == set(range(1, 12))
    assert max(depth for _, depth in places[0]) > 0
    assert rolled.candidates.tokens.tolist() == at_once.candidates.tokens.tolist()
    order = [places[1].index(place) for place in places[0]]
    torch.testing.assert_close(rolled.candidates.scores, at_once.candidates.scores[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rolled.candidates.probs, at_once.candidates.probs[order], rtol=1e-4, atol=1e-5)
    assert len(draft_nodes(target, draft, params, Text(Ask(prompt), (2,)), draws, reach)) == 0


_REPEATING = Text(Ask((3, 1, 4, 1, 5, 9)), (3, 1, 4, 1, 5, 10, 3, 1, 4, 11, 1, 5, 10, 3))


@pytest.mark.parametrize("draws", [EVERY, Draws.TOP_K])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5}])
def test_a_head_that_copies_thinks_what_its_rounds_think(
    tmp_path: Path, draws: Draws, settings: dict[str, Any]
) -> None:
    target = CausalLM(tiny_llama(VOCAB, 3, device="cpu"))
    save_random_head(tmp_path, target, draft_vocab_size=9, spread=2.0)
    alone = load_head(tmp_path, target, "fp32")
    draft, params, reach = CopyingDraft(alone), SamplingParams(**settings), Reach(4, 3)
    rolled = draft_nodes(target, Foreign(draft), params, _REPEATING, draws, reach)
    at_once = draft_nodes(target, draft, params, _REPEATING, draws, reach)
    places = [list(zip(found.starts.tolist(), found.depths.tolist(), strict=True)) for found in (rolled, at_once)]
    assert sorted(places[0]) == sorted(places[1])
    assert max(depth for _, depth in places[0]) == 3
    order = [places[1].index(place) for place in places[0]]
    columns = torch.searchsorted(rolled.candidates.tokens, at_once.candidates.tokens)
    assert torch.equal(rolled.candidates.tokens[columns], at_once.candidates.tokens)
    scores = at_once.candidates.scores[order]
    torch.testing.assert_close(rolled.candidates.scores[:, columns], scores, rtol=1e-4, atol=1e-4)
    probs = at_once.candidates.probs[order]
    torch.testing.assert_close(rolled.candidates.probs[:, columns], probs, rtol=1e-4, atol=1e-5)
    plain = draft_nodes(target, alone, params, _REPEATING, draws, reach)
    assert len(at_once) > len(plain) or draws is EVERY
    assert set(plain.candidates.tokens.tolist()) < set(at_once.candidates.tokens.tolist())


def test_a_model_that_copies_is_judged_in_one_pass() -> None:
    draft = CopyingDraft(ModelDraft(TOY, VOCAB))
    nodes, plain = _nodes(draft, text=_REPEATING), _nodes(draft.own, text=_REPEATING)
    assert not nodes.drifts
    assert len(nodes) == len(plain) == len(_REPEATING.tokens)
    raised = (nodes.candidates.probs > plain.candidates.probs + 1e-3).nonzero().tolist()
    assert [4, 5] in raised  # 5 came after 3 1 4 1 in the prompt
    assert all(row >= 1 for row, _ in raised)
