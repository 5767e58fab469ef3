"""Checks of sizes and of plain data, shared by shapes, profiles, plans and planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from sequoia.errors import UsageError

MAX_NODES = 65_536
"""Largest tree that is built. A verify pass has a row per node, so useful trees are far smaller."""


def require_integer(name: str, value: object, least: int) -> int:
    """Return `value` as an int of at least `least`; UsageError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name} must be an integer of at least {least}, not {value!r}.")
    return int(value)


def require_nodes(what: str, size: int) -> None:
    """UsageError if a tree of `size` nodes is more than is ever built."""
    if size > MAX_NODES:
        raise UsageError(f"{what} would have more than {MAX_NODES:,} nodes, the most a tree may have. Ask for fewer.")


def full_tree_size(branch: int, depth: int, most: int = MAX_NODES) -> int:
    """Nodes of the full tree in which each node above `depth` has `branch` children, or `most` + 1 if more."""
    size = level = 1
    for _ in range(depth):
        level *= branch
        size += level
        if size > most:
            return most + 1
    return size


def require_keys(name: str, record: object, keys: Sequence[str]) -> Mapping[str, Any]:
    """Return `record`, a part of a larger one, if it is a mapping with exactly these keys; UsageError otherwise."""
    if not isinstance(record, Mapping):
        raise UsageError(f"{name} must be an object, not {type(record).__name__}.")
    if missing := [key for key in keys if key not in record]:
        raise UsageError(f"{name} lacks its {missing[0]!r}. Needed: {', '.join(keys)}.")
    if unknown := sorted(map(str, record.keys() - set(keys))):
        raise UsageError(f"{name} has an unknown key {unknown[0]!r}. Known: {', '.join(keys)}.")
    return record


def require_list(name: str, value: object) -> Sequence[Any]:
    """Return `value` if it is a list or a tuple; UsageError otherwise."""
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{name} must be a list, not {type(value).__name__}.")
    return value
