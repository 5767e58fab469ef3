"""Other tools' trees and acceptance vectors, as the plain data that their files hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia.errors import UsageError
from sequoia.tree.checks import require_integer, require_nodes
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

TORCH_SUFFIXES = (".pt", ".pth")
"""How files that need torch to be read end."""

_GROWMAP_KEYS = ("roots", "branches", "Successors", "mask", "depth", "size")
# A vector with the rejected share sums to 1 but for rounding, by hand too. One without it that comes as near by chance
# loses its last rank, which costs little; the other mistake would turn the rejected share into a rank.
_NEAR_ONE = 1e-3
_ROUNDING = 1e-6  # of a sum of 32-bit shares


def growmap(shape: TreeShape) -> dict[str, Any]:
    """The growmap of the reference implementation (Infini-AI-Lab/Sequoia), numbered level by level.

    `roots` holds the nodes of each level, `branches` how many children each of these has, `Successors` the children
    of each node in rank order, `mask` [size, size] 1 where the column is the row's node or one of its ancestors,
    `depth` [size] the edges from the root. The last two are arrays: tensors in the file.
    """
    tree = shape.in_level_order()
    successors = [list(tree.children(node)) for node in range(tree.size)]
    return {
        "roots": [list(level) for level in tree.levels],
        "branches": [[len(successors[node]) for node in level] for level in tree.levels],
        "Successors": successors,
        "mask": tree.ancestors.astype(np.int64),
        "depth": np.array(tree.depths, dtype=np.int64),
        "size": tree.size,
    }


def umbrella(shape: TreeShape) -> dict[str, Any]:
    """What UMbreLLa (Infini-AI-Lab/UMbreLLa) keeps in JSON: a growmap with lists for arrays."""
    return {key: _plain(value) for key, value in growmap(shape).items()}


def choices(shape: TreeShape) -> list[list[int]]:
    """The choice list of Medusa and EAGLE-1: the ranks on the path to each node but the root, level by level."""
    tree = shape.in_level_order()
    return [[tree.ranks[node] for node in path] for path in tree.paths[1:]]


WRITERS: Mapping[str, Callable[[TreeShape], Any]] = {
    "growmap": growmap,
    "umbrella": umbrella,
    "medusa": choices,
    "sequoia": TreeShape.to_dict,
}
"""What each format holds for a shape."""


def read(record: Any) -> TreeShape | AcceptanceProfile:
    """The shape or the profile in a record: our own, a growmap, a choice list or an acceptance vector.

    Raises:
        UsageError: it is none of these, or does not agree with itself; the message names the first wrong entry.
    """
    if isinstance(record, Mapping) and record.get("format") == "sequoia-profile":
        return AcceptanceProfile.from_dict(record)
    if isinstance(record, Mapping) and "format" in record:
        return TreeShape.from_dict(record)
    if isinstance(record, Mapping):
        return from_growmap(record)
    if isinstance(record, list) and (not record or isinstance(record[0], list)):
        return from_choices(record)
    if isinstance(record, (list, np.ndarray)):
        return from_vector(record)
    raise UsageError(f"a tree, a growmap, a choice list or an acceptance vector is needed, not {short(record)}.")


def read_shape(record: Any) -> TreeShape:
    """The shape in a record, as `read` finds it. UsageError if it holds a profile instead, too."""
    content = read(record)
    if isinstance(content, AcceptanceProfile):
        raise UsageError("a tree is needed, but these are acceptance rates. They plan trees: sequoia tree optimal.")
    return content


def from_growmap(record: Mapping[str, Any]) -> TreeShape:
    """The tree of a growmap's `Successors`, numbered level by level.

    Raises:
        UsageError: a key is missing or unknown, `Successors` is no tree, or another entry differs from what
            `Successors` imply; the message names the first one.
    """
    if missing := [key for key in _GROWMAP_KEYS if key not in record]:
        raise UsageError(f"key {missing[0]!r} is missing. A growmap has {', '.join(_GROWMAP_KEYS)}.")
    if unknown := sorted(map(str, record.keys() - set(_GROWMAP_KEYS))):
        raise UsageError(f"unknown key {unknown[0]!r}. A growmap has {', '.join(_GROWMAP_KEYS)}.")
    size = require_integer("size", record["size"], least=1)
    require_nodes("the growmap", size)
    successors = _successors(record["Successors"], size)
    parents = _parents(successors)
    order = _order(successors)
    depths = [0] * size
    for node in order[1:]:
        depths[node] = depths[parents[node]] + 1
    levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for node, depth in enumerate(depths):
        levels[depth].append(node)
    _compare("roots", record["roots"], levels)
    _compare("branches", record["branches"], [[len(successors[node]) for node in level] for level in levels])
    _compare("depth", record["depth"], depths)
    _compare_mask(record["mask"], parents)
    number = {node: index for index, node in enumerate(order)}
    return TreeShape([-1, *(number[parents[node]] for node in order[1:])])


def from_choices(record: Sequence[Any]) -> TreeShape:
    """The tree of a choice list, in any order, numbered level by level; the root is not in the list.

    Raises:
        UsageError: an entry is no list of ranks, is there twice, or lacks its parent or elder sibling.
    """
    require_nodes("the choice list", 1 + len(record))
    places: dict[tuple[int, ...], int] = {}
    for index, entry in enumerate(record):
        path = _path(f"choices[{index}]", entry)
        if path in places:
            raise UsageError(f"choices[{index}] is {list(path)}, which is choices[{places[path]}] already.")
        places[path] = index
    number: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    for path in sorted(places, key=lambda path: (len(path), path)):
        _require_kin(places[path], path, number)
        number[path] = len(parents)
        parents.append(number[path[:-1]])
    return TreeShape(parents)


def from_vector(vector: Sequence[Any] | NDArray[Any]) -> AcceptanceProfile:
    """The profile of an acceptance vector of the reference implementation; its one row serves all depths.

    A vector begins with 0; then comes for each rank the share of visits in which its child is accepted. One of the
    reference's tools appends the share in which none is, the other does not: the last of more than two entries is
    taken for it where all sum to 1.

    Raises:
        UsageError: it has no rank, does not begin with 0, or an entry is no share.
    """
    values = _list("an acceptance vector", vector)
    for index, value in enumerate(values):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
            raise UsageError(f"entry {index} of an acceptance vector must be a number from 0 to 1, not {short(value)}.")
    if len(values) < 2 or values[0] != 0:
        raise UsageError(f"an acceptance vector is a 0 and then a rate for each rank, not {short(values)}.")
    provenance: dict[str, Any] = {"source": "acceptance vector of the reference implementation"}
    rates = values[1:]
    if len(rates) > 1 and abs(math.fsum(rates) - 1) <= _NEAR_ONE:
        provenance["rejected"] = rates.pop()
    total = math.fsum(rates)
    if 1 < total <= 1 + _ROUNDING:
        rates = [rate / total for rate in rates]
    return AcceptanceProfile([rates], provenance)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _list(name: str, value: Any, length: int | None = None) -> list[Any]:
    """`value` as a list, of `length` entries where given, with lists for arrays."""
    value = _plain(value)
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{name} must be a list, not {short(value)}.")
    if length is not None and len(value) != length:
        raise UsageError(f"{name} must have {length} entries, not {len(value)}.")
    return [_plain(entry) for entry in value]


def _successors(value: Any, size: int) -> list[list[int]]:
    """Children of each node, each an index above 0 and below `size`."""
    successors = [
        [
            require_integer(f"Successors[{node}][{rank}]", child, least=1)
            for rank, child in enumerate(_list(f"Successors[{node}]", children))
        ]
        for node, children in enumerate(_list("Successors", value, size))
    ]
    for node, children in enumerate(successors):
        for rank, child in enumerate(children):
            if child >= size:
                raise UsageError(f"Successors[{node}][{rank}] must be at most {size - 1}, the last node, not {child}.")
    return successors


def _parents(successors: Sequence[Sequence[int]]) -> list[int]:
    """The parent of each node, -1 for the root and for nodes that have none."""
    parents = [-1] * len(successors)
    for node, children in enumerate(successors):
        for rank, child in enumerate(children):
            if parents[child] >= 0:
                raise UsageError(
                    f"Successors[{node}][{rank}] is {child}, which is a child of node {parents[child]} already."
                )
            parents[child] = node
    return parents


def _order(successors: Sequence[Sequence[int]]) -> list[int]:
    """All nodes level by level, siblings side by side in rank order."""
    order = [0]
    for node in order:
        order.extend(successors[node])
    if lost := sorted(set(range(len(successors))) - set(order)):
        raise UsageError(f"node {lost[0]} cannot be reached from the root by Successors.")
    return order


def _compare(name: str, found: Any, implied: Any) -> None:
    """UsageError, naming the first entry that differs, unless `found` is what `Successors` imply."""
    if isinstance(implied, list):
        entries = _list(name, found, len(implied))
        if entries != implied:
            for index, (entry, wanted) in enumerate(zip(entries, implied, strict=True)):
                _compare(f"{name}[{index}]", entry, wanted)
    elif not isinstance(found, (int, float)) or found != implied:
        raise UsageError(f"{name} must be {implied}, as Successors imply, not {short(found)}.")


def _compare_mask(mask: Any, parents: Sequence[int]) -> None:
    # Row by row: a file of few bytes can claim a mask of gigabytes.
    if not isinstance(mask, np.ndarray) or mask.ndim == 0:
        mask = _list("mask", mask)
    if len(mask) != len(parents):
        raise UsageError(f"mask must have {len(parents)} entries, not {len(mask)}.")
    for node in range(len(parents)):
        row, ancestor = [0] * len(parents), node
        while ancestor >= 0:
            row[ancestor], ancestor = 1, parents[ancestor]
        _compare(f"mask[{node}]", mask[node], row)


def _path(name: str, entry: Any) -> tuple[int, ...]:
    """The ranks of one entry of a choice list."""
    path = tuple(require_integer(f"{name}[{depth}]", rank, least=0) for depth, rank in enumerate(_list(name, entry)))
    if not path:
        raise UsageError(f"{name} is empty. It stands for the root, which a choice list leaves out.")
    return path


def _require_kin(index: int, path: tuple[int, ...], known: Mapping[tuple[int, ...], int]) -> None:
    """UsageError unless the parent and the elder sibling of `path` are known."""
    parent, rank = path[:-1], path[-1]
    if parent not in known:
        raise UsageError(f"choices[{index}] is {list(path)}, but its parent {list(parent)} is missing.")
    elder = (*parent, rank - 1)
    if rank and elder not in known:
        raise UsageError(
            f"choices[{index}] is {list(path)}, but its sibling {list(elder)} is missing: ranks have no gaps."
        )
