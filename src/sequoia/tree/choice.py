"""The choice of what to run: tree, chain or off, by measured time per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sequoia.params import SamplingParams
from sequoia.tree.candidates import Costs, Search
from sequoia.tree.checks import require_integer
from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile
from sequoia.tree.option import Option, Prediction, fastest, kind_of
from sequoia.tree.plan import BatchOption, Plan, law_of
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

Predict = Callable[[TreeShape], tuple[float, float]]
"""Tokens per round of a shape and their standard error: a simulation along texts, say."""

_SHORTLIST = 8
_SPREAD_PER_DEVIATION = 1.349  # the interquartile range of a normal distribution over its standard deviation


def plan(
    profile: AcceptanceProfile,
    latency: LatencyProfile,
    *,
    params: SamplingParams | Mapping[str, Any],
    predict: Predict | None = None,
    max_size: int = 128,
    max_depth: int = 16,
    sizes: Iterable[int] | None = None,
    context: int | None = None,
    batch: int = 1,
) -> Plan:
    """The best tree, the best chain and plain decoding by time per token, and the best tree and chain of each size.

    Args:
        params: the sampling parameters that the profile was measured with.
        predict: replaces the profile's expected tokens, with no error, for the best tree of each size, for the best
            few of all and for the chains; the choice is then made among these.
        max_size: most nodes, the root included; also at most the rows that were timed.
        max_depth: most edges from the root.
        sizes: sizes that a tree may have; by default those whose pass was measured, since between them a time may jump.
        context: tokens of context to charge target passes for; the smallest measured by default.
        batch: requests that share their passes.

    Raises:
        UsageError: a number is out of range.
    """
    limit = min(require_integer("max_size", max_size, least=1), latency.rows[-1])
    depth = require_integer("max_depth", max_depth, least=0)
    require_integer("batch", batch, least=1)
    judge = _Judge(profile, latency, predict, context, batch)
    chains: list[Option] = []
    trees: list[Option] = []
    if latency.draft:
        chains = [judge.option(TreeShape.chain(edges)) for edges in range(1, min(depth, limit - 1) + 1)]
        allowed = _allowed(_timed_sizes(latency, batch) if sizes is None else sizes, limit)
        trees = _best_of_each_size(map(judge.option, _shortlist(judge, allowed, depth)))
    options = [judge.option(TreeShape.root_only()), *(fastest(kind) for kind in (chains, trees) if kind)]
    law = law_of(params) if isinstance(params, SamplingParams) else params
    return Plan(law, profile, tuple(options), (*trees, *chains))


def batch_options(
    profile: AcceptanceProfile,
    latency: LatencyProfile,
    batches: Sequence[int],
    *,
    predict: Predict | None = None,
    max_size: int = 128,
    max_depth: int = 16,
    context: int | None = None,
) -> tuple[BatchOption, ...]:
    """What would be best for requests that share their passes, on paper: rows times batch on the latency curve.

    Each request's own context, which a real pass also reads, is charged once; where batch and tree are large, that
    makes all options look faster than they are, and plain decoding the most.

    Raises:
        UsageError: a number is out of range.
    """
    remembered = predict and cache(predict)
    limits: dict[str, Any] = {"max_size": max_size, "max_depth": max_depth, "context": context}
    found = []
    for batch in batches:
        options = plan(profile, latency, params={}, predict=remembered, batch=batch, **limits).options
        rows = fastest(options).shape.size * batch
        found.append(BatchOption(batch, options, extrapolated=rows > latency.rows[-1]))
    return tuple(found)


@dataclass(frozen=True)
class _Judge:
    """Says what a shape is predicted to give."""

    profile: AcceptanceProfile
    latency: LatencyProfile
    predict: Predict | None
    context: int | None
    batch: int

    def option(self, shape: TreeShape) -> Option:
        if shape.size == 1:
            tokens, error = 1.0, 0.0
        elif self.predict:
            tokens, error = self.predict(shape)
        else:
            tokens, error = expected_tokens(shape, self.profile), 0.0
        seconds = self.latency.round_seconds(shape, self.context, self.batch)
        spread = self.latency.round_spread(shape, self.context, self.batch)
        return Option(kind_of(shape), shape, Prediction(tokens, error, seconds, spread / _SPREAD_PER_DEVIATION))


def _shortlist(judge: _Judge, sizes: Sequence[int], depth: int) -> list[TreeShape]:
    """By the profile the fastest tree of each size, and the fastest few of all."""
    costs = Costs.of(judge.latency, judge.context, judge.batch)
    search = Search(judge.profile, costs, sizes, judge.latency.draft)
    contenders = search.run(depth)
    of_size = {contender.size: contender for contender in reversed(contenders)}
    return list(dict.fromkeys(map(search.shape, [*of_size.values(), *contenders[:_SHORTLIST]])))


def _best_of_each_size(options: Iterable[Option]) -> list[Option]:
    by_size: dict[int, list[Option]] = {}
    for option in options:
        by_size.setdefault(option.shape.size, []).append(option)
    return [fastest(by_size[size]) for size in sorted(by_size)]


def _timed_sizes(latency: LatencyProfile, batch: int) -> set[int]:
    """Sizes whose pass was timed, for one request or for the batch."""
    return {*latency.rows, *(rows // batch for rows in latency.rows)}


def _allowed(sizes: Iterable[int], limit: int) -> list[int]:
    return sorted({size for size in sizes if 2 < require_integer("a size", size, least=0) <= limit})
