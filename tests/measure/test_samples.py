"""Profiles, errors and the power law from rates along texts."""

from __future__ import annotations

import numpy as np
import pytest

from sequoia.measure.renewal import TextRates
from sequoia.measure.samples import Samples, fitted_power_law
from sequoia.tree.expected import expected_tokens
from sequoia.tree.shape import TreeShape

FLAT = TreeShape.chain(2)


def _samples(*rates: np.ndarray) -> Samples:
    texts = tuple(TextRates(own.astype(np.float32), own.astype(np.float32), prompt) for prompt, own in enumerate(rates))
    return Samples(texts, {"seed": 0})


def test_a_row_weighs_places_by_roots_and_by_what_leads_there() -> None:
    """Three places, one rank; by hand. A round of the chain of 1 moves on by 1 or 2."""
    rates = np.array([[[0.5], [0.25]], [[0.8], [0.5]], [[0.1], [0.0]]])
    samples = _samples(rates)
    # Roots: place 0 always; place 1 after a rejection there, 0.5; place 2 otherwise, 0.5, or after 1 rejects, 0.1.
    roots = [1, 0.5, 0.5 + 0.5 * 0.2]
    first = np.dot(roots, [0.5, 0.8, 0.1]) / sum(roots)
    # The last place has no node of depth 1. Those of places 0 and 1 are reached with 0.5 and 0.8.
    weights = np.array([1 * 0.5, 0.5 * 0.8])
    second = np.dot(weights, [0.25, 0.5]) / weights.sum()
    profile = samples.profile(TreeShape.chain(1))
    np.testing.assert_allclose(profile.table, [[first], [second]], rtol=1e-6)
    assert profile.provenance["seed"] == 0
    assert profile.provenance["visits"] == [pytest.approx(sum(roots), abs=0.05), pytest.approx(0.9, abs=0.05)]


def test_the_profile_averages_what_is_not_yet_known() -> None:
    """`rates` leads to a node, `marginal` is what is averaged there."""
    given, marginal = np.zeros((2, 2, 1), np.float32), np.full((2, 2, 1), 0.25, np.float32)
    given[0, 0] = 1
    profile = Samples((TextRates(given, marginal),), {}).profile(FLAT)
    np.testing.assert_allclose(profile.table, [[0.25], [0.25]])


def test_depths_that_no_round_comes_to_are_left_out() -> None:
    rates = np.zeros((5, 4, 2))
    rates[:, 0, 0] = 0.5
    rates[:, 1, 0] = 0.0
    assert len(_samples(rates).profile().rates) == 2


def test_tokens_per_round_is_tokens_over_rounds() -> None:
    never, always = np.zeros((12, 3, 2)), np.zeros((6, 3, 2))
    always[..., 0] = 1
    mean, error = _samples(never, always).tokens_per_round(TreeShape.chain(2))
    assert mean == pytest.approx(18 / (12 + 2))
    assert error > 0


def test_errors_are_those_of_other_prompts() -> None:
    """Held against the spread over many sets of texts, whose prompts differ and whose texts of one prompt are alike."""
    random, shape = np.random.default_rng(0), TreeShape.kary(2, 2)

    def samples() -> Samples:
        texts = []
        for prompt in range(12):
            level = random.uniform(0.1, 0.6)
            for _ in range(4):
                own = np.zeros((20, 2, 2), np.float32)
                own[..., 0] = np.clip(level + 0.1 * random.standard_normal((20, 2)), 0, 0.8)
                own[..., 1] = 0.1
                texts.append(TextRates(own, own, prompt))
        return Samples(tuple(texts), {})

    many = [samples() for _ in range(150)]
    means, errors = np.array([one.tokens_per_round(shape) for one in many]).T
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.25)
    rates = np.array([one.profile(shape).table for one in many])
    found = np.sqrt(np.mean([one.errors(shape) ** 2 for one in many], axis=0))
    np.testing.assert_allclose(found[:, 0], rates.std(0)[:, 0], rtol=0.3)
    assert (found[:, 1] < 1e-6).all()


def test_one_prompt_has_its_texts_for_a_measure() -> None:
    random = np.random.default_rng(1)
    rates = [random.uniform(0, 0.5, (10, 2, 1)).astype(np.float32) for _ in range(8)]
    one = Samples(tuple(TextRates(own, own, 0) for own in rates), {})
    assert 0 < one.tokens_per_round(FLAT).error < 1
    alone = Samples(one.texts[:1], {})
    assert alone.tokens_per_round(FLAT).error == np.inf
    assert (alone.errors() == 1).all()  # a rate is never wrong by more, and JSON has no infinity


def test_the_counts_are_per_round() -> None:
    rates = np.tile([0.5, 0.2], (3000, 2, 1))
    visits, accepted = _samples(rates).counts(TreeShape.kary(2, 2))
    np.testing.assert_allclose(visits, [1, 0.7], atol=2e-3)
    np.testing.assert_allclose(accepted, [[0.5, 0.2], [0.35, 0.14]], atol=2e-3)


def test_the_default_profile_is_that_of_its_own_best_tree() -> None:
    rates = np.tile([0.5, 0.2, 0.05], (500, 8, 1))
    samples = _samples(rates)
    profile = samples.profile()
    np.testing.assert_allclose(profile.table, np.tile([0.5, 0.2, 0.05], (8, 1)), rtol=1e-6)
    shape = TreeShape.kary(2, 3)
    assert samples.tokens_per_round(shape).mean == pytest.approx(expected_tokens(shape, profile), rel=0.01)


def test_the_rejection_curve_and_its_power_law() -> None:
    curve = np.arange(1, 17) ** -0.7
    rates = -np.diff(np.concatenate([[1.0], curve]))
    samples = _samples(np.tile(rates, (40, 2, 1)))
    np.testing.assert_allclose(samples.rejection_curve, curve, rtol=1e-5)
    assert samples.power_law.exponent == pytest.approx(0.7, rel=1e-4)
    assert samples.power_law.fit == pytest.approx(1, abs=1e-6)


def test_a_power_law_needs_two_values() -> None:
    assert np.isnan(fitted_power_law([0.5, 0.0, 0.0])).all()
    law = fitted_power_law([0.5, 0.5, 0.5])
    assert law.exponent == pytest.approx(0)
    exponent, fit = fitted_power_law([0.8, 0.1, 0.09, 0.0])
    assert exponent > 1
    assert 0 < fit < 1
