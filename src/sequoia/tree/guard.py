"""Guard: watches what rounds really take, and steps down from a tree that does not pay here and now.

Which shape the next round has never changes the output's law, so the guard may decide by the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer
from sequoia.tree.option import Kind, Option
from sequoia.tree.shape import TreeShape


@dataclass(frozen=True)
class GuardSettings:
    """When the guard acts.

    Raises:
        UsageError: a value is out of its range.
    """

    window_rounds: int = 40
    """Rounds that the measured time per token is taken over."""
    margin: float = 0.05
    """How much slower than plain decoding is too slow, as a share."""
    patience: int = 8
    """Rounds in a row after which it must still be too slow."""
    probe_after_tokens: int = 64
    """Tokens after which the next better kind is tried again; each try that fails doubles them."""
    probe_rounds: int = 8
    """Rounds of such a try."""

    def __post_init__(self) -> None:
        for place in fields(self):
            if place.name != "margin":
                require_integer(place.name, getattr(self, place.name), least=2 if "rounds" in place.name else 1)
        if not 0 <= self.margin < 10:
            raise UsageError(f"margin must be a number of at least 0 and below 10, not {self.margin!r}.")


@dataclass(frozen=True)
class GuardEvent:
    """A change of what runs."""

    at_token: int  # tokens observed before it
    from_kind: Kind
    to_kind: Kind
    reason: str


class Guard:
    """Chooses the next round's shape by what past rounds took.

    A kind whose time per token stays worse than plain decoding's gives way to the next simpler one; to plain decoding
    at once where the tokens it got would not pay for the one between either. From time to time the next better kind is
    tried for a few rounds.

    What plain decoding takes is known from the plan until it runs. Later it is taken to be no slower than when it last
    ran; and if rounds have become faster since, faster by as much, because then the machine has.

    Args:
        options: fastest first, plain decoding last; those that are no faster than plain have no place here.
        plain_seconds_per_token: what the plan predicts for plain decoding.

    Raises:
        UsageError: the options do not end with the only "off", a kind comes twice, or the time is not above 0.
    """

    def __init__(
        self, options: Sequence[Option], plain_seconds_per_token: float, settings: GuardSettings | None = None
    ) -> None:
        self._options = _checked(options)
        if not plain_seconds_per_token > 0:
            raise UsageError(f"plain_seconds_per_token must be above 0, not {plain_seconds_per_token!r}.")
        self._settings = settings or GuardSettings()
        self._plain = float(plain_seconds_per_token)
        # What a round costs in tokens of plain decoding: those it must emit to pay.
        self._costs = [option.prediction.seconds_per_round / self._plain for option in self._options[:-1]] + [1.0]
        self._slow_rounds: int  # in a row
        self.restart()

    def restart(self) -> None:
        """Begin a new request with the best kind. Events are forgotten; what was learned of the machine stays."""
        self.events: list[GuardEvent] = []
        self._tokens = 0
        self._wait = self._settings.probe_after_tokens
        self._left: dict[int, _Window] = {}  # by place among the options: the last rounds of those stepped down from
        self._origin: int | None = None  # in a probe, the place it began from
        self._bar = 0.0  # in a probe, the seconds per token to beat
        self._begin(0)
        option = self._options[0]
        # The plan's word stands until rounds replace it one by one.
        for _ in range(self._settings.window_rounds):
            self._window.add(option.prediction.tokens_per_round, self._costs[0] * self._plain)
        self._is_first = False

    @property
    def shape(self) -> TreeShape:
        """The shape of the next round."""
        return self._options[self._place].shape

    @property
    def kind(self) -> Kind:
        """The kind of the next round."""
        return self._options[self._place].kind

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a finished round of the current kind: the tokens it decided and its seconds.

        Rounds that say nothing of their kind are not for the guard: the first of a request, which reads the prompt,
        and those whose tree was cut short.
        """
        self._tokens += tokens
        if self._is_first:  # after a change; the draft may have to catch up
            self._is_first = False
            return
        self._held += tokens
        self._window.add(tokens, seconds)
        if self._origin is not None:
            self._judge_probe(self._origin)
        elif self.kind == "off":
            self._rest()
        else:
            self._watch()

    def _watch(self) -> None:
        """Of a kind that runs: step down if it is too slow, try the next better one if it held for long."""
        plain = min(self._plain, self._window.seconds_per_round / self._costs[self._place])
        is_slow = self._window.seconds_per_token > (1 + self._settings.margin) * plain
        self._slow_rounds = self._slow_rounds + 1 if is_slow else 0
        if self._slow_rounds >= self._settings.patience:
            self._step_down()
        elif self._held >= self._wait:
            if self._place:
                self._probe()
            else:
                self._wait = self._settings.probe_after_tokens

    def _step_down(self) -> None:
        self._left[self._place] = self._window
        place = self._place + 1
        while self._window.tokens_per_round < self._costs[place] and place + 1 < len(self._options):
            place += 1
        self._change(place, "slower than plain decoding")

    def _rest(self) -> None:
        """Of plain decoding: learn its time, go back if it is no faster, and probe when it is time to."""
        if len(self._window) < self._settings.probe_rounds:
            return
        self._plain = self._window.seconds_per_token
        if self._left and self._place:
            self._reconsider()
        elif self._held >= self._wait and self._place:
            self._probe()

    def _reconsider(self) -> None:
        """Go back if plain decoding turns out to be slower than what was left for it: the machine has become slow, or
        the plan did not know it well."""
        left, self._left = self._left, {}
        for place, window in left.items():
            self._costs[place] = window.seconds_per_round / self._plain
        best = min(left, key=lambda place: left[place].seconds_per_token)
        if left[best].seconds_per_token < self._plain:
            self._change(best, "plain decoding is no faster")

    def _probe(self) -> None:
        self._origin, self._bar = self._place, self._window.seconds_per_token
        self._change(self._place - 1, "probe")

    def _judge_probe(self, origin: int) -> None:
        if len(self._window) < self._settings.probe_rounds:
            return
        self._origin = None
        if self._window.seconds_per_token >= self._bar:
            self._wait *= 2
            self._change(origin, "probe was no faster")
        elif self._place:
            self._probe()

    def _change(self, place: int, reason: str) -> None:
        self.events.append(GuardEvent(self._tokens, self.kind, self._options[place].kind, reason))
        self._begin(place)

    def _begin(self, place: int) -> None:
        self._place = place
        self._window = _Window(self._settings.window_rounds)
        self._held = 0  # tokens since
        self._slow_rounds = 0
        self._is_first = True


class _Window:
    """The last rounds of one kind."""

    def __init__(self, rounds: int) -> None:
        self._tokens: deque[float] = deque(maxlen=rounds)
        self._seconds: deque[float] = deque(maxlen=rounds)

    def add(self, tokens: float, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens_per_round(self) -> float:
        return sum(self._tokens) / len(self._tokens)

    @property
    def seconds_per_round(self) -> float:
        """Mean without the slowest eighth, and without the slowest at any rate: a pause is not the kind's fault."""
        drop = max(len(self._seconds) // 8, 1)
        kept = sorted(self._seconds)[: max(len(self._seconds) - drop, 1)]
        return sum(kept) / len(kept)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds_per_round / self.tokens_per_round


def _checked(options: Sequence[Option]) -> tuple[Option, ...]:
    kinds = [option.kind for option in options]
    if not kinds or kinds[-1] != "off" or len(set(kinds)) != len(kinds):
        raise UsageError(f"a guard needs options of different kinds, off the last, not {', '.join(kinds) or 'none'}.")
    return tuple(options)
