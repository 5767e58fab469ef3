"""`sequoia selftest`: proof on this machine that no verifier changes the target's distribution."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from sequoia.app import options
from sequoia.app.output import console, note, write_out

if TYPE_CHECKING:
    from sequoia.measure.selftest import SelfTest, VerifierResult

_PROCESSES = 2  # most machines have two free cores, and each further one pays for its start with less

Samples = Annotated[
    int,
    typer.Option("--samples", min=1, max=1_000_000, help="Requests for each law; more find smaller faults."),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of the noise. The models and their laws are always the same.")
]


def selftest(
    samples: Samples = 250,
    seed: Seed = 0,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Prove that speculation keeps the target's distribution, with every verifier; exits 1 if it does not."""
    with _progress() as progress:
        from sequoia.measure.selftest import run_selftest

        workers = min(_PROCESSES, os.cpu_count() or 1)
        result = run_selftest(samples=samples, seed=seed, device=device, workers=workers, progress=progress)
    if as_json:
        write_out(json.dumps(result.to_dict()) + "\n")
    else:
        _print_table(result)
        write_out(summary(result) + "\n")
    _print_failures(result)
    if not result.ok:
        raise typer.Exit(1)


def summary(result: SelfTest) -> str:
    """The proof in one line."""
    joint = result.joint
    return (
        f"{_mark(result.enumeration_ok)} {result.walks} walks enumerated (max error {result.max_error:.0e})  "
        f"{_mark(result.joint_ok)} joint law: TV {joint.tv:.3f}, sampling noise alone {joint.noise:.3f}"
    )


def _mark(ok: bool) -> str:
    return "✓" if ok else "✗"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task("sampling", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_table(result: SelfTest) -> None:
    from rich.table import Table

    table = Table("", "verifier", box=None, pad_edge=False)
    for column in ("walks", "max error", "laws", "samples", "TV", "noise alone", "limit"):
        table.add_column(column, justify="right")
    for entry in result.verifiers:
        table.add_row(_mark(entry.ok), *_row(entry), style=None if entry.ok else "red")
    console().print(table)


def _row(entry: VerifierResult) -> tuple[str, ...]:
    joint = entry.joint
    return (
        entry.name,
        str(entry.enumeration.walks),
        f"{entry.enumeration.max_error:.0e}",
        str(len(entry.cases)),
        str(joint.samples),
        *(f"{value:.3f}" for value in (joint.tv, joint.noise, joint.limit)),
    )


def _print_failures(result: SelfTest) -> None:
    for entry in result.verifiers:
        walks = entry.enumeration
        if not walks.ok:
            note(f"✗ {entry.name}: error {walks.max_error:.0e} at a node with {walks.worst}", "red")
        for case in entry.failures:
            far = case.distance
            odd = f", {far.impossible} samples of probability 0" if far.impossible else ""
            note(f"✗ {case.name}: TV {far.tv:.3f}, noise alone {far.noise:.3f}, limit {far.limit:.3f}{odd}", "red")
