"""One request by one method: run, counted and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sequoia.errors import SequoiaError
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.method import Method
from sequoia.measure.bench.records import Result, RoundEntry, Setting
from sequoia.measure.bench.shared import left_alone
from sequoia.measure.collector import without_collector
from sequoia.params import SamplingParams
from sequoia.speculate.session import Round
from sequoia.speculate.stats import Stats


@dataclass(frozen=True)
class Request:
    """What a method is asked for."""

    prompt: str  # id
    category: str
    token_ids: tuple[int, ...]
    setting: Setting
    repeat: int
    params: SamplingParams


@dataclass
class Recorder:
    """The `emit` of a request: counts and times what comes, whatever the method makes of it itself."""

    clock: PassClock
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    first_token_passes: int = 0  # of the target, before the first emission
    stats: Stats | None = None  # of the rounds, where the method emits them
    best_round: Round | None = None  # the one most worth drawing

    def __call__(self, emitted: Sequence[int] | Round) -> None:
        # Made into numbers first: those of a GPU are not decided before they are here.
        token_ids = [int(token) for token in (emitted.token_ids if isinstance(emitted, Round) else emitted)]
        now = self.clock.now()
        if isinstance(emitted, Round):
            self._add_round(emitted)
        if token_ids:
            self.first_token_passes = self.first_token_passes if self.counts else self.clock.passes
            self.token_ids += token_ids
            self.counts.append(len(token_ids))
            self.times.append(now)

    def _add_round(self, round_: Round) -> None:
        self.stats = self.stats or Stats()
        self.stats.add(round_)
        if self.best_round is None or _worth(round_) > _worth(self.best_round):
            self.best_round = round_


def _worth(round_: Round) -> tuple[int, bool]:
    """More is more worth drawing: a longer accepted path, then one that leaves the first children."""
    ranks = round_.tree.shape.ranks
    return len(round_.verdict.path), any(ranks[node] for node in round_.verdict.path)


def run_request(
    method: Method, request: Request, clock: PassClock, eos_ids: frozenset[int]
) -> tuple[Result, Round | None]:
    """The result, and the round most worth drawing if the method emits rounds.

    Raises:
        SequoiaError: the method raised something; it is named, and its error kept as the cause.
        UsageError: it changed what other methods run with.
    """
    recorder = Recorder(clock)
    with without_collector(), left_alone(f"method {method.name}"):
        clock.start(len(request.token_ids))
        try:
            method.generate(list(request.token_ids), request.params, recorder)
        except (Exception, SystemExit) as error:
            raise SequoiaError(f"method {method.name} failed on prompt {request.prompt}: {_reason(error)}") from error
    return _result(method, request, recorder, eos_ids), recorder.best_round


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, SequoiaError):
        return text
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{described.rstrip('.')}. Mend it; --debug shows where it was raised."


def _result(method: Method, request: Request, recorder: Recorder, eos_ids: frozenset[int]) -> Result:
    clock, stats = recorder.clock, recorder.stats
    unseen = method.own_model and not clock.seen
    return Result(
        method=method.name,
        setting=request.setting,
        prompt=request.prompt,
        category=request.category,
        repeat=request.repeat,
        prompt_tokens=len(request.token_ids),
        token_ids=tuple(recorder.token_ids),
        counts=tuple(recorder.counts),
        times=tuple(recorder.times),
        prefill_seconds=clock.prefill_seconds,
        passes=None if unseen else clock.passes,
        rows=None if unseen else clock.rows,
        first_token_passes=None if unseen else recorder.first_token_passes,
        finish=_finish(recorder.token_ids, request.params.max_tokens, eos_ids),
        drafted_tokens=None if stats is None else stats.drafted_tokens,
        visits=() if stats is None else tuple(stats.visits),
        accepted=() if stats is None else tuple(map(tuple, stats.accepted)),
    )


def _finish(token_ids: Sequence[int], max_tokens: int, eos_ids: frozenset[int]) -> str:
    if token_ids and token_ids[-1] in eos_ids:
        return "stop"
    return "length" if len(token_ids) >= max_tokens else "early"


def drawn(round_: Round, request: Request, method: str, word: Callable[[int], str]) -> RoundEntry:
    """The round as words."""
    return RoundEntry(
        method=method,
        prompt=request.prompt,
        parents=round_.tree.shape.parents,
        words=tuple(map(word, round_.tree.tokens.tolist())),
        path=round_.verdict.path,
        next_word=word(round_.verdict.next_token),
    )


def worth(entry: RoundEntry) -> tuple[int, bool]:
    """As for rounds, so that a resumed run goes on with the best one."""
    first_children = {parent: node for node, parent in reversed(list(enumerate(entry.parents)))}
    return len(entry.path), any(first_children[entry.parents[node]] != node for node in entry.path)
