"""The comparison: all methods on each prompt in turn, resumable, every answer checked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sequoia.engine import Engine
from sequoia.errors import SequoiaError, UsageError
from sequoia.measure.bench.checker import Checker
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.job import Job, turned
from sequoia.measure.bench.machine import machine
from sequoia.measure.bench.method import Method
from sequoia.measure.bench.methods import build_methods
from sequoia.measure.bench.records import Result, Results, ResultsFile, RoundEntry, RunEntry, Setting
from sequoia.measure.bench.request import Request, drawn, run_request, worth
from sequoia.measure.bench.resume import open_results
from sequoia.measure.collector import long_lived
from sequoia.measure.prompts import PromptRecord
from sequoia.model.causal_lm import CausalLM
from sequoia.params import SamplingParams
from sequoia.planning.pair import draft_name
from sequoia.speculate.session import Round
from sequoia.text import encode_prompt
from sequoia.tree.checks import require_integer

__all__ = ["Job", "run_bench"]

WARM_UP = "Before anything is measured, the engine reads this sentence and goes on with it for a moment."
_WARM_UP_TOKENS = 8

Notice = Callable[[str], None]
Progress = Callable[[int, int, str], None]
"""(requests done, requests in all, what was done last)"""


def run_bench(
    engine: Engine,
    prompts: Sequence[PromptRecord],
    job: Job,
    folder: Path,
    *,
    prompt_tokens: int = 128,
    sources: Sequence[str] = (),
    notice: Notice = lambda text: None,
    progress: Progress = lambda done, total, what: None,
) -> Results:
    """Measure what is missing in `folder`, which is created or gone on from.

    Args:
        prompt_tokens: texts are cut to these.
        sources: where the prompts come from, as the results are to name it.
        notice: called with a line of text before something slow.
        progress: called after each request.

    Raises:
        UsageError: a method or prompt does not fit the models, a number is out of range, or the folder holds another
            run.
        FileError: a file is missing, damaged or not writable.
        SequoiaError: a method failed; it is named.
    """
    require_integer("prompt_tokens", prompt_tokens, least=1)
    _require_two_models(engine)
    token_ids = _encoded(engine, prompts, prompt_tokens, job.max_tokens)
    with PassClock(engine.target) as clock, long_lived():
        methods = build_methods(job.methods, engine, clock)
        settings = _settings(engine, job, token_ids, prompt_tokens, sources)
        file = ResultsFile(folder)
        entries = tuple(method.entry for method in methods)
        run = RunEntry(settings, machine(engine.target.device), entries, job.settings, tuple(token_ids))
        with file.locked():
            results = open_results(file, run)
            comparison = _Comparison(engine, methods, job, clock, file, results, token_ids)
            comparison.run(prompts, notice, progress)
    return results


class _Comparison:
    """A run under way: its methods, and what it has found so far."""

    def __init__(
        self,
        engine: Engine,
        methods: Sequence[Method],
        job: Job,
        clock: PassClock,
        file: ResultsFile,
        results: Results,
        token_ids: Mapping[str, Sequence[int]],
    ) -> None:
        self._engine, self._methods, self._job, self._clock = engine, methods, job, clock
        self._file, self._results, self._token_ids = file, results, token_ids
        self._eos_ids = engine.target.loaded.eos_ids
        self._checker = Checker(engine, methods, token_ids, job.max_tokens)
        self._checker.remember(results.results, results.findings)
        self._best = {entry.method: worth(entry) for entry in results.rounds}
        self._seconds = sum(result.times[-1] for result in results.results if result.times)

    def run(self, prompts: Sequence[PromptRecord], notice: Notice, progress: Progress) -> None:
        """Everything that is missing, prompt by prompt, until time is up."""
        done, total = len(self._results.results), len(prompts) * self._requests_per_prompt
        if done == total or (done and self._is_over(0.0)):
            return
        if done:
            notice(f"going on after {done} of {total} requests")
        notice("warming up")
        self._warm_up()
        started = time.monotonic()
        for index, prompt in enumerate(prompts):
            if self._results.results and self._is_over(time.monotonic() - started):
                return
            self._measure(self._job.requests(prompt, self._token_ids[prompt.id], index), index, total, progress)

    @property
    def _requests_per_prompt(self) -> int:
        return len(self._methods) * len(self._job.settings) * self._job.repeats

    def _is_over(self, seconds: float) -> bool:
        return self._job.seconds is not None and self._seconds + seconds >= self._job.seconds

    def _warm_up(self) -> None:
        """Each method once under each setting: what is slow only at first, or does not work, is so here."""
        longest = max(map(len, self._token_ids.values()))
        requests = [_warm_up_request(self._engine, self._job, setting, longest) for setting in self._job.settings]
        for method in self._methods:
            method.prepare(longest + self._job.max_tokens)
            for request in requests:
                result, _ = run_request(method, request, self._clock, self._eos_ids)
                if not result.token_ids:
                    raise SequoiaError(f"method {method.name} emits no token, and at least one is needed. Mend it.")

    def _measure(self, requests: Sequence[Request], index: int, total: int, progress: Progress) -> None:
        """All methods on one prompt, in an order that turns from prompt to prompt."""
        known = {result.key for result in self._results.results}
        new: list[Result] = []
        rounds: list[RoundEntry] = []
        for turn, request in enumerate(requests):
            for method in turned(self._methods, index * len(requests) + turn, self._job.seed):
                if (method.name, request.setting, request.prompt, request.repeat) in known:
                    continue
                result, round_ = run_request(method, request, self._clock, self._eos_ids)
                new.append(result)
                rounds += self._worth_drawing(round_, request, method)
                progress(len(known) + len(new), total, f"{method.name} on {request.prompt}")
        if new:
            self._store(new, rounds)

    def _worth_drawing(self, round_: Round | None, request: Request, method: Method) -> list[RoundEntry]:
        """The round, if it is the best of its method so far."""
        if round_ is None or method.tree_size is None:
            return []
        entry = drawn(round_, request, method.name, self._word)
        if worth(entry) <= self._best.get(method.name, (0, False)):
            return []
        self._best[method.name] = worth(entry)
        return [entry]

    def _store(self, new: Sequence[Result], rounds: Sequence[RoundEntry]) -> None:
        """Results come last in the file: where they are, what was found out about them is there too."""
        findings = self._checker.check(new)
        self._file.append([*rounds, *findings, *new])
        self._results.rounds += rounds
        self._results.findings += findings
        self._results.results += new

    def _word(self, token: int) -> str:
        tokenizer = self._engine.tokenizer
        word = str(token) if tokenizer is None else str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return word.replace("\r", "").replace("\n", "↵")


def _warm_up_request(engine: Engine, job: Job, setting: Setting, longest: int) -> Request:
    """No longer than those that are measured, so that it fits wherever they do."""
    if engine.tokenizer is None:
        token_ids = [token % engine.target.vocab_size for token in range(1, 9)]
    else:
        token_ids = encode_prompt(engine.tokenizer, WARM_UP, engine.target.vocab_size)
    max_tokens = min(_WARM_UP_TOKENS, job.max_tokens)
    params = SamplingParams(max_tokens=max_tokens, temperature=setting.temperature, top_p=setting.top_p, seed=0)
    return Request("warm-up", "warm-up", tuple(token_ids[:longest]), setting, 0, params)


def _require_two_models(engine: Engine) -> None:
    draft = getattr(engine.draft, "model", None)
    if not isinstance(draft, CausalLM) or draft.loaded.bits:  # integers are no modules' own
        return
    if draft.loaded.model is engine.target_model:
        raise UsageError("target and draft are one model object, so that their passes cannot be told apart. Load two.")


def _encoded(
    engine: Engine, prompts: Sequence[PromptRecord], prompt_tokens: int, max_tokens: int
) -> dict[str, list[int]]:
    """Token ids by prompt, each of which leaves room for an answer."""
    if not prompts:
        raise UsageError("there are no prompts, and at least one is needed. Give some with --prompts.")
    vocab_size, context = engine.target.vocab_size, engine.target.context_length
    token_ids = {prompt.id: prompt.token_ids(engine.tokenizer, vocab_size, prompt_tokens) for prompt in prompts}
    if len(token_ids) < len(prompts):
        raise UsageError("two prompts have the same id, and results are kept by id. Give each its own.")
    for name, ids in token_ids.items():
        if context is not None and len(ids) + max_tokens > context:
            raise UsageError(
                f"prompt {name} has {len(ids)} tokens and {max_tokens} are to follow, but the target's context is "
                f"{context}. Lower --max-tokens or --prompt-tokens, or leave the prompt out."
            )
    return token_ids


def _settings(
    engine: Engine, job: Job, token_ids: Mapping[str, Sequence[int]], prompt_tokens: int, sources: Sequence[str]
) -> dict[str, Any]:
    loaded = engine.target.loaded
    return {
        "target": loaded.name,
        "draft": draft_name(engine.draft),
        "dtype": loaded.weights,
        "device": str(engine.target.device),
        "max_tokens": job.max_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": job.repeats,
        "seed": job.seed,
        "sources": [str(source) for source in sources],
        "prompts_digest": hashlib.sha256(repr(list(token_ids.items())).encode()).hexdigest()[:12],
    }
