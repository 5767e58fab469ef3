"""Tuning: acceptance and times measured for a pair of models, and the plans that follow."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

from sequoia.engine import Engine
from sequoia.errors import UsageError
from sequoia.measure.acceptance import measure
from sequoia.measure.bench.machine import machine
from sequoia.measure.latency import measure_latency
from sequoia.measure.prompts import PromptRecord
from sequoia.measure.round_parts import Clock
from sequoia.measure.runs import RunCounts, merged
from sequoia.measure.samples import Samples
from sequoia.measure.texts import plan_asks
from sequoia.params import SamplingParams
from sequoia.tree.checks import require_integer
from sequoia.tree.choice import Predict, batch_options
from sequoia.tree.choice import plan as planned
from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile
from sequoia.tree.plan import BatchOption, Plan, PlanFile, describe_law, law_of
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

ACCEPTING, TIMING, PLANNING = "accepting", "timing", "planning"
"""The parts of a tuning, in their order."""

Progress = Callable[[str, int, int], None]
"""(part, done of it, all of it): texts, sweeps through the sizes, and plans."""
Notice = Callable[[str], None]


@dataclass(frozen=True)
class TuneSettings:
    """What is measured and planned for.

    Args:
        params: a plan is made for each; what they say of length, noise and stop strings does not matter.
        samples: texts that acceptance is measured along, for each of the parameters.
        tokens: most tokens of a text.
        prompt_tokens: texts to continue are cut to these; chat messages are never cut.
        depth, ranks: of the nodes that acceptance is measured for.
        seed: of the texts.
        contexts: tokens of context that passes are timed at; plans are made for the first.
        seconds: of timing, about.
        max_size, max_depth: of the trees that are planned.
        batch: numbers of requests at once that are planned for on paper, with the first of the parameters.

    Raises:
        UsageError: a value is out of its range, or two of the parameters give the same distributions.
    """

    params: tuple[SamplingParams, ...]
    samples: int = 200
    tokens: int = 128
    prompt_tokens: int = 128
    depth: int = 12
    ranks: int = 16
    seed: int = 0
    contexts: tuple[int, ...] = (128, 1024)
    seconds: float = 60.0
    max_size: int = 128
    max_depth: int = 16
    batch: tuple[int, ...] = (1, 4, 16)

    def __post_init__(self) -> None:
        for name in ("samples", "tokens", "prompt_tokens", "depth", "ranks", "max_size", "max_depth"):
            require_integer(name, getattr(self, name), least=1)
        require_integer("seed", self.seed, least=0)
        for count in self.batch:
            require_integer("batch", count, least=1)
        if not self.params:
            raise UsageError("there is nothing to plan for. Give at least one temperature.")
        laws = [law_of(params) for params in self.params]
        if twice := next((law for index, law in enumerate(laws) if law in laws[:index]), None):
            raise UsageError(f"{describe_law(twice)} is asked for twice. Leave one of them out.")

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it; of the parameters what shapes the distribution."""
        values = {name: value for name, value in vars(self).items() if name != "params"}
        return {**values, "params": [law_of(params) for params in self.params]}


def tune(
    engine: Engine,
    prompts: Sequence[PromptRecord],
    settings: TuneSettings,
    store: Path | None = None,
    progress: Progress = lambda part, done, total: None,
    *,
    sources: Sequence[str] = (),
    runs: Sequence[RunCounts] = (),
    notice: Notice = lambda line: None,
    clock: Clock | None = None,
) -> PlanFile:
    """Measure how often the pair agrees and how long its passes take, and plan for the least time per token.

    Args:
        store: a folder that finished parts are kept in, see `tune_store.kept_parts`; an interrupted tuning with the
            same arguments goes on from it.
        sources: where the prompts come from, as the file is to name it.
        runs: counts of earlier answers, merged into the profiles of their parameters.
        notice: called with a line of text where what `store` holds is of no use.
        clock: what rounds are timed with, in place of the device's.

    Raises:
        UsageError: there are no prompts, or what is asked for does not fit the models or the runs.
        ModelError: a model's logits are no distribution.
        FileError: the store cannot be read or written.
    """
    _require_fitting(runs, engine, settings)
    token_ids = _encoded(engine, prompts, settings)
    samples = _measured(engine, token_ids, settings, store, progress)
    timings = measure_latency(
        engine,
        params=settings.params,
        contexts=settings.contexts,
        max_rows=settings.max_size,
        seconds=settings.seconds,
        text=list(chain.from_iterable(token_ids)),
        store=store,
        progress=lambda done, total: progress(TIMING, done, total),
        notice=notice,
        clock=clock,
    )
    latencies = [timings.profile(law, rising=engine.memory is not None) for law in (None, *range(len(settings.params)))]
    plans, batch = _planned(samples, latencies[1:], settings, runs, progress)
    data = {
        "prompts": list(map(str, sources)),
        "hash": prompts_hash(prompts),
        "count": len(prompts),
        "samples": settings.samples,
        "tokens": settings.tokens,
        "prompt_tokens": settings.prompt_tokens,
        "seed": settings.seed,
        "date": date.today().isoformat(),
    }
    return PlanFile(engine.pair, machine(engine.target.device), data, latencies[0], plans, batch)


def about(engine: Engine, prompts: Sequence[PromptRecord], settings: TuneSettings) -> dict[str, Any]:
    """All that decides what finished parts are worth to another run, as plain data."""
    here = machine(engine.target.device)
    kept = {name: here[name] for name in ("cpu", "gpu", "cores", "memory_gib", "versions")}
    return {"pair": engine.pair, "machine": kept, "prompts": prompts_hash(prompts), "settings": settings.plain}


def prompts_hash(prompts: Sequence[PromptRecord]) -> str:
    """Of their contents, in order."""
    contents = json.dumps([prompt.content for prompt in prompts], ensure_ascii=True)
    return hashlib.sha256(contents.encode()).hexdigest()[:12]


def _encoded(engine: Engine, prompts: Sequence[PromptRecord], settings: TuneSettings) -> list[list[int]]:
    if not prompts:
        raise UsageError("there are no prompts to measure acceptance on. Give some with --prompts.")
    vocab_size = engine.target.vocab_size
    return [prompt.token_ids(engine.tokenizer, vocab_size, settings.prompt_tokens) for prompt in prompts]


def _measured(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: TuneSettings, store: Path | None, progress: Progress
) -> list[Samples]:
    """Samples for each of the parameters."""
    counts = [len(plan_asks(prompts, settings.samples, params.temperature)) for params in settings.params]
    ranks = min(settings.ranks, engine.draft.start().proposable)
    samples: list[Samples] = []
    for index, params in enumerate(settings.params):
        tell = _from(sum(counts[:index]), sum(counts), progress)
        tell(0, 0, "")
        samples.append(
            measure(
                engine.target,
                engine.draft,
                params,
                prompts,
                verifier=engine.verifier,
                samples=settings.samples,
                tokens=settings.tokens,
                depth=settings.depth,
                ranks=ranks,
                seed=settings.seed,
                store=store,
                progress=tell,
            )
        )
    return samples


def _from(before: int, total: int, progress: Progress) -> Callable[[int, int, str], None]:
    """What tells of a part's progress where `before` texts of `total` were done in others."""
    return lambda done, _, what: progress(ACCEPTING, before + done, total)


def _planned(
    samples: Sequence[Samples],
    latencies: Sequence[LatencyProfile],
    settings: TuneSettings,
    runs: Sequence[RunCounts],
    progress: Progress,
) -> tuple[tuple[Plan, ...], tuple[BatchOption, ...]]:
    limits: dict[str, Any] = {"max_size": settings.max_size, "max_depth": settings.max_depth}
    plans: list[Plan] = []
    batch: tuple[BatchOption, ...] = ()
    for law, (params, found, latency) in enumerate(zip(settings.params, samples, latencies, strict=True)):
        progress(PLANNING, law, len(samples))
        ours = [run for run in runs if run.law == law_of(params)]
        profile, predict = _expectation(found, ours)
        plans.append(planned(profile, latency, params=params, predict=predict, **limits))
        if law == 0:
            batch = batch_options(profile, latency, settings.batch, predict=predict, **limits)
    progress(PLANNING, len(samples), len(samples))
    return tuple(plans), batch


def _expectation(samples: Samples, runs: Sequence[RunCounts]) -> tuple[AcceptanceProfile, Predict]:
    """The profile to plan with, and what shapes are predicted to give: as simulated along the texts, times what the
    runs make of the profile's own expectation."""
    measured = _with_facts(samples)
    profile = merged(measured, runs) if runs else measured

    def predict(shape: TreeShape) -> tuple[float, float]:
        tokens, error = samples.tokens_per_round(shape)
        change = expected_tokens(shape, profile) / expected_tokens(shape, measured) if runs else 1.0
        return tokens * change, min(error, tokens) * change

    return profile, predict


def _with_facts(samples: Samples) -> AcceptanceProfile:
    """The measured rates, which note their standard errors and the power law of rejection.

    One text alone says nothing of errors, and JSON has no infinity: no rate is wrong by more than 1.
    """
    profile, law = samples.profile(), samples.power_law
    errors = [[min(error, 1.0) for error in row] for row in profile.provenance["errors"]]
    facts: dict[str, Any] = {"errors": errors}
    if all(map(math.isfinite, law)):
        facts["power_law"] = law._asdict()
    return AcceptanceProfile(profile.rates, {**profile.provenance, **facts})


def _require_fitting(runs: Sequence[RunCounts], engine: Engine, settings: TuneSettings) -> None:
    """UsageError where a run is of another pair, or of parameters that are not planned for."""
    laws = [law_of(params) for params in settings.params]
    for run in runs:
        here = engine.pair
        if (run.target, run.draft) != (here["target"], here["draft"]):
            raise UsageError(
                f"a run is of {run.target} with draft {run.draft}, and this pair is {here['target']} with draft "
                f"{here['draft']}. Leave it out."
            )
        if run.law not in laws:
            raise UsageError(
                f"a run had {describe_law(run.law)}, and plans are made for {'; '.join(map(describe_law, laws))}. Plan "
                "for its parameters too, or leave it out."
            )
