"""AcceptanceProfile: how often a child of each rank is the accepted one, by depth."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import as_file, files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer
from sequoia.tree.records import check_record, load_record, save_record

_FORMAT, _VERSION = "sequoia-profile", 1
_ROW_SLACK = 1e-9


@dataclass(frozen=True, init=False, repr=False)
class AcceptanceProfile:
    """Share of visits to a node at some depth whose accepted child has some rank.

    The acceptance vector of Sequoia (Chen et al. 2024, arXiv 2402.12374, section 3.1), by depth of the parent.

    Args:
        rates: `rates[depth][rank]`, each in [0, 1] and each row summing to at most 1. The last row serves all
            deeper levels. Rows may differ in length: missing ranks are 0.
        provenance: plain data that says where the rates come from; kept in the file.

    Raises:
        UsageError: a value is out of its range; the message names it.
    """

    rates: tuple[tuple[float, ...], ...]
    provenance: Mapping[str, Any] = field(hash=False)

    def __init__(self, rates: Sequence[Sequence[float]], provenance: Mapping[str, Any] | None = None) -> None:
        rows = tuple(_checked_row(depth, row) for depth, row in enumerate(_checked_list("rates", rates)))
        if not any(rows):
            raise UsageError("rates must have at least one row with at least one rank.")
        if not isinstance(provenance, (Mapping, type(None))):
            raise UsageError(f"provenance must be a mapping, not {type(provenance).__name__}.")
        object.__setattr__(self, "rates", rows)
        object.__setattr__(self, "provenance", dict(provenance or {}))

    @classmethod
    def from_counts(
        cls, visits: Sequence[int], accepted: Sequence[Sequence[int]], provenance: Mapping[str, Any] | None = None
    ) -> AcceptanceProfile:
        """Rates from counts: `visits[depth]` nodes visited, `accepted[depth][rank]` of them moved to that rank.

        Depths that were never visited are left out, so the last measured row serves them.

        Raises:
            UsageError: no visits, lists of different length, a negative count, or more accepted than visited.
        """
        if len(visits) != len(accepted):
            raise UsageError(f"visits has {len(visits)} depths but accepted has {len(accepted)}. Give both for each.")
        rows = []
        for depth, (total, counts) in enumerate(zip(visits, accepted, strict=True)):
            if require_integer(f"visits[{depth}]", total, least=0) == 0:
                break
            rows.append(_rates(depth, total, counts))
        if not rows:
            raise UsageError("visits are 0 at the root: nothing was measured.")
        if any(visits[len(rows) :]):
            raise UsageError(f"visits[{len(rows)}] is 0, but deeper nodes were visited.")
        return cls(rows, provenance)

    @cached_property
    def ranks(self) -> int:
        """Ranks of the widest row: the most children a planned node may have."""
        return max(map(len, self.rates))

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """The rates as an array [rows, ranks], missing ranks 0. Read-only."""
        table = np.zeros((len(self.rates), self.ranks))
        for depth, row in enumerate(self.rates):
            table[depth, : len(row)] = row
        table.setflags(write=False)
        return table

    def row(self, depth: int) -> NDArray[np.float64]:
        """Rates [ranks] of the children of a node at `depth`."""
        row: NDArray[np.float64] = self.table[min(require_integer("depth", depth, least=0), len(self.rates) - 1)]
        return row

    @cached_property
    def is_monotone(self) -> bool:
        """Whether no row ever rises with the rank."""
        return bool(np.all(np.diff(self.table, axis=1) <= 0))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        rates = [list(row) for row in self.rates]
        return {"format": _FORMAT, "version": _VERSION, "rates": rates, "provenance": dict(self.provenance)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> AcceptanceProfile:
        """Build from what `to_dict` gave. UsageError for unknown or missing keys and for values out of range."""
        checked = check_record(record, _FORMAT, _VERSION, ["rates", "provenance"])
        return cls(checked["rates"], checked["provenance"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a versioned JSON file, whole or not at all. FileError if it cannot be written."""
        save_record(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AcceptanceProfile:
        """Read a file that `save` wrote. FileError, naming the path, if it is missing or damaged."""
        return load_record(path, cls.from_dict)

    @classmethod
    def shipped(cls, draft: str) -> AcceptanceProfile:
        """Rates for a kind of draft, "ngram" or "model", to plan with before any are measured for the pair at hand.

        Their provenance says where they come from.
        """
        with as_file(files("sequoia.tree") / "profiles" / f"{draft}.json") as path:
            return cls.load(path)

    @classmethod
    def for_draft(cls, draft: object, path: str | os.PathLike[str] | None = None) -> AcceptanceProfile:
        """The profile in the file, or without one the rates shipped for the kind of draft."""
        if path is not None:
            return cls.load(path)
        return cls.shipped("ngram" if isinstance(draft, str) and draft == "ngram" else "model")

    def __repr__(self) -> str:
        return f"AcceptanceProfile(rows={len(self.rates)}, ranks={self.ranks})"


def _checked_list(name: str, values: Any) -> Any:
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)):
        raise UsageError(f"{name} must be a list, not {values!r}.")
    return values


def _checked_row(depth: int, row: Any) -> tuple[float, ...]:
    for rank, rate in enumerate(_checked_list(f"rates[{depth}]", row)):
        if not isinstance(rate, (int, float, np.number)) or isinstance(rate, bool) or not 0 <= rate <= 1:
            raise UsageError(f"rates[{depth}][{rank}] must be a number from 0 to 1, not {rate!r}.")
    rates = tuple(map(float, row))
    if math.fsum(rates) > 1 + _ROW_SLACK:
        raise UsageError(f"rates[{depth}] sums to {math.fsum(rates):.6g}: the ranks of one depth share at most 1.")
    return rates


def _rates(depth: int, visits: int, counts: Sequence[int]) -> list[float]:
    checked = [require_integer(f"accepted[{depth}][{rank}]", count, least=0) for rank, count in enumerate(counts)]
    if sum(checked) > visits:
        raise UsageError(f"accepted[{depth}] sums to {sum(checked)}, more than its {visits} visits.")
    return [count / visits for count in checked]
