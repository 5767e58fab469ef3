"""Figures of a run in words: what the terminal's table and the page both say."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from sequoia.measure.bench.bootstrap import Estimate
from sequoia.measure.bench.records import Finding, MethodEntry, RunEntry
from sequoia.measure.bench.summary import BASELINE, MethodSummary, Summary

NOTHING = "–"
DEFAULT_TARGET = "SmolLM2-135M-Instruct"  # its short name, which is no name to load it by
CONVENTIONS = (
    "speedup: plain's time per token to the method's, over the same requests; tokens/s: decoding, from the first step "
    "to the last; accepted length: tokens per target pass, next token included; in brackets: 95% bootstrap intervals"
)


def figure(estimate: Estimate | None, unit: str = "", scale: float = 1.0) -> str:
    """1.37×"""
    return NOTHING if estimate is None else three_digits(scale * estimate.value, scale * estimate.value) + unit


def interval(estimate: Estimate | None, scale: float = 1.0) -> str:
    """1.29–1.45, with the decimals of the value; a dash where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return NOTHING
    low, high = (three_digits(scale * bound, scale * estimate.value) for bound in (estimate.low, estimate.high))
    return f"{low}–{high}"


def with_interval(estimate: Estimate | None, unit: str = "", scale: float = 1.0) -> str:
    """1.37× (1.29–1.45)"""
    value = figure(estimate, unit, scale)
    return value if estimate is None else f"{value} ({interval(estimate, scale)})"


def milliseconds(estimate: Estimate | None) -> str:
    """312 ms, of an estimate in seconds."""
    return figure(estimate, " ms", 1e3)


def speedup(entry: MethodSummary) -> str:
    """Overall, with its interval; the baseline's is 1 by definition."""
    estimate = entry.overall.speedup
    return figure(estimate, "×") if entry.method.name == BASELINE else with_interval(estimate, "×")


def output(entry: MethodSummary) -> str:
    """What became of the claim that the output is the same."""
    found = entry.agreement
    if found is not None and found.wrong:
        return f"✗ {found.wrong} wrong"
    if entry.faults:
        return f"✗ {count(entry.faults, 'fault')}"
    if found is None:
        return NOTHING
    return f"≈ {count(found.near_ties, 'near tie')}" if found.near_ties else f"✓ as {found.reference}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def finding(entry: Finding) -> str:
    """One line for people."""
    again = f", repeat {entry.repeat}" if entry.repeat else ""
    return f"{entry.method}, {entry.setting}, prompt {entry.prompt}{again}: {entry.kind}: {entry.detail}"


def progress(summary: Summary) -> str | None:
    """How far an unfinished run came."""
    if summary.is_complete:
        return None
    prompts = count(len(summary.run.prompts), "prompt")
    return f"{summary.prompts_done} of {prompts} are done; the figures are of what is there"


def subject(run: RunEntry) -> str:
    """SmolLM2-135M-Instruct · draft ngram · fp32 · cpu"""
    named = {"target": "", "draft": "draft ", "dtype": "", "device": ""}
    return " · ".join(f"{label}{run.settings[key]}" for key, label in named.items() if run.settings.get(key))


def machine(noted: Mapping[str, Any]) -> str:
    """Intel Xeon · 2 threads · torch 2.13.0 · transformers 5.24.0 · commit 1a2b3c4"""
    parts = [noted.get("gpu") or noted.get("cpu"), _counted(noted.get("threads"), "thread")]
    parts += [f"{name} {version}" for name, version in (noted.get("versions") or {}).items() if version]
    parts.append(f"commit {noted['commit']}" if noted.get("commit") else None)
    return " · ".join(filter(None, parts))


def workload(run: RunEntry) -> str:
    """14 prompts from built-in, texts cut to 128 tokens · up to 48 tokens each · 2 repeats"""
    settings = run.settings
    sources = ", ".join(map(str, settings.get("sources") or ()))
    cut = settings.get("prompt_tokens")
    prompts = count(len(run.prompts), "prompt") + (f" from {sources}" if sources else "")
    parts = [prompts + (f", texts cut to {cut} tokens" if cut else "")]
    if settings.get("max_tokens"):
        parts.append(f"up to {_counted(settings['max_tokens'], 'token')} each")
    if settings.get("repeats", 1) != 1:
        parts.append(f"{settings['repeats']} repeats")
    return " · ".join(parts)


def command(run: RunEntry) -> str:
    """What makes the run again."""
    settings = run.settings
    sampled = [setting.top_p for setting in run.sampling if setting.temperature > 0]
    options = {
        "--methods": ",".join(map(_method_argument, run.methods)),
        "--temperature": _distinct(setting.temperature for setting in run.sampling),
        "--top-p": _distinct(sampled or [1.0]),
        "--count": str(len(run.prompts)),
    }
    for name in ("target", "draft", "dtype", "device", "max_tokens", "prompt_tokens", "repeats", "seed"):
        if settings.get(name) not in (None, DEFAULT_TARGET):
            options["--" + name.replace("_", "-")] = str(settings[name])
    if run.machine.get("threads"):
        options["--threads"] = str(run.machine["threads"])
    sources = [part for source in settings.get("sources") or () for part in ("--prompts", str(source))]
    return shlex.join(["sequoia", "bench", *chain.from_iterable(options.items()), *sources])


def _method_argument(method: MethodEntry) -> str:
    """The name where it is one that the command line knows, else what the method was built from."""
    known = method.name == BASELINE or method.spec.split(":")[0] == method.name
    return method.name if known or not method.spec else method.spec


def _distinct(numbers: Iterable[float]) -> str:
    return ",".join(f"{number:g}" for number in dict.fromkeys(numbers))


def _counted(number: Any, noun: str) -> str | None:
    return count(number, noun) if isinstance(number, int) else None


def described(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what a run notes of itself, for people."""
    known = ((name.replace("_", " "), value) for name, value in record.items() if value not in (None, "", [], {}, ()))
    return [(name.replace("gib", "GiB"), _plain(value)) for name, value in known]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items() if entry is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def three_digits(number: float, like: float) -> str:
    """`number` with as many decimals as show three digits of `like`."""
    decimals = 0 if abs(like) >= 99.95 else 1 if abs(like) >= 9.995 else 2
    return f"{number:,.{decimals}f}"
