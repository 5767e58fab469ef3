"""The command line: `sequoia COMMAND`. Heavy imports happen inside the commands, so that help and trees are instant."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sequoia import __version__
from sequoia.app.bench import bench_app
from sequoia.app.failure import Run, exit_code_of, watched_interrupts
from sequoia.app.generate import generate
from sequoia.app.output import flush_all, prepare_streams
from sequoia.app.selftest import selftest
from sequoia.app.train_draft import train_draft
from sequoia.app.trees import tree_app
from sequoia.app.tune import tune

app = typer.Typer(
    name="sequoia",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sequoia {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def sequoia(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless tree-speculative decoding: the text distribution of your model, in fewer of its passes."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(generate)
app.command()(tune)
app.command("train-draft")(train_draft)
app.command()(selftest)
app.add_typer(tree_app)
app.add_typer(bench_app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return its exit code."""
    prepare_streams()
    run = Run()
    with watched_interrupts(run):
        try:
            _invoke(sys.argv[1:] if arguments is None else list(arguments), run)
            flush_all()
        except BaseException as error:
            return exit_code_of(error, run)
    return 0


def _invoke(arguments: list[str], run: Run) -> None:
    # Not `app()`: typer would print errors in boxes and turn Ctrl-C and closed pipes into codes of its own.
    command = typer.main.get_command(app)
    with command.make_context("sequoia", arguments, obj=run) as context:
        command.invoke(context)
