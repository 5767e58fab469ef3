"""Acceptance measured along the target's own texts: teacher-forced, in closed form, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from sequoia.errors import UsageError
from sequoia.measure.judge import Judge
from sequoia.measure.renewal import TextRates
from sequoia.measure.rolling import Reach
from sequoia.measure.samples import Samples
from sequoia.measure.text_store import TextStore, plain_params
from sequoia.measure.texts import Ask, batches, plan_asks, write_texts
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import LanguageModel
from sequoia.params import SamplingParams
from sequoia.planning.pair import pair_of
from sequoia.speculate.session import Draft
from sequoia.speculate.verify import VERIFIERS, Verifier
from sequoia.tree.checks import require_integer

Progress = Callable[[int, int, str], None]
"""(texts done, texts in all, what was done last)"""


def measure(
    target: LanguageModel,
    draft: Draft,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    *,
    verifier: Verifier = VERIFIERS["sequoia"],
    eos_ids: frozenset[int] | None = None,
    samples: int = 200,
    tokens: int = 64,
    depth: int = 12,
    ranks: int = 16,
    seed: int = 0,
    names: Mapping[str, Any] | None = None,
    store: str | PathLike[str] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Samples:
    """The target writes `samples` texts, and at each place of each the draft's children are judged.

    Args:
        params: all of it counts but `max_tokens`, `seed` and `stop`.
        prompts: token ids, each used as often as the others; at temperature 0 once.
        verifier: "sequoia" or "sampler_match"; at temperature 0 every verifier does the same.
        eos_ids: end a text; by default the target's own.
        tokens: most tokens of a text.
        depth: levels that a draft with drift is rolled from each root.
        ranks: children of a node.
        names: what decides the models' numbers, for the store; by default their names and number formats.
        store: folder in which finished parts are kept, and from which an interrupted measurement goes on.

    Raises:
        UsageError: a number is out of range, there are no prompts, one is too long, or the verifier is another.
        ModelError: a model's logits are no distribution.
        FileError: the store cannot be read or written.
    """
    for name, value in (("samples", samples), ("tokens", tokens), ("depth", depth), ("ranks", ranks)):
        require_integer(name, value, least=1)
    if not prompts:
        raise UsageError("no prompts: at least one is needed to measure acceptance on. Give some.")
    params = replace(params, max_tokens=tokens, seed=seed, stop=(), logprobs=None)
    judge = Judge(target, draft, params, verifier, Reach(depth, ranks))
    eos_ids = _eos_ids(target) if eos_ids is None else eos_ids
    names = _names(target, draft) if names is None else names
    facts = {"verifier": judge.verifier.name, "depth": depth, "ranks": ranks}
    texts_key = {"names": dict(names), "params": plain_params(params), "eos_ids": sorted(eos_ids)}
    kept = TextStore(None if store is None else Path(store), texts_key, facts)

    asks = plan_asks(prompts, samples, params.temperature)
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(ask.prompt for ask in asks))}
    texts: list[TextRates] = []
    for ask, rates in _measured(judge, asks, eos_ids, kept):
        texts.append(replace(rates, prompt=numbers[ask.prompt]))
        progress(len(texts), len(asks), f"{len(rates.rates)} tokens")
    sizes = {"texts": len(texts), "prompts": len(numbers), "tokens": sum(len(text.rates) for text in texts)}
    sampling = {"temperature": params.temperature, "seed": seed}
    return Samples(
        tuple(texts), {"method": "computed along the target's own texts", **names, **sampling, **facts, **sizes}
    )


def _measured(
    judge: Judge, asks: Sequence[Ask], eos_ids: frozenset[int], kept: TextStore
) -> Iterator[tuple[Ask, TextRates]]:
    """Each text with its rates, in order: from the store, or measured and put there."""
    known = kept.texts()
    for batch in batches(asks, judge.params.max_tokens, slots=_slots(judge.target)):
        missing = [ask for ask in batch if ask not in known]
        for text in write_texts(judge.target, judge.params, missing, eos_ids):
            kept.add(text)
            known[text.ask] = text
        for _, group in groupby(batch, key=lambda ask: ask.prompt):
            texts = [known[ask] for ask in group]
            found = {text.ask: kept.rates(text) for text in texts}
            for text, rates in judge.rates([text for text in texts if found[text.ask] is None]):
                kept.add_rates(text, rates)
                found[text.ask] = rates
            yield from ((ask, rates) for ask, rates in found.items() if rates is not None)


def _slots(target: LanguageModel) -> int | None:
    """Of one cache, where memory is planned."""
    return target.context_length if isinstance(target, CausalLM) and target.memory is not None else None


def _eos_ids(target: LanguageModel) -> frozenset[int]:
    return target.loaded.eos_ids if isinstance(target, CausalLM) else frozenset()


def _names(target: LanguageModel, draft: Draft) -> dict[str, Any]:
    """The number of threads moves last bits only."""
    if isinstance(target, CausalLM):
        return {name: value for name, value in pair_of(target, draft).items() if name != "threads"}
    return {"target": type(target).__name__, "draft": type(draft).__name__}
