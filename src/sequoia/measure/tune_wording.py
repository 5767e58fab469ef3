"""A tuning in words: what the page and the picture both say."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from sequoia.measure.bench.wording import DEFAULT_TARGET, count
from sequoia.tree.option import Option
from sequoia.tree.plan import Plan, PlanFile

_DATA_OPTIONS = ("count", "samples", "tokens", "prompt_tokens", "seed", "seconds", "max_size", "max_depth")


def subject(pair: Mapping[str, Any]) -> str:
    """SmolLM2-135M-Instruct · draft ngram · bf16 · cpu · 2 threads"""
    draft = f"draft {pair['draft']}" if pair.get("draft") else "no draft"
    threads = count(pair["threads"], "thread") if pair.get("device") == "cpu" and pair.get("threads") else None
    parts = [pair.get("target"), draft, pair.get("target_dtype"), pair.get("device"), threads]
    return " · ".join(str(part) for part in parts if part)


def workload(data: Mapping[str, Any]) -> str:
    """200 samples of up to 64 tokens · 56 prompts from built-in · 2026-11-30"""
    samples = count(data["samples"], "sample") if data.get("samples") else ""
    length = f" of up to {count(data['tokens'], 'token')}" if data.get("tokens") else ""
    prompts = count(data["count"], "prompt") if data.get("count") else "prompts"
    sources = f"{prompts} from {', '.join(data['prompts'])}" if data.get("prompts") else ""
    return " · ".join(filter(None, (samples + length, sources, data.get("date"))))


def verdict(plan: Plan) -> str:
    """Fastest by prediction: tree 16/4, 1.55× plain decoding. As fast within the error: chain 3."""
    chosen, plain = plan.chosen, plan.plain
    speedup = plain.prediction.seconds_per_token / chosen.prediction.seconds_per_token
    found = "plain decoding" if chosen is plain else f"{chosen.name}, {speedup:.2f}× plain decoding"
    equals = ", ".join(option.name for option in plan.options if option is not chosen and _within_error(option, chosen))
    return f"Fastest by prediction: {found}." + (f" As fast within the error: {equals}." if equals else "")


def shortened(text: str, most: int) -> str:
    """At most this many letters, the middle left out."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # names of files may hold what no font takes
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def _within_error(slower: Option, faster: Option) -> bool:
    low, high = slower.prediction, faster.prediction
    error = math.hypot(low.tokens_per_second_error, high.tokens_per_second_error)
    return high.tokens_per_second - low.tokens_per_second <= error


def command(file: PlanFile) -> str:
    """What tunes again."""
    pair, data = file.pair, file.data
    others = {name: value for plan in file.plans for name, value in plan.params.items() if name != "temperature"}
    options = {
        "target": None if pair.get("target") == DEFAULT_TARGET else pair.get("target"),
        "draft": pair.get("draft"),
        "dtype": pair.get("target_dtype"),
        "draft_dtype": pair.get("draft_dtype"),
        "device": pair.get("device"),
        "threads": pair.get("threads"),
        "temperature": ",".join(f"{plan.params['temperature']:g}" for plan in file.plans),
        **others,
        **{name: data.get(name) for name in _DATA_OPTIONS},
        "batch": ",".join(str(option.batch) for option in file.batch),
    }
    given = [("--" + name.replace("_", "-"), value) for name, value in options.items() if value not in (None, "")]
    sources = [("--prompts", source) for source in data.get("prompts") or ()]
    flags = ["--compile"] if pair.get("compiled") else []
    return shlex.join(["sequoia", "tune", *flags, *(str(word) for option in (*given, *sources) for word in option)])
