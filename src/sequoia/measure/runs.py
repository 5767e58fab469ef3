"""Acceptance counted in runs: what `sequoia generate --json` printed, read again and merged into a profile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sequoia.errors import FileError, UsageError
from sequoia.params import SamplingParams
from sequoia.tree.adapt import AdaptiveProfile
from sequoia.tree.checks import require_integer, require_list
from sequoia.tree.plan import law_of
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

_ENDLESS = 1e12  # rounds: of a run that was given, nothing decays


@dataclass(frozen=True)
class RunCounts:
    """Of one answer: what it was asked of, and what its rounds accepted."""

    target: str
    draft: str
    law: Mapping[str, Any]  # the sampling parameters, as `law_of` gives them
    shape: TreeShape | None  # None where it changed from round to round
    visits: tuple[int, ...]
    accepted: tuple[tuple[int, ...], ...]

    @property
    def rounds(self) -> int:
        """Those that drafted."""
        return self.visits[0] if self.visits else 0


def read_runs(path: Path) -> list[RunCounts]:
    """The answers in a file, one JSON object a line, as `sequoia generate --json` prints them.

    Raises:
        FileError: the file cannot be read, or holds something else; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise FileError(f"cannot read {path}: {reason}. Check the path.") from error
    runs = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                runs.append(_run(json.loads(line)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise FileError(
                    f"{path}, line {number} is no answer of `sequoia generate --json`: {_reason(error)}"
                ) from error
    if not runs:
        raise FileError(f"{path} holds no answers. Write some with `sequoia generate --json`.")
    return runs


def merged(profile: AcceptanceProfile, runs: Iterable[RunCounts]) -> AcceptanceProfile:
    """The profile with the counts of the runs added. A visit counts for as much as one that was measured."""
    visits = profile.provenance.get("visits") or [1.0]
    adaptive = AdaptiveProfile(profile, prior_trials=max(1.0, float(visits[0])), half_life=_ENDLESS)
    rounds = 0
    for run in runs:
        adaptive.add(run.visits, run.accepted, run.shape)
        rounds += run.rounds
    return AcceptanceProfile(adaptive.profile.rates, {**profile.provenance, "rounds_of_runs": rounds})


def _run(record: Any) -> RunCounts:
    stats, tree = record["stats"], record["tree"]
    parents = None if (record.get("plan") or {}).get("guard") else tree.get("parents")
    visits = [require_integer("visits", count, 0) for count in require_list("visits", stats["visits"])]
    accepted = [require_list("accepted", counts) for counts in require_list("accepted", stats["accepted"])]
    if len(visits) != len(accepted):
        raise UsageError("visits and accepted have different lengths.")
    return RunCounts(
        str(record["target"]),
        "ngram" if record["draft"] == "n-gram" else str(record["draft"]),
        law_of(SamplingParams.from_dict(record["params"])),
        None if parents is None else TreeShape(parents),
        tuple(visits),
        tuple(tuple(require_integer("accepted", count, 0) for count in counts) for counts in accepted),
    )


def _reason(error: BaseException) -> str:
    return f"{error} is missing." if isinstance(error, KeyError) else f"{error}"
