"""What happened in the rounds, counted by depth and rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from sequoia.speculate.session import Round
from sequoia.tree.guard import GuardEvent
from sequoia.tree.option import Kind, Option


@dataclass
class KindCount:
    """Rounds of one kind whose times tell how fast that kind is."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def seconds_per_round(self) -> float:
        return self.seconds / self.rounds

    def add(self, tokens: int, seconds: float) -> None:
        self.rounds += 1
        self.tokens += tokens
        self.seconds += seconds

    def merge(self, other: KindCount) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.seconds += other.seconds


@dataclass
class PlanRun:
    """A request that ran by a plan: what was predicted, and what came of it."""

    option: Option  # what the plan chose, with its prediction
    kinds: dict[Kind, KindCount] = field(default_factory=dict)
    """The kinds that ran, in the order they came. Left out are the first round, which reads the prompt, and rounds
    whose tree was cut at the end of a request."""
    events: list[GuardEvent] = field(default_factory=list)
    """What the guard changed."""

    @property
    def measured(self) -> KindCount | None:
        """What the prediction is held against: the rounds of the chosen kind, if there were any."""
        return self.kinds.get(self.option.kind)


@dataclass(frozen=True)
class Gain:
    """What drafting came to in one request."""

    plain_tokens: int  # that it is held against
    tokens_per_round: float
    speedup: float  # tokens per second over those of plain decoding


@dataclass
class Stats:
    """Counts of one or more requests.

    Identity: emitted_tokens = accepted_tokens + rounds − cut_tokens.
    """

    rounds: int = 0
    emitted_tokens: int = 0
    drafted_tokens: int = 0  # proposed nodes, roots not counted
    accepted_tokens: int = 0  # proposed nodes that verification accepted, cut ones included
    cut_tokens: int = 0  # decided tokens dropped after end-of-text, a stop string or the length limit
    visits: list[int] = field(default_factory=list)  # by depth: inner nodes that verification came to
    accepted: list[list[int]] = field(
        default_factory=list
    )  # by depth and rank: visits whose accepted child had that rank
    first_round_seconds: float = 0.0  # the prompt's pass and the first round, which are one
    seconds: float = 0.0  # all rounds
    plan: PlanRun | None = None  # of a request that ran by one
    plain: KindCount = field(default_factory=KindCount)  # rounds that were plain so that the others can be compared

    @property
    def mean_accepted_length(self) -> float:
        """Tokens decided per round, the next token included: plain decoding has 1."""
        return (self.accepted_tokens + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted_tokens / self.seconds if self.seconds else 0.0

    @property
    def gain(self) -> Gain | None:
        """Of the rounds after the plain ones on those; None where either are missing.

        The first round reads the prompt and counts as neither.
        """
        rounds = self.rounds - self.plain.rounds - 1
        seconds = self.seconds - self.plain.seconds - self.first_round_seconds
        if not self.plain.rounds or rounds < 1 or seconds <= 0:
            return None
        tokens = self.accepted_tokens + rounds
        return Gain(self.plain.rounds, tokens / rounds, self.plain.seconds_per_round * tokens / seconds)

    def add(self, round_: Round) -> None:
        shape, verdict = round_.tree.shape, round_.verdict
        self.rounds += 1
        self.emitted_tokens += len(round_.token_ids)
        self.drafted_tokens += shape.size - 1
        self.accepted_tokens += len(verdict.path)
        self.cut_tokens += len(verdict.path) + 1 - len(round_.token_ids)
        for depth, node in enumerate((0, *verdict.path)):
            if shape.children(node):
                self._at(depth)
                self.visits[depth] += 1
        for node in verdict.path:
            self._count(shape.depths[node] - 1, shape.ranks[node])

    def merge(self, other: Stats) -> None:
        """Add another request's counts and seconds; what its plan predicted stays with it."""
        for name in ("rounds", "emitted_tokens", "drafted_tokens", "accepted_tokens", "cut_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_round_seconds += other.first_round_seconds
        self.seconds += other.seconds
        self.plain.merge(other.plain)
        for depth, (visits, ranks) in enumerate(zip(other.visits, other.accepted, strict=True)):
            self._at(depth)
            self.visits[depth] += visits
            for rank, count in enumerate(ranks):
                self._count(depth, rank, count)

    def cut(self, tokens: int) -> None:
        """Take back tokens that were emitted but fell behind a stop string."""
        self.emitted_tokens -= tokens
        self.cut_tokens += tokens

    def _at(self, depth: int) -> None:
        while len(self.visits) <= depth:
            self.visits.append(0)
            self.accepted.append([])

    def _count(self, depth: int, rank: int, count: int = 1) -> None:
        ranks = self.accepted[depth]
        ranks.extend([0] * (rank + 1 - len(ranks)))
        ranks[rank] += count
