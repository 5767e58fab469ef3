"""Distances: a right program stays below the limit, a shifted law goes beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from sequoia.measure.distance import Distance, distance, mean_distance

LAW = np.random.default_rng(0).dirichlet(np.ones(64)).reshape(4, 4, 4)


def sampled(law: np.ndarray, samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(samples, law.ravel()).reshape(law.shape)


def measured(law: np.ndarray, samples: int = 250, seed: int = 0) -> Distance:
    return distance(LAW, sampled(law, samples, seed), np.random.default_rng(seed + 1))


def test_noise_is_what_samples_of_the_law_itself_come_to() -> None:
    found = [measured(LAW, seed=seed) for seed in range(200)]
    assert all(entry.ok for entry in found)
    assert np.mean([entry.tv for entry in found]) == pytest.approx(found[0].noise, rel=0.05)
    assert np.std([entry.tv for entry in found]) == pytest.approx(found[0].deviation, rel=0.25)


def test_a_shifted_law_goes_beyond_the_limit() -> None:
    shifted = np.roll(LAW, 1, axis=2)
    assert not measured(shifted).ok


def test_a_shift_too_small_for_one_law_shows_in_many() -> None:
    shifted = 0.85 * LAW + 0.15 * np.roll(LAW, 1, axis=2)
    found = [measured(shifted, seed=seed) for seed in range(40)]
    assert all(entry.ok for entry in found)
    assert not mean_distance(found).ok
    assert mean_distance(measured(LAW, seed=seed) for seed in range(40)).ok


def test_one_impossible_sample_is_a_failure() -> None:
    law = LAW.copy()
    law[3] = 0
    counts = sampled(law / law.sum(), 1000, 0)
    counts[3, 0, 0] += 1
    found = distance(law, counts, np.random.default_rng(0))
    assert found.impossible == 1
    assert found.tv < found.limit
    assert not found.ok


def test_a_certain_outcome_has_no_noise() -> None:
    law = np.zeros((4, 4, 4))
    law[1, 2, 3] = 1
    found = distance(law, 5 * law.astype(np.int64), np.random.default_rng(0))
    assert found.ok
    assert (found.tv, found.noise) == (0, 0)


def test_no_samples_are_no_failure() -> None:
    assert measured(LAW, samples=0).ok
    assert mean_distance([]).ok
