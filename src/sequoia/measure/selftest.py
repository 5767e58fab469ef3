"""Proof of losslessness on the user's own machine: every outcome of one node, then the joint law of whole requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from sequoia.measure.distance import Distance, Ints, distance, mean_distance
from sequoia.measure.enumeration import Enumeration, enumerate_walks
from sequoia.measure.joint_law import DYNAMIC_TREES, Run, Sampled, cases, count_outcomes, engine_cases, run_session
from sequoia.measure.parallel import mapped
from sequoia.speculate.sampling import Draws
from sequoia.speculate.verify import VERIFIERS, Verifier

SAMPLES = 250
_GREEDY_SAMPLES = 4  # a greedy law has one outcome; a few requests show whether it is always that one

_TASK = 25  # requests between two signs of progress

Progress = Callable[[int, int], None]
"""(requests done, requests in all)"""


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
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> SelfTest:
    """Enumerate and sample.

    Args:
        verifiers: what is put to the test; the engine takes part with those it knows by name.
        samples: requests per case of the joint law.
        seed: of the noise; the models and their laws are always the same.
        run: the loop under test.
        device: where the engine's models run; None leaves the engine out.
        workers: processes to sample with.
        progress: called as the work goes on.
    """
    plan = [(verifier, _sampled(verifier, seed, run, device)) for verifier in verifiers]
    tasks = [task for _, sampled in plan for case in sampled for task in _tasks(case, samples)]
    rng = np.random.default_rng(seed)
    with mapped(_counts, tasks, workers) as mapped_counts:
        enumerations = [enumerate_walks(verifier) for verifier in verifiers]
        counts = _reporting(mapped_counts, tasks, progress)
        compared = [
            tuple(_compared(case, islice(counts, len(_tasks(case, samples))), rng) for case in sampled)
            for _, sampled in plan
        ]
    names = [verifier.name for verifier in verifiers]
    return SelfTest(seed, tuple(map(VerifierResult, names, enumerations, compared)))


@dataclass(frozen=True)
class _Task:
    """Some requests of a case."""

    case: Sampled
    requests: range


def _counts(task: _Task) -> Ints:
    return count_outcomes([task.case.sample(request) for request in task.requests])


def _sampled(verifier: Verifier, seed: int, run: Run, device: str | None) -> list[Sampled]:
    sampled: list[Sampled] = list(cases(verifier, seed, run))
    if verifier.draws is Draws.TOP_K:
        sampled += cases(verifier, seed, run, DYNAMIC_TREES)
    if device is not None and VERIFIERS.get(verifier.name) is verifier:
        sampled += engine_cases(verifier.name, seed, device)
    return sampled


def _tasks(case: Sampled, samples: int) -> list[_Task]:
    count = math.ceil(samples * case.effort)
    count = min(count, _GREEDY_SAMPLES) if case.greedy else count
    return [_Task(case, range(start, min(start + _TASK, count))) for start in range(0, count, _TASK)]


def _reporting(counts: Iterable[Ints], tasks: Sequence[_Task], progress: Progress) -> Iterator[Ints]:
    done, total = 0, sum(len(task.requests) for task in tasks)
    progress(done, total)
    for task, count in zip(tasks, counts, strict=True):
        done += len(task.requests)
        progress(done, total)
        yield count


def _compared(case: Sampled, counts: Iterable[Ints], rng: np.random.Generator) -> CaseResult:
    law = case.law()
    total = sum(counts, np.zeros(law.shape, dtype=np.int64))
    return CaseResult(case.name, case.greedy, distance(law, total, rng))
