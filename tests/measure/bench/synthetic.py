"""Results that no model made: speeds and trees drawn from a seed, as large or small as a test needs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sequoia.measure.bench.records import Finding, MethodEntry, Result, Results, RoundEntry, RunEntry, Setting

CATEGORIES = ("chat", "prose", "code", "summary", "translation", "maths", "question")
METHODS = (
    ("plain", None, None, 1.0),
    ("transformers", None, None, 0.97),
    ("transformers-lookup", None, None, 1.25),
    ("chain:4", 5, "chain", 1.21),
    ("optimal:16x4", 16, "optimal", 1.42),
    ("optimal:64x8", 64, "optimal", 1.31),
    ("dynamic:16x4", 16, "dynamic", 1.47),
    ("specinfer:optimal:16x4", 16, "optimal", 1.18),
)
GREEDY, SAMPLED = Setting(0.0), Setting(0.6, 0.9)
_TOKENS = 48
_VOCABULARY = 1000


def entry(name: str, size: int | None = None, kind: str | None = None) -> MethodEntry:
    return MethodEntry(name, None if name == "plain" else "plain", size, kind, name)


def run_entry(methods: Sequence[MethodEntry], settings: Sequence[Setting], prompts: Sequence[str]) -> RunEntry:
    return RunEntry(
        settings={
            "target": "SmolLM2-135M-Instruct",
            "draft": "ngram",
            "dtype": "fp32",
            "device": "cpu",
            "max_tokens": _TOKENS,
            "prompt_tokens": 128,
            "sources": ["built-in"],
            "repeats": 1,
            "seed": 0,
        },
        machine={
            "cpu": "Intel(R) Xeon(R) Processor @ 2.70GHz",
            "cores": 2,
            "threads": 2,
            "memory_gib": 15.6,
            "gpu": None,
            "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
            "commit": "c500a1b",
        },
        methods=tuple(methods),
        sampling=tuple(settings),
        prompts=tuple(prompts),
    )


def result(
    method: str,
    prompt: str = "p1",
    seconds: float | None = 1.0,
    *,
    setting: Setting = GREEDY,
    category: str = "chat",
    repeat: int = 0,
    tokens: Sequence[int] = tuple(range(11)),
    passes: int | None = 11,
) -> Result:
    """A request whose first token came after 0.1 s and the others one by one in `seconds`; None is all at once."""
    later = 0 if seconds is None else len(tokens) - 1
    step = (seconds or 0.0) / max(later, 1)
    return Result(
        method=method,
        setting=setting,
        prompt=prompt,
        category=category,
        repeat=repeat,
        prompt_tokens=20,
        token_ids=tuple(tokens),
        counts=(len(tokens) - later, *[1] * later),
        times=tuple(0.1 + step * index for index in range(later + 1)),
        prefill_seconds=0.09,
        passes=passes,
        rows=passes,
        finish="length",
    )


def results(
    per_category: int = 2,
    settings: Sequence[Setting] = (GREEDY, SAMPLED),
    methods: Sequence[tuple[str, int | None, str | None, float]] = METHODS,
    seed: int = 0,
) -> Results:
    """A whole run: methods as fast as `METHODS` says, give or take."""
    rng = random.Random(seed)
    prompts = [(f"{category}-{number}", category) for number in range(per_category) for category in CATEGORIES]
    entries = [entry(*method[:3]) for method in methods]
    made = Results(run_entry(entries, settings, [name for name, _ in prompts]))
    for setting in settings:
        for prompt, category in prompts:
            tokens = tuple(rng.randrange(_VOCABULARY) for _ in range(_TOKENS))
            pace = rng.uniform(0.038, 0.052)
            for name, size, _, speed in methods:
                seconds = pace * (_TOKENS - 1) / (speed * rng.uniform(0.9, 1.1))
                made.results.append(_request(name, size, prompt, category, setting, tokens, seconds, rng))
    made.rounds.append(round_entry(64, seed))
    return made


def _request(
    name: str,
    size: int | None,
    prompt: str,
    category: str,
    setting: Setting,
    tokens: tuple[int, ...],
    seconds: float,
    rng: random.Random,
) -> Result:
    passes = len(tokens) if size is None else round(len(tokens) / rng.uniform(1.7, 2.6))
    made = result(name, prompt, seconds, setting=setting, category=category, tokens=tokens, passes=passes)
    if name == "transformers":
        return replace(made, passes=None, rows=None, prefill_seconds=None)
    if size is None:
        return made
    visits = [passes]
    accepted = []
    for _ in range(4):
        ranks = [round(visits[-1] * share * rng.uniform(0.6, 1.2)) for share in (0.4, 0.12, 0.05)]
        accepted.append(tuple(ranks))
        visits.append(sum(ranks))
    return replace(made, visits=tuple(visits[:-1]), accepted=tuple(accepted))


WORDS = (
    " the",
    "\n",
    "",
    " ",
    "<b>",
    "&",
    " Wissenschaft",
    "漢字",
    " internationalization-and-more",
    "\x00",
    "\u202e",
    "🙂",
)


def round_entry(size: int, seed: int = 0) -> RoundEntry:
    """A random tree with words that are hard to draw."""
    rng = random.Random(seed)
    parents = (-1, *(max(0, node - 1 - int(rng.expovariate(0.12))) for node in range(1, size)))
    words = tuple(rng.choice(WORDS) for _ in range(size))
    path, children = [], [node for node in range(1, size) if parents[node] == 0]
    while children and len(path) < 6:
        path.append(rng.choice(children))
        children = [node for node in range(1, size) if parents[node] == path[-1]]
    return RoundEntry("optimal:64x8", "chat-0", parents, words, tuple(path), " sky")


def fault(method: str, prompt: str = "chat-0", setting: Setting = GREEDY) -> Finding:
    detail = "token 7 is 'blue' <b>& not 'green'; the target finds it 3.1 less likely"
    return Finding(method, setting, prompt, 0, "wrong tokens", detail)


def near_tie(method: str, prompt: str = "chat-1", setting: Setting = GREEDY) -> Finding:
    return Finding(method, setting, prompt, 0, "near tie", "token 12: two tokens are 0.0001 apart")
