"""Proof of losslessness on the user's own machine: every outcome of one node, then the joint law of whole requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sequoia.measure.distance import Distance, count_outcomes, distance, mean_distance
from sequoia.measure.enumeration import Enumeration, enumerate_walks
from sequoia.measure.joint_law import Run, Sampled, cases, engine_cases, run_session
from sequoia.speculate.verify import VERIFIERS, Verifier

SAMPLES = 250
_GREEDY_SAMPLES = 4  # a greedy law has one outcome; a few requests show whether it is always that one

Progress = Callable[[int, int, str], None]
"""(done, total, what is being done)"""


@dataclass(frozen=True)
class CaseResult:
    """What one law's samples came to."""

    name: str
    greedy: bool
    distance: Distance


@dataclass(frozen=True)
class VerifierResult:
    """What one verifier came to."""

    name: str
    enumeration: Enumeration
    cases: tuple[CaseResult, ...]

    @property
    def joint(self) -> Distance:
        """Mean over the cases; greedy ones, which have no noise, are left to stand for themselves."""
        return mean_distance(case.distance for case in self.cases if not case.greedy)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(case for case in self.cases if not case.distance.ok)

    @property
    def joint_ok(self) -> bool:
        return self.joint.ok and not self.failures

    @property
    def ok(self) -> bool:
        return self.enumeration.ok and self.joint_ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for programs."""
        cases = [{"name": case.name, "ok": case.distance.ok, **asdict(case.distance)} for case in self.cases]
        return {
            "name": self.name,
            "ok": self.ok,
            "enumeration": {"ok": self.enumeration.ok, **asdict(self.enumeration)},
            "joint_law": {"ok": self.joint.ok, **asdict(self.joint)},
            "cases": cases,
        }


@dataclass(frozen=True)
class SelfTest:
    """The whole proof."""

    seed: int
    verifiers: tuple[VerifierResult, ...]

    @property
    def walks(self) -> int:
        return sum(result.enumeration.walks for result in self.verifiers)

    @property
    def max_error(self) -> float:
        return float(np.max([result.enumeration.max_error for result in self.verifiers]))  # NaN counts as largest

    @property
    def joint(self) -> Distance:
        """Mean over all verifiers' cases."""
        return mean_distance(result.joint for result in self.verifiers)

    @property
    def enumeration_ok(self) -> bool:
        return all(result.enumeration.ok for result in self.verifiers)

    @property
    def joint_ok(self) -> bool:
        return self.joint.ok and all(result.joint_ok for result in self.verifiers)

    @property
    def ok(self) -> bool:
        return self.enumeration_ok and self.joint_ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "walks": self.walks,
            "max_error": self.max_error,
            "joint_law": {"ok": self.joint.ok, **asdict(self.joint)},
            "verifiers": [result.to_dict() for result in self.verifiers],
        }


def run_selftest(
    verifiers: Sequence[Verifier] = tuple(VERIFIERS.values()),
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    run: Run = run_session,
    device: str | None = "auto",
    progress: Progress = lambda done, total, what: None,
) -> SelfTest:
    """Enumerate and sample.

    Args:
        verifiers: what is put to the test; for the engine, only those it knows by name.
        samples: requests per case of the joint law.
        seed: of the noise; the models and their laws are always the same.
        run: the loop under test.
        device: where the engine's models run; None leaves the engine out.
        progress: called as the work goes on.
    """
    plan = [(verifier, _sampled(verifier, seed, run, device)) for verifier in verifiers]
    steps = _Steps(sum(_requests(case, samples) for _, sampled in plan for case in sampled), progress)
    rng = np.random.default_rng(seed)
    results = []
    with _one_thread():
        for verifier, sampled in plan:
            steps.say(verifier.name)
            enumeration = enumerate_walks(verifier)
            compared = tuple(_compare(case, _requests(case, samples), rng, steps) for case in sampled)
            results.append(VerifierResult(verifier.name, enumeration, compared))
    return SelfTest(seed, tuple(results))


def _sampled(verifier: Verifier, seed: int, run: Run, device: str | None) -> list[Sampled]:
    sampled: list[Sampled] = list(cases(verifier, seed, run))
    if device is not None and VERIFIERS.get(verifier.name) is verifier:
        sampled += engine_cases(verifier.name, seed, device)
    return sampled


def _requests(case: Sampled, samples: int) -> int:
    return min(samples, _GREEDY_SAMPLES) if case.params.temperature == 0 else samples


def _compare(case: Sampled, samples: int, rng: np.random.Generator, steps: _Steps) -> CaseResult:
    law, tokens = case.law(), []
    for request in range(samples):
        tokens.append(case.sample(request))
        steps.advance()
    return CaseResult(case.name, case.params.temperature == 0, distance(law, count_outcomes(tokens, law.shape), rng))


class _Steps:
    """Requests done, of all."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress, self._what = 0, total, progress, ""

    def say(self, what: str) -> None:
        self._what = what
        self._progress(self._done, self._total, what)

    def advance(self) -> None:
        self._done += 1
        self._progress(self._done, self._total, self._what)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small run faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
