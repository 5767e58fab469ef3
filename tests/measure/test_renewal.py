"""Rounds along texts, against closed forms and against rounds that are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from sequoia.measure.renewal import TextRates, Texts
from sequoia.tree.expected import expected_tokens
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

SHAPES = {
    "root": TreeShape.root_only(),
    "chain": TreeShape.chain(3),
    "kary": TreeShape.kary(2, 3),
    "bushy": TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11)),
}


def _text(rates: np.ndarray, prompt: int = 0) -> TextRates:
    return TextRates(rates.astype(np.float32), rates.astype(np.float32), prompt)


def _random_texts(seed: int, lengths: tuple[int, ...] = (9, 14), depths: int = 4, ranks: int = 3) -> list[TextRates]:
    random = np.random.default_rng(seed)
    return [
        _text(random.dirichlet([1] * (ranks + 1), (length, depths))[..., :ranks], index)
        for index, length in enumerate(lengths)
    ]


def _drawn(text: TextRates, shape: TreeShape, random: np.random.Generator) -> tuple[int, np.ndarray, np.ndarray]:
    """One request: its rounds, visits by depth, accepted by depth and rank."""
    root, rounds = 0, 0
    visits, accepted = np.zeros(max(1, shape.depth)), np.zeros((max(1, shape.depth), max(1, shape.max_children)))
    while root < len(text.rates):
        rounds, node, depth = rounds + 1, 0, 0
        while shape.children(node) and root + depth < len(text.rates):
            children = shape.children(node)
            visits[depth] += 1
            chances = [*text.rates[root, depth, : len(children)].astype(float)]
            rank = random.choice(len(children) + 1, p=[*chances, 1 - sum(chances)])
            if rank == len(children):
                break
            accepted[depth, rank] += 1
            node, depth = children[rank], depth + 1
        root += depth + 1
    return rounds, visits, accepted


@pytest.mark.parametrize("name", SHAPES)
def test_expected_rounds_visits_and_acceptances_are_those_of_drawn_rounds(name: str) -> None:
    texts, random, count = _random_texts(1), np.random.default_rng(2), 3000
    found = Texts(texts).rounds(SHAPES[name])
    for index, text in enumerate(texts):
        drawn = [_drawn(text, SHAPES[name], random) for _ in range(count)]
        for expected, values in (
            (found.counts[index], [rounds for rounds, _, _ in drawn]),
            (found.visits[index], [visits for _, visits, _ in drawn]),
            (found.accepted[index], [accepted for _, _, accepted in drawn]),
        ):
            sampled = np.array(values, dtype=float)
            error = sampled.std(0) / count**0.5
            assert (np.abs(sampled.mean(0) - expected) <= 4.5 * error + 1e-6).all()


def test_rates_of_0_and_1_are_certain() -> None:
    never, always = np.zeros((10, 3, 2)), np.zeros((10, 3, 2))
    always[..., 0] = 1
    texts = Texts([_text(never), _text(always)])
    assert texts.rounds(TreeShape.root_only()).counts.tolist() == [10, 10]
    assert texts.rounds(TreeShape.chain(1)).counts.tolist() == [10, 5]
    assert texts.rounds(TreeShape.chain(3)).counts.tolist() == [10, 3]  # 4 + 4 + 2
    np.testing.assert_array_equal(np.flatnonzero(texts.rounds(TreeShape.chain(3)).roots[1]), [0, 4, 8])


def test_equal_rates_everywhere_give_the_profiles_expected_tokens() -> None:
    """A long text: its end does not count."""
    row = [0.5, 0.2, 0.1]
    rates = np.tile(row, (4000, 4, 1))
    for shape in SHAPES.values():
        rounds = Texts([_text(rates)]).rounds(shape).counts[0]
        assert 4000 / rounds == pytest.approx(expected_tokens(shape, AcceptanceProfile([row])), rel=2e-3)


def test_ranks_that_were_not_measured_are_never_accepted() -> None:
    texts = Texts(_random_texts(3, ranks=2))
    wide, narrow = TreeShape((-1, 0, 0, 0, 0)), TreeShape((-1, 0, 0))
    np.testing.assert_allclose(texts.rounds(wide).counts, texts.rounds(narrow).counts)


def test_below_the_deepest_measured_the_same_places_stand_in() -> None:
    """Where a node does not depend on its start, that changes nothing."""
    random = np.random.default_rng(4)
    base = random.dirichlet([1, 1, 1], 20)[:, :2]  # [places, ranks]
    deep = np.zeros((20, 6, 2))
    for depth in range(6):
        deep[: 20 - depth, depth] = base[depth:]
    shape = TreeShape.chains(2, 6)
    expected = Texts([_text(deep)]).rounds(shape).counts
    np.testing.assert_allclose(Texts([_text(deep[:, :2])]).rounds(shape).counts, expected)


def test_texts_do_not_touch_each_other() -> None:
    texts = _random_texts(5, lengths=(3, 11, 1))
    for shape in SHAPES.values():
        together = Texts(texts).rounds(shape)
        for index, text in enumerate(texts):
            alone = Texts([text]).rounds(shape)
            assert together.counts[index] == pytest.approx(alone.counts[0])
            np.testing.assert_allclose(together.accepted[index], alone.accepted[0])
            assert (together.roots[index, len(text.rates) :] == 0).all()
