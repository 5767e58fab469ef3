"""`sequoia tree`: shapes drawn, planned and exchanged with other tools, without a model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sequoia.app import options
from sequoia.app.output import note, terminal_width, write_out
from sequoia.errors import UsageError

if TYPE_CHECKING:
    from sequoia.tree.plan import Plan, PlanFile
    from sequoia.tree.profile import AcceptanceProfile
    from sequoia.tree.shape import TreeShape

tree_app = typer.Typer(name="tree")


class DraftKind(str, Enum):
    """Kinds of draft that rates are shipped for."""

    ngram = "ngram"
    model = "model"


class Format(str, Enum):
    """What `convert` writes; as in `sequoia.tree.formats`."""

    growmap = "growmap"
    umbrella = "umbrella"
    medusa = "medusa"
    sequoia = "sequoia"


class EngineName(str, Enum):
    """Who can be advised; as in `sequoia.tree.advice`."""

    sglang = "sglang"
    trtllm = "trtllm"
    vllm = "vllm"


Kind = Annotated[
    DraftKind | None,
    typer.Option(
        "--draft",
        help="Plan for this kind of draft, with the rates shipped for it.",
        show_default="ngram",
        rich_help_panel=options.TREE_PANEL,
    ),
]
PlanTemperature = Annotated[
    float | None,
    typer.Option("--temperature", help="Which plan of a plan file to take.", show_default="the first one"),
]


@tree_app.callback(invoke_without_command=True)
def tree(context: typer.Context) -> None:
    """Draw token trees, plan optimal ones, and exchange them with other tools."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@tree_app.command()
def show(
    shape: Annotated[str, typer.Argument(metavar="TREE", help=f"{options.TREE_FORMS}, or a plan.", show_default=False)],
    profile: options.Profile = None,
    draft: Kind = None,
    temperature: PlanTemperature = None,
    debug: options.Debug = False,
) -> None:
    """Draw a tree; with a profile, with rates on its edges, scores in brackets and expected tokens per round.

    Other tools' trees are read too: growmaps (.pt), UMbreLLa's JSON and choice lists.
    """
    found = _find(shape, profile, draft, temperature)
    _draw(found.shape, found.rates)


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


@tree_app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A shape or plan, a growmap (.pt), UMbreLLa's JSON, a choice list of Medusa or EAGLE-1, or an "
            "acceptance vector (.pt or JSON), which becomes a profile.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)],
    to: Annotated[
        Format | None,
        typer.Option(help="Growmaps are .pt, all others JSON.", show_default="growmap for .pt, else sequoia"),
    ] = None,
    temperature: PlanTemperature = None,
    debug: options.Debug = False,
) -> None:
    """Turn another tool's tree into one of ours, or the other way round. What it read is checked entry by entry."""
    from sequoia.app.tree_files import choose_plan, load, save_profile, save_shape
    from sequoia.tree.plan import PlanFile
    from sequoia.tree.profile import AcceptanceProfile

    content = load(source)
    if isinstance(content, AcceptanceProfile):
        note(f"wrote {out}: {save_profile(content, out, to and to.value)}")
        return
    shape = choose_plan(content, temperature).chosen.shape if isinstance(content, PlanFile) else content
    kind = save_shape(shape, out, to and to.value)
    note(f"wrote {out}: {kind}, {shape.size} nodes, depth {shape.depth}")


@tree_app.command()
def advise(
    tree: Annotated[
        str, typer.Argument(metavar="PLAN|TREE", help=f"A plan file; or {options.TREE_FORMS}.", show_default=False)
    ],
    engine: Annotated[EngineName, typer.Option(help="SGLang, TensorRT-LLM or vLLM.", show_default=False)],
    profile: options.Profile = None,
    draft: Kind = None,
    temperature: PlanTemperature = None,
    debug: options.Debug = False,
) -> None:
    """Print what a plan or a tree comes to in an engine that takes numbers only, ready to paste."""
    from sequoia.tree.advice import advise_plan, advise_tree

    found = _find(tree, profile, draft, temperature)
    advice = advise_plan(engine.value, *found.plan) if found.plan else advise_tree(engine.value, found.shape)
    if advice.text:
        write_out(advice.text + "\n")
    for line in advice.notes:
        note(line)


@dataclass(frozen=True)
class _Found:
    """What an argument named."""

    shape: TreeShape
    rates: AcceptanceProfile | None
    plan: tuple[PlanFile, Plan] | None = None


def _find(spec: str, profile: Path | None, draft: DraftKind | None, temperature: float | None) -> _Found:
    """The tree of a form, a file or a plan; with rates where they are asked for, or the plan has them."""
    from sequoia.app.tree_files import choose_plan, load_tree
    from sequoia.tree.dynamic import require_one_shape
    from sequoia.tree.plan import PlanFile
    from sequoia.tree.specs import names_file, parse_tree

    planned = spec.startswith("optimal:")
    rates = _rates(profile, draft) if planned or profile or draft else None
    if not names_file(spec):
        return _Found(require_one_shape(parse_tree(spec, rates)), rates)
    content = load_tree(Path(spec))
    if not isinstance(content, PlanFile):
        return _Found(content, rates)
    plan = choose_plan(content, temperature)
    return _Found(plan.chosen.shape, rates or plan.profile, (content, plan))


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
