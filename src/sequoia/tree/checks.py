"""Checks of sizes, shared by shapes, profiles and planner."""

from __future__ import annotations

from numbers import Integral

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
