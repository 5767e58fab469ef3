"""A tree that was asked for by name, and the verifier that serves it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from sequoia.errors import UsageError
from sequoia.speculate.growth import require_fit
from sequoia.speculate.verify import Verifier, verifier_named
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape
from sequoia.tree.specs import TREE_FORMS, UNPLANNED, parse_tree

AUTO = "auto"
"""As a tree: the one planned for the pair of models, or `UNPLANNED` where there is no plan."""


def named_tree(tree: str | Path | Tree, profile: AcceptanceProfile | str | Path | None, draft: Any) -> Tree:
    """The tree that was asked for; "auto" is `UNPLANNED`.

    Args:
        profile: what `optimal:` trees are planned for; None takes the rates shipped for the kind of `draft`.

    Raises:
        UsageError: it is no tree, or the profile would have no effect.
        FileError: a file is missing or damaged.
    """
    if not isinstance(tree, (str, PathLike, TreeShape, DynamicTree)):
        raise UsageError(f'tree is a TreeShape, a shape file, "auto" or one of {TREE_FORMS}, not {tree!r:.80}.')
    spec = UNPLANNED if tree == AUTO else tree
    if profile is not None and not (isinstance(spec, str) and spec.startswith("optimal:")):
        raise UsageError(f'a profile plans optimal trees, and tree is {tree!r}. Use tree="optimal:SIZExDEPTH".')
    if not isinstance(profile, (str, PathLike, AcceptanceProfile, type(None))):
        raise UsageError(f"profile is an AcceptanceProfile or a profile file, not {profile!r:.80}.")
    if isinstance(spec, (TreeShape, DynamicTree)):
        return spec
    if isinstance(spec, PathLike):
        return TreeShape.load(spec)
    rates = profile if isinstance(profile, AcceptanceProfile) else AcceptanceProfile.for_draft(draft, profile)
    return parse_tree(spec, rates)


def verifier_for(name: str, tree: Tree) -> Verifier:
    """The verifier of this name; "auto" is sequoia, or sampler_match for a dynamic tree.

    Raises:
        UsageError: there is none of this name, or it cannot verify the tree.
    """
    if name == AUTO:
        name = "sampler_match" if isinstance(tree, DynamicTree) else "sequoia"
    verifier = verifier_named(name)
    require_fit(tree, verifier.draws)
    return verifier
