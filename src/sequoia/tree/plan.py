"""Plans: what to run for a pair of models on a machine, and what that is predicted to give."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sequoia.errors import UsageError
from sequoia.params import SamplingParams
from sequoia.tree.checks import require_integer, require_keys, require_list
from sequoia.tree.latency import LatencyProfile
from sequoia.tree.option import Kind, Option, Prediction, fastest, kind_of, of_kind, one_of_each, read_options
from sequoia.tree.plan_table import html_table, text_table
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.records import check_record, load_record, save_record

__all__ = ["PAIR_KEYS", "BatchOption", "Kind", "Option", "Plan", "PlanFile", "Prediction", "kind_of", "law_of"]

_FORMAT, _VERSION = "sequoia-plan", 1

PAIR_KEYS = (
    "target",
    "draft",
    "vocab_size",
    "target_dtype",
    "draft_dtype",
    "device",
    "threads",
    "compiled",
    "offload",
)
"""What a plan file says of the pair of models it is for."""

_LAW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_CUTS = ("top_k", "top_p", "min_p")  # at temperature 0 they change nothing


@dataclass(frozen=True, repr=False)
class Plan:
    """What to run under some sampling parameters: the best option of each kind, all with their predictions.

    Args:
        params: the sampling parameters that shape the law, as `law_of` gives them.
        profile: the acceptance it was planned with.
        options: the best of each kind: "off" always, "chain" and "tree" where a draft can make one.
        sizes: the best tree and the chain of each size that was looked at.

    Raises:
        UsageError: "off" is missing or a kind comes twice.
    """

    params: Mapping[str, Any]
    profile: AcceptanceProfile
    options: tuple[Option, ...]
    sizes: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", law_of(SamplingParams.from_dict(_checked_law(self.params))))
        object.__setattr__(self, "options", one_of_each(self.options))
        object.__setattr__(self, "sizes", tuple(self.sizes))

    @property
    def chosen(self) -> Option:
        """The option of the least seconds per token; among equals the simpler one."""
        return fastest(self.options)

    @property
    def plain(self) -> Option:
        """Plain decoding."""
        return self.options[0]

    def option(self, kind: Kind) -> Option | None:
        """The best of a kind; None where there is none."""
        return of_kind(self.options, kind)

    def fits(self, params: SamplingParams) -> bool:
        """Whether it was made for these sampling parameters."""
        return self.params == law_of(params)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return {
            "params": dict(self.params),
            "profile": self.profile.to_dict(),
            "options": [option.to_dict() for option in self.options],
            "sizes": [option.to_dict() for option in self.sizes],
        }

    @classmethod
    def from_dict(cls, record: Any) -> Plan:
        """Build from what `to_dict` gave. UsageError for anything else."""
        checked = require_keys("a plan", record, ["params", "profile", "options", "sizes"])
        options, sizes = (read_options(name, checked[name]) for name in ("options", "sizes"))
        return cls(checked["params"], AcceptanceProfile.from_dict(checked["profile"]), options, sizes)

    def __repr__(self) -> str:
        return text_table(describe_law(self.params), self.options)

    def _repr_html_(self) -> str:
        return html_table(describe_law(self.params), self.options)


@dataclass(frozen=True)
class BatchOption:
    """On paper: what would be best for each of `batch` requests that share their passes.

    Predictions are of one request: the tokens it gets per round, and the seconds of the shared round.
    """

    batch: int
    options: tuple[Option, ...]  # like a plan's
    extrapolated: bool  # whether the chosen one needs more rows at once than were measured

    def __post_init__(self) -> None:
        require_integer("batch", self.batch, least=1)
        if not isinstance(self.extrapolated, bool):
            raise UsageError(f"extrapolated must be true or false, not {self.extrapolated!r}.")
        object.__setattr__(self, "options", one_of_each(self.options))

    @property
    def chosen(self) -> Option:
        """The option of the least seconds per token; among equals the simpler one."""
        return fastest(self.options)

    @property
    def speedup(self) -> float:
        """How many times plain decoding of the same batch the chosen option is."""
        return self.options[0].prediction.seconds_per_token / self.chosen.prediction.seconds_per_token

    def option(self, kind: Kind) -> Option | None:
        """The best of a kind; None where there is none."""
        return of_kind(self.options, kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        options = [option.to_dict() for option in self.options]
        return {"batch": self.batch, "options": options, "extrapolated": self.extrapolated}

    @classmethod
    def from_dict(cls, record: Any) -> BatchOption:
        """Build from what `to_dict` gave. UsageError for anything else."""
        checked = require_keys("a batch option", record, ["batch", "options", "extrapolated"])
        return cls(checked["batch"], read_options("options", checked["options"]), checked["extrapolated"])


@dataclass(frozen=True, repr=False)
class PlanFile:
    """What tuning a pair on a machine gave: the measured times, and a plan for each set of sampling parameters.

    Args:
        pair: the models and how they run; see `PAIR_KEYS`.
        machine: where it was measured.
        data: what acceptance was measured on: the prompts' name and hash, samples, seed.
        latency: the measured times.
        plans: one for each set of sampling parameters.
        batch: for concurrent requests, on paper.

    Raises:
        UsageError: there is no plan, or two for the same parameters.
    """

    pair: Mapping[str, Any]
    machine: Mapping[str, Any]
    data: Mapping[str, Any]
    latency: LatencyProfile
    plans: tuple[Plan, ...]
    batch: tuple[BatchOption, ...] = ()

    def __post_init__(self) -> None:
        for name in ("pair", "machine", "data"):
            if not isinstance(getattr(self, name), Mapping):
                raise UsageError(f"{name} must be an object, not {type(getattr(self, name)).__name__}.")
        object.__setattr__(self, "plans", tuple(self.plans))
        object.__setattr__(self, "batch", tuple(self.batch))
        if not self.plans:
            raise UsageError("plans is empty. Tune for at least one temperature.")
        for index, plan in enumerate(self.plans):
            if any(plan.params == other.params for other in self.plans[:index]):
                raise UsageError(f"plans has two for the same parameters: {describe_law(plan.params)}.")

    def plan_for(self, params: SamplingParams) -> Plan:
        """The plan of the nearest temperature, among those whose other parameters are equal if there are any.

        `Plan.fits` says whether it was made for just these parameters.
        """
        equal = [plan for plan in self.plans if _others(plan.params) == _others(law_of(params))]
        return min(equal or self.plans, key=lambda plan: abs(plan.params["temperature"] - params.temperature))

    def fits(self, params: SamplingParams) -> bool:
        """Whether one of the plans was made for these sampling parameters."""
        return any(plan.fits(params) for plan in self.plans)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "pair": dict(self.pair),
            "machine": dict(self.machine),
            "data": dict(self.data),
            "latency": self.latency.to_dict(),
            "plans": [plan.to_dict() for plan in self.plans],
            "batch": [option.to_dict() for option in self.batch],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PlanFile:
        """Build from what `to_dict` gave. UsageError for unknown or missing keys and for values out of range."""
        checked = check_record(record, _FORMAT, _VERSION, [place.name for place in fields(cls)])
        return cls(
            pair=require_keys("pair", checked["pair"], PAIR_KEYS),
            machine=checked["machine"],
            data=checked["data"],
            latency=LatencyProfile.from_dict(checked["latency"]),
            plans=tuple(map(Plan.from_dict, require_list("plans", checked["plans"]))),
            batch=tuple(map(BatchOption.from_dict, require_list("batch", checked["batch"]))),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file, whole or not at all. FileError if it cannot be written."""
        save_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlanFile:
        """Read a file that `save` wrote. FileError, naming the path, if it is missing or damaged."""
        return load_record(path, cls.from_dict)

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.plans))

    def _repr_html_(self) -> str:
        return "".join(plan._repr_html_() for plan in self.plans)


def law_of(params: SamplingParams) -> dict[str, Any]:
    """The parameters that shape the distribution: the temperature, and the others where they change something."""
    default = SamplingParams()
    law = {key: getattr(params, key) for key in _LAW if getattr(params, key) != getattr(default, key)}
    law = {key: value for key, value in law.items() if params.temperature > 0 or key not in _CUTS}
    return {"temperature": float(params.temperature)} | {k: v for k, v in law.items() if k != "temperature"}


def describe_law(law: Mapping[str, Any]) -> str:
    """As people read it: "temperature 0.6, top_p 0.9"."""
    return ", ".join(f"{key} {value:g}" for key, value in law.items())


def _others(law: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in law.items() if key != "temperature"}


def _checked_law(law: Any) -> dict[str, Any]:
    known = _LAW if not isinstance(law, Mapping) else [key for key in _LAW if key in law]
    return dict(require_keys("params", law, known))
