"""What is compared: methods, settings and requests, and in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TypeVar

from sequoia.errors import UsageError
from sequoia.measure.bench.files import Spec
from sequoia.measure.bench.records import Setting
from sequoia.measure.bench.request import Request
from sequoia.measure.prompts import PromptRecord
from sequoia.params import SamplingParams
from sequoia.tree.checks import require_integer

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is compared.

    Args:
        methods: see `methods.METHOD_FORMS`; plain decoding is always among them.
        temperatures, top_ps: every pair is run; at temperature 0 top-p changes nothing and is left out.
        max_tokens: of each answer.
        repeats: of each request, with other noise.
        seed: that the requests' own come from.
        seconds: no prompt is begun after this much measuring, all processes of a resumed run together.

    Raises:
        UsageError: a value is out of its range.
    """

    methods: tuple[Spec, ...]
    temperatures: tuple[float, ...] = (0.0,)
    top_ps: tuple[float, ...] = (1.0,)
    max_tokens: int = 128
    repeats: int = 1
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        require_integer("repeats", self.repeats, least=1)
        require_integer("seed", self.seed, least=0)
        if not self.temperatures or not self.top_ps:
            raise UsageError("a comparison needs a temperature and a top-p, and one of them is missing. Give both.")
        for temperature, top_p in product(self.temperatures, self.top_ps):
            SamplingParams(max_tokens=self.max_tokens, temperature=temperature, top_p=top_p)
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"seconds must be a number above 0, not {self.seconds!r}.")

    @property
    def settings(self) -> tuple[Setting, ...]:
        pairs = product(self.temperatures, self.top_ps)
        return tuple(dict.fromkeys(Setting(float(t), float(p) if t > 0 else 1.0) for t, p in pairs))

    def requests(self, prompt: PromptRecord, token_ids: Sequence[int], index: int) -> list[Request]:
        """Of the prompt at `index`, the same for all methods; no two have the same noise."""
        return [
            Request(
                prompt.id,
                prompt.category,
                tuple(token_ids),
                setting,
                repeat,
                SamplingParams(
                    max_tokens=self.max_tokens,
                    temperature=setting.temperature,
                    top_p=setting.top_p,
                    seed=_seed(self.seed, index, setting, repeat),
                ),
            )
            for setting, repeat in product(self.settings, range(self.repeats))
        ]


def _seed(*parts: object) -> int:
    """31 bits, which every generator takes."""
    digest = hashlib.sha256(" ".join(map(repr, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def turned(values: Sequence[T], turn: int, seed: int) -> list[T]:
    """An order for each turn: each value comes first once in as many turns as there are values, and then their
    neighbours change too."""
    shuffles, start = divmod(turn, len(values))
    order = list(values)
    Random(f"{seed} {shuffles}").shuffle(order)
    return [*order[start:], *order[:start]]
