"""Tree shapes by name: what `--tree` takes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from sequoia.errors import UsageError
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.formats import TORCH_SUFFIXES, read_shape
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.records import load_record
from sequoia.tree.shape import TreeShape

TREE_FORMS = "off, chain:4, chains:16x8, beam:4x6, kary:2x4, optimal:64x8, dynamic:64x8 or a shape file"
"""The forms that `parse_tree` reads, for help texts."""

UNPLANNED = "optimal:16x4"
"""What runs where nothing was named and nothing is planned."""

_FORM = re.compile(r"off|(chain|chains|beam|kary|optimal|dynamic):[-x\d]+")
_PAIRS: dict[str, Callable[[int, int], TreeShape]] = {
    "chains": TreeShape.chains,
    "beam": TreeShape.beam,
    "kary": TreeShape.kary,
}


def parse_tree(spec: str, profile: AcceptanceProfile | None = None) -> Tree:
    """The tree that `spec` names: a form of `TREE_FORMS`, `optimal:SIZExDEPTH` being planned for `profile`.

    `dynamic:SIZExDEPTH` takes a third number, the most nodes of a level that the draft continues.

    Raises:
        UsageError: no such form, a number out of range, or an optimal tree without a profile.
        FileError: the shape file is missing or damaged.
    """
    try:
        return _parsed(spec, profile)
    except UsageError as error:
        raise UsageError(f"tree {spec}: {error}") from error


def _parsed(spec: str, profile: AcceptanceProfile | None) -> Tree:
    if spec == "off":
        return TreeShape.root_only()
    if single := re.fullmatch(r"chain:(-?\d{1,9})", spec):
        return TreeShape.chain(int(single[1]))
    if pair := re.fullmatch(r"(chains|beam|kary|optimal):(-?\d{1,9})x(-?\d{1,9})", spec):
        first, second = int(pair[2]), int(pair[3])
        return _optimal(profile, first, second) if pair[1] == "optimal" else _PAIRS[pair[1]](first, second)
    if rule := re.fullmatch(r"dynamic:(-?\d{1,9})x(-?\d{1,9})(?:x(-?\d{1,9}))?", spec):
        return DynamicTree(*(int(number) for number in rule.groups() if number is not None))
    if names_file(spec):
        return _from_file(spec)
    raise UsageError(f"no such form. Give {TREE_FORMS}.")


def names_file(spec: str) -> bool:
    """Whether `spec` is the path of a file and not a form."""
    looks_like_one = spec.endswith((".json", *TORCH_SUFFIXES)) or os.sep in spec or os.path.isfile(spec)
    return looks_like_one and not _FORM.fullmatch(spec)


def _from_file(path: str) -> TreeShape:
    if path.endswith(TORCH_SUFFIXES):
        raise UsageError("a torch file is not read here. Convert it first: sequoia tree convert FILE tree.json.")
    return load_record(path, read_shape)


def _optimal(profile: AcceptanceProfile | None, size: int, depth: int) -> TreeShape:
    if profile is None:
        raise UsageError("it is planned from an acceptance profile. Add --profile FILE.")
    return optimal_shape(profile, size, depth)
