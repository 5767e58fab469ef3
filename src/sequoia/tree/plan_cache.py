"""Plans kept in the user's cache, where a later run of the same pair of models finds them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sequoia.errors import FileError
from sequoia.tree.plan import PlanFile

_FREE = "threads"  # a plan tuned on another number of threads is better than none


def plans_folder() -> Path:
    """$XDG_CACHE_HOME or ~/.cache, then sequoia/plans."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sequoia" / "plans"


def plan_path(pair: Mapping[str, Any]) -> Path:
    """Where the plan for this pair is kept: readable names, and a digest of all that makes a pair."""
    return plans_folder() / f"{_stem(pair)}-{pair.get(_FREE)}.json"


def store(plan_file: PlanFile) -> Path:
    """Keep a plan, in place of an earlier one for the same pair.

    Raises:
        FileError: the cache cannot be written.
    """
    path = plan_path(plan_file.pair)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make {path.parent}: {error.strerror or error}.") from error
    plan_file.save(path)
    return path


def find(pair: Mapping[str, Any]) -> PlanFile | None:
    """The plan kept for this pair; else the latest for the same pair on another number of threads; else None.

    Raises:
        FileError: there is one, but it cannot be read.
    """
    path = plan_path(pair)
    if not path.exists():
        others = list(path.parent.glob(f"{_stem(pair)}-*.json"))
        if not others:
            return None
        path = max(others, key=lambda file: file.stat().st_mtime)
    return PlanFile.load(path)


def _stem(pair: Mapping[str, Any]) -> str:
    identity = {key: value for key, value in pair.items() if key != _FREE}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    names = (re.sub(r"[^\w.]+", "_", str(pair.get(key)))[:48] for key in ("target", "draft"))
    return "-".join((*names, digest))
