"""Options: what a round can be, and what it is predicted to give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from sequoia.errors import UsageError
from sequoia.tree.checks import require_keys, require_list
from sequoia.tree.shape import TreeShape

Kind = Literal["off", "chain", "tree"]
"""What a round can be: plain decoding, one line of draft tokens, or a tree that branches."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds, the simplest first."""


@dataclass(frozen=True)
class Prediction:
    """What a round is predicted to emit and to take; errors are one standard error.

    Raises:
        UsageError: a value is out of its range; the message names it.
    """

    tokens_per_round: float
    tokens_error: float
    seconds_per_round: float
    seconds_error: float

    def __post_init__(self) -> None:
        for place in fields(self):
            value = getattr(self, place.name)
            least = 0.0 if place.name.endswith("error") else 1e-12
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise UsageError(f"{place.name} must be a number of at least {least:g}, not {value!r}.")
            object.__setattr__(self, place.name, float(value))

    @property
    def seconds_per_token(self) -> float:
        return self.seconds_per_round / self.tokens_per_round

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_round / self.seconds_per_round

    @property
    def tokens_per_second_error(self) -> float:
        """One standard error, those of tokens and seconds taken as independent."""
        relative = math.hypot(self.tokens_error / self.tokens_per_round, self.seconds_error / self.seconds_per_round)
        return self.tokens_per_second * relative

    def to_dict(self) -> dict[str, float]:
        """Plain data that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Any) -> Prediction:
        """Build from what `to_dict` gave. UsageError for anything else."""
        return cls(**require_keys("a prediction", record, [place.name for place in fields(cls)]))


@dataclass(frozen=True)
class Option:
    """A shape that could be run, and what it is predicted to give.

    Raises:
        UsageError: the shape is not of its kind.
    """

    kind: Kind
    shape: TreeShape
    prediction: Prediction

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"kind must be off, chain or tree, not {self.kind!r}.")
        if self.kind != kind_of(self.shape):
            raise UsageError(f"an option of kind {self.kind!r} has a shape of kind {kind_of(self.shape)!r}.")

    @property
    def name(self) -> str:
        """As people read it: "off", "chain 3" of that depth, "tree 16/4" of that size and depth."""
        sizes = {"off": "", "chain": f" {self.shape.depth}", "tree": f" {self.shape.size}/{self.shape.depth}"}
        return self.kind + sizes[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return {"kind": self.kind, "parents": list(self.shape.parents), "prediction": self.prediction.to_dict()}

    @classmethod
    def from_dict(cls, record: Any) -> Option:
        """Build from what `to_dict` gave. UsageError for anything else."""
        checked = require_keys("an option", record, ["kind", "parents", "prediction"])
        return cls(checked["kind"], TreeShape(checked["parents"]), Prediction.from_dict(checked["prediction"]))


def kind_of(shape: TreeShape) -> Kind:
    """The kind of a shape: "off" for the root alone, "chain" where no node has two children, else "tree"."""
    if shape.size == 1:
        return "off"
    return "chain" if shape.max_children == 1 else "tree"


def fastest(options: Sequence[Option]) -> Option:
    """The option of the least seconds per token; among equals the first."""
    return min(options, key=lambda option: option.prediction.seconds_per_token)


def of_kind(options: Sequence[Option], kind: Kind) -> Option | None:
    """The first option of a kind; None where there is none."""
    return next((option for option in options if option.kind == kind), None)


def one_of_each(options: Sequence[Option]) -> tuple[Option, ...]:
    """The options with the simplest first. UsageError if "off" is missing or a kind comes twice."""
    kinds = [option.kind for option in options]
    if kinds.count("off") != 1 or len(set(kinds)) != len(kinds):
        raise UsageError(f"options must hold off once and no kind twice, not {', '.join(kinds) or 'nothing'}.")
    return tuple(sorted(options, key=lambda option: KINDS.index(option.kind)))


def read_options(name: str, record: Any) -> tuple[Option, ...]:
    """Options from plain data. UsageError for anything else."""
    return tuple(map(Option.from_dict, require_list(name, record)))
