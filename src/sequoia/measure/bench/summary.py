"""What raw results come to: medians and ratios with their intervals, by method and category."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product, zip_longest
from typing import Any

import numpy as np

from sequoia.measure.bench.bootstrap import Estimate, Floats, estimate, median, ratio_of_medians, ratio_of_sums
from sequoia.measure.bench.records import Finding, MethodEntry, Result, Results, RunEntry, Setting

BASELINE = "plain"


@dataclass(frozen=True)
class Figures:
    """One method on some prompts; None for what was not measured."""

    requests: int
    tokens_per_second: Estimate | None  # median over requests, of decoding alone
    speedup: Estimate | None  # plain's median seconds per decoded token to this one's, over the same requests
    accepted_length: Estimate | None  # tokens per pass of the target
    first_token_seconds: Estimate | None  # median over requests
    prefill_seconds: Estimate | None  # median over requests


@dataclass(frozen=True)
class Agreement:
    """A method's greedy outputs against those of the method it must repeat."""

    reference: str
    same: int
    near_ties: int
    wrong: int


@dataclass(frozen=True)
class Acceptance:
    """What verification accepted, summed over requests."""

    visits: tuple[int, ...]  # by depth
    accepted: tuple[tuple[int, ...], ...]  # by depth and rank


@dataclass(frozen=True)
class MethodSummary:
    """One method under one setting."""

    method: MethodEntry
    overall: Figures
    categories: Mapping[str, Figures]
    agreement: Agreement | None  # None where nothing is claimed or nothing could be compared
    acceptance: Acceptance | None
    faults: int

    @property
    def is_faulty(self) -> bool:
        return self.faults > 0 or (self.agreement is not None and self.agreement.wrong > 0)


@dataclass(frozen=True)
class SettingSummary:
    """All methods under one setting, in the run's order; methods without a result are left out."""

    setting: Setting
    methods: tuple[MethodSummary, ...]

    @property
    def has_baseline(self) -> bool:
        return any(entry.method.name == BASELINE for entry in self.methods)


@dataclass(frozen=True)
class Summary:
    """A run in figures."""

    run: RunEntry
    prompts_done: int
    categories: tuple[str, ...]  # in the order they were met
    settings: tuple[SettingSummary, ...]
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def near_ties(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.is_fault)

    @property
    def is_complete(self) -> bool:
        return self.prompts_done == len(self.run.prompts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {
            "ok": not self.faults,
            "settings": dict(self.run.settings),
            "machine": dict(self.run.machine),
            "prompts": len(self.run.prompts),
            "prompts_done": self.prompts_done,
            "categories": list(self.categories),
            "sampling": [_setting_record(setting) for setting in self.settings],
            "faults": [asdict(finding) for finding in self.faults],
            "near_ties": [asdict(finding) for finding in self.near_ties],
        }


def summarize(results: Results) -> Summary:
    """The figures of everything measured so far."""
    categories = tuple(dict.fromkeys(result.category for result in results.results))
    settings = (_setting_summary(results, setting, categories) for setting in results.run.sampling)
    return Summary(
        run=results.run,
        prompts_done=prompts_done(results),
        categories=categories,
        settings=tuple(setting for setting in settings if setting.methods),
        findings=tuple(results.findings),
    )


def prompts_done(results: Results) -> int:
    """Prompts answered by all methods, under all settings and with all repeats."""
    repeats = range(1 + max((result.repeat for result in results.results), default=0))
    names = [method.name for method in results.run.methods]
    needed = list(product(names, results.run.sampling, repeats))
    found = {result.key for result in results.results}
    return sum(
        all((name, setting, prompt, repeat) in found for name, setting, repeat in needed)
        for prompt in results.run.prompts
    )


def _setting_record(summary: SettingSummary) -> dict[str, Any]:
    methods = [{**asdict(entry.method), **asdict(entry), "method": entry.method.name} for entry in summary.methods]
    return {**asdict(summary.setting), "methods": methods}


def _setting_summary(results: Results, setting: Setting, categories: Sequence[str]) -> SettingSummary:
    by_method: dict[str, list[Result]] = {}
    for result in results.results:
        if result.setting == setting:
            by_method.setdefault(result.method, []).append(result)
    findings = [finding for finding in results.findings if finding.setting == setting]
    methods = [method for method in results.run.methods if method.name in by_method]
    return SettingSummary(
        setting, tuple(_method_summary(method, setting, by_method, categories, findings) for method in methods)
    )


def _method_summary(
    method: MethodEntry,
    setting: Setting,
    by_method: Mapping[str, list[Result]],
    categories: Sequence[str],
    findings: Iterable[Finding],
) -> MethodSummary:
    own, plain = by_method[method.name], by_method.get(BASELINE, [])
    found = [finding for finding in findings if finding.method == method.name]
    reference = by_method.get(method.same_as or "", []) if setting.temperature == 0 else []
    groups = {name: [result for result in own if result.category == name] for name in categories}
    return MethodSummary(
        method=method,
        overall=_figures(own, plain),
        categories={name: _figures(group, plain) for name, group in groups.items() if group},
        agreement=_agreement(own, reference, found),
        acceptance=_acceptance(own),
        faults=sum(finding.is_fault for finding in found),
    )


def _figures(own: Sequence[Result], plain: Sequence[Result]) -> Figures:
    pace, plain_pace = _grid(own, own, _seconds_per_token), _grid(plain, own, _seconds_per_token)
    seen = [result for result in own if result.passes]
    return Figures(
        requests=len(own),
        tokens_per_second=estimate(median, 1 / pace),
        speedup=estimate(ratio_of_medians, *_paired(plain_pace, pace)),
        accepted_length=estimate(
            ratio_of_sums,
            _grid(seen, own, lambda result: len(result.token_ids)),
            _grid(seen, own, lambda result: result.passes),
        ),
        first_token_seconds=estimate(median, _grid(own, own, lambda result: result.first_token_seconds)),
        prefill_seconds=estimate(median, _grid(own, own, lambda result: result.prefill_seconds)),
    )


def _seconds_per_token(result: Result) -> float | None:
    """Of decoding; None where everything came at once, or nothing came."""
    return 1 / result.tokens_per_second if result.tokens_per_second else None


def _grid(results: Iterable[Result], like: Iterable[Result], value: Callable[[Result], float | None]) -> Floats:
    """[prompts, repeats] of the requests in `like`; NaN where `results` lack them or have no value."""
    like = list(like)
    rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(result.prompt for result in like))}
    grid = np.full((len(rows), 1 + max((result.repeat for result in like), default=0)), np.nan)
    for result in results:
        found = value(result)
        if found is not None and result.prompt in rows and result.repeat < grid.shape[1]:
            grid[rows[result.prompt], result.repeat] = found
    return grid


def _paired(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Only the requests that both have."""
    missing = np.isnan(first) | np.isnan(second)
    return np.where(missing, np.nan, first), np.where(missing, np.nan, second)


def _agreement(own: Sequence[Result], reference: Sequence[Result], findings: Sequence[Finding]) -> Agreement | None:
    """A difference that nothing was found out about counts as wrong."""
    expected = {_request(result): result.token_ids for result in reference}
    compared = [result for result in own if _request(result) in expected]
    if not compared:
        return None
    faulty = {(finding.prompt, finding.repeat) for finding in findings if finding.is_fault}
    tied = {(finding.prompt, finding.repeat) for finding in findings if not finding.is_fault} - faulty
    differing = [result for result in compared if result.token_ids != expected[_request(result)]]
    ties = sum(_request(result) in tied for result in differing)
    return Agreement(reference[0].method, len(compared) - len(differing), ties, len(differing) - ties)


def _request(result: Result) -> tuple[str, int]:
    return result.prompt, result.repeat


def _acceptance(results: Iterable[Result]) -> Acceptance | None:
    counted = [result for result in results if result.visits]
    if not counted:
        return None
    visits = tuple(map(sum, zip_longest(*(result.visits for result in counted), fillvalue=0)))
    by_depth = zip_longest(*(result.accepted for result in counted), fillvalue=())
    return Acceptance(visits, tuple(tuple(map(sum, zip_longest(*ranks, fillvalue=0))) for ranks in by_depth))
