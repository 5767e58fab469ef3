"""Proof of losslessness on the user's own machine: every outcome of one node, then the joint law of whole requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sequoia.measure.distance import Distance, Tally, count_outcomes
from sequoia.measure.enumeration import Enumeration, enumerate_walks
from sequoia.measure.joint_law import LENGTH, VOCAB, Run, Sampled, cases, engine_cases, run_session
from sequoia.speculate.verify import VERIFIERS, Verifier

SAMPLES = 250
_GREEDY_SAMPLES = 4  # a greedy law has one outcome; a few requests show whether it is always that one

Progress = Callable[[int, int, str], None]
"""(done, total, what is being done)"""


@dataclass(frozen=True)
class CaseResult:
    name: str
    distance: Distance


@dataclass(frozen=True)
class VerifierResult:
    """What one verifier came to."""

    name: str
    enumeration: Enumeration
    joint: Distance  # of all cases, joined
    cases: tuple[CaseResult, ...]

    @property
    def ok(self) -> bool:
        return self.enumeration.ok and self.joint.ok and not self.failures

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(case for case in self.cases if not case.distance.ok)


@dataclass(frozen=True)
class SelfTest:
    """The whole proof."""

    seed: int
    verifiers: tuple[VerifierResult, ...]
    joint: Distance  # of all verifiers' cases, joined

    @property
    def ok(self) -> bool:
        return self.joint.ok and all(result.ok for result in self.verifiers)

    @property
    def walks(self) -> int:
        return sum(result.enumeration.walks for result in self.verifiers)

    @property
    def max_error(self) -> float:
        return float(np.max([result.enumeration.max_error for result in self.verifiers]))

    @property
    def enumeration_ok(self) -> bool:
        return all(result.enumeration.ok for result in self.verifiers)

    @property
    def joint_ok(self) -> bool:
        return self.joint.ok and all(result.joint.ok and not result.failures for result in self.verifiers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {"ok": self.ok, "walks": self.walks, "max_error": self.max_error, **asdict(self)}


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
    everything = Tally(VOCAB**LENGTH)
    results = []
    with _one_thread():
        for verifier, sampled in plan:
            steps.say(verifier.name)
            enumeration = enumerate_walks(verifier)
            tally = Tally(VOCAB**LENGTH)
            compared = tuple(_compare(case, _requests(case, samples), tally, rng, steps) for case in sampled)
            results.append(VerifierResult(verifier.name, enumeration, tally.distance(), compared))
            everything.merge(tally)
    return SelfTest(seed, tuple(results), everything.distance())


def _sampled(verifier: Verifier, seed: int, run: Run, device: str | None) -> list[Sampled]:
    sampled: list[Sampled] = list(cases(verifier, seed, run))
    if device is not None and VERIFIERS.get(verifier.name) is verifier:
        sampled += engine_cases(verifier.name, seed, device)
    return sampled


def _requests(case: Sampled, samples: int) -> int:
    return min(samples, _GREEDY_SAMPLES) if case.params.temperature == 0 else samples


def _compare(case: Sampled, samples: int, tally: Tally, rng: np.random.Generator, steps: _Steps) -> CaseResult:
    law = case.law()
    tokens = []
    for request in range(samples):
        tokens.append(case.sample(request))
        steps.advance()
    counts = count_outcomes(tokens, law.shape)
    if case.params.temperature == 0:
        # Kept out of the sum, where its certain outcome would only dilute the others.
        tally = Tally(law.size)
    return CaseResult(case.name, tally.add(law, counts, rng))


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
