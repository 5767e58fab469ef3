"""`sequoia tree`: shapes drawn and planned, without a model."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sequoia.app import options
from sequoia.app.output import note, terminal_width, write_out
from sequoia.errors import UsageError

if TYPE_CHECKING:
    from sequoia.tree.profile import AcceptanceProfile
    from sequoia.tree.shape import TreeShape

tree_app = typer.Typer(name="tree")


class DraftKind(str, Enum):
    """Kinds of draft that rates are shipped for."""

    ngram = "ngram"
    model = "model"


Kind = Annotated[
    DraftKind | None,
    typer.Option(
        "--draft",
        help="Plan for this kind of draft, with the rates shipped for it.",
        show_default="ngram",
        rich_help_panel=options.TREE_PANEL,
    ),
]


@tree_app.callback(invoke_without_command=True)
def tree(context: typer.Context) -> None:
    """Draw token trees, and plan optimal ones."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@tree_app.command()
def show(
    shape: Annotated[str, typer.Argument(metavar="TREE", help=f"{options.TREE_FORMS}.", show_default=False)],
    profile: options.Profile = None,
    draft: Kind = None,
    debug: options.Debug = False,
) -> None:
    """Draw a tree; with a profile, with rates on its edges, scores in brackets and expected tokens per round."""
    from sequoia.tree.dynamic import require_one_shape
    from sequoia.tree.specs import parse_tree

    planned = shape.startswith("optimal:")
    rates = _rates(profile, draft) if planned or profile or draft else None
    _draw(require_one_shape(parse_tree(shape, rates)), rates)


@tree_app.command()
def optimal(
    size: Annotated[str, typer.Argument(help="Nodes, the root included; or SIZExDEPTH.", show_default=False)],
    depth: Annotated[int | None, typer.Argument(help="Most edges from the root.", show_default=False)] = None,
    profile: options.Profile = None,
    draft: Kind = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Plan the tree of a size with the most expected tokens per round, and draw it."""
    from sequoia.tree.planner import optimal_shape

    nodes, edges = _limits(size, depth)
    rates = _rates(profile, draft)
    shape = optimal_shape(rates, nodes, edges)
    if out is not None:
        shape.save(out)
    if as_json:
        write_out(json.dumps(_record(shape, rates)) + "\n")
    else:
        _draw(shape, rates)
    if out is not None:
        note(f"wrote {out}")


def _rates(profile: Path | None, draft: DraftKind | None) -> AcceptanceProfile:
    from sequoia.tree.profile import AcceptanceProfile

    if profile is not None and draft is not None:
        raise UsageError("--profile and --draft both name the rates to plan with. Give one of them.")
    return AcceptanceProfile.for_draft(draft.value if draft else "ngram", profile)


def _limits(size: str, depth: int | None) -> tuple[int, int]:
    """Nodes and edges from `16 4` or `16x4`."""
    if depth is not None and re.fullmatch(r"-?\d{1,9}", size):
        return int(size), depth
    if depth is None and (pair := re.fullmatch(r"(-?\d{1,9})x(-?\d{1,9})", size)):
        return int(pair[1]), int(pair[2])
    found = size if depth is None else f"{size} {depth}"
    raise UsageError(f"a size and a depth are needed, such as 16 4 or 16x4, not {found!r}.")


def _draw(shape: TreeShape, rates: AcceptanceProfile | None) -> None:
    write_out(shape.draw(rates, width=terminal_width()) + "\n")


def _record(shape: TreeShape, rates: AcceptanceProfile) -> dict[str, object]:
    from sequoia.tree.planner import expected_tokens

    return {
        "size": shape.size,
        "depth": shape.depth,
        "expected_tokens": expected_tokens(shape, rates),
        "parents": list(shape.parents),
        "provenance": dict(rates.provenance),
    }
