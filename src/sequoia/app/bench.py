"""`sequoia bench`: ways to generate side by side, as a table and a page; `sequoia bench report` makes them again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sequoia.app import options
from sequoia.app.failure import INTERRUPTED
from sequoia.app.lists import numbers
from sequoia.app.output import console, note, write_out
from sequoia.app.report import memory_line
from sequoia.app.waiting import waiting
from sequoia.errors import UsageError

if TYPE_CHECKING:
    from sequoia.measure.bench.records import Results

bench_app = typer.Typer(name="bench")

QUICK_METHODS = ("plain", "transformers", "transformers-lookup", "chain:4", "optimal:16x4", "dynamic:16x4")
METHODS = (*QUICK_METHODS, "specinfer", "spectr", "sampler-match", "chains:4x4", "beam:4x4")
QUICK_SECONDS = 200.0  # of measuring; loading, warming up, checks and the page take their time too
_MOST_FAULTS = 8  # told on the terminal
QUICK_TOKENS, TOKENS = 48, 128
PROMPT_COUNT = 28  # four of each built-in category
_WIDEST_STEP = 36


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    methods: options.Methods = None,
    prompts: options.Prompts = None,
    count: options.PromptCount = PROMPT_COUNT,
    repeats: options.Repeats = 1,
    seed: options.BenchSeed = 0,
    quick: options.Quick = False,
    target: options.Target = None,
    draft: options.Draft = "auto",
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    compile: options.Compile = False,
    offload: options.Offload = "auto",
    memory_budget: options.MemoryBudget = None,
    most_context: options.Context = None,
    temperature: options.Temperatures = "0",
    top_p: options.TopPs = "1",
    max_tokens: options.BenchMaxTokens = None,
    prompt_tokens: options.PromptTokens = 128,
    out: options.BenchOut = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Compare ways to generate: speed, accepted length and whether the output is the same, method by method.

    `sequoia bench report DIR` makes table and page of a run again.
    """
    if context.invoked_subcommand is not None:
        _require_no_options(context)
        return
    temperatures, top_ps = numbers("--temperature", temperature), numbers("--top-p", top_p)
    names = _names(methods) or (QUICK_METHODS if quick else METHODS)
    folder = out or Path(time.strftime("bench-%Y%m%d-%H%M%S"))
    sources = prompts or ["built-in"]

    from sequoia.measure.bench.run import Job, run_bench
    from sequoia.measure.bench.summary import prompts_done
    from sequoia.measure.prompts import read_prompts

    tokens = max_tokens if max_tokens is not None else QUICK_TOKENS if quick else TOKENS
    job = Job(names, temperatures, top_ps, tokens, repeats, seed, QUICK_SECONDS if quick else None)
    records = read_prompts(sources, count, seed)
    _tell_start(folder)
    with waiting("loading the model") as tell:
        from sequoia.engine import load
        from sequoia.model.threads import set_threads

        set_threads(threads)
        engine = load(
            target,
            draft,
            dtype=dtype,
            device=device,
            draft_dtype=draft_dtype,
            compile=compile,
            offload=offload,
            memory_budget=memory_budget,
            context=most_context,
            notice=tell,
        )
        if engine.memory is not None:
            note(memory_line(engine.memory), "dim")
            job = job if methods else replace(job, methods=tuple(name for name in names if _runs_streamed(name)))
        if compile:
            engine.wait_until_compiled()  # or some methods would be measured without, and some with
    # What methods print is no part of the report.
    with _going_on_later(folder), _progress() as (notice, progress), redirect_stdout(sys.stderr):
        results = run_bench(
            engine,
            records,
            job,
            folder,
            prompt_tokens=prompt_tokens,
            sources=sources,
            notice=notice,
            progress=progress,
        )
    if quick and prompts_done(results) < len(records):
        note(f"--quick begins no prompt after {QUICK_SECONDS:.0f} seconds of measuring, and the rest is left out")
    _report(results, folder, as_json)


@bench_app.command()
def report(
    folder: options.BenchFolder,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Make the table and the page again from the raw results of a run, without a model."""
    from sequoia.measure.bench.records import ResultsFile

    _report(ResultsFile(folder).load(), folder, as_json)


def _require_no_options(context: typer.Context) -> None:
    """The comparison's options mean nothing to a subcommand."""
    command = context.invoked_subcommand
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE" and option.name != "debug":
            raise UsageError(
                f"{option.opts[0]} before {command} is for comparing. Put the options of {command} after it."
            )


def _runs_streamed(method: str) -> bool:
    """transformers' own ways to generate need the whole model."""
    return not method.startswith("transformers")


def _names(given: Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(name.strip() for entry in given or () for name in entry.split(","))
    if not all(names):
        raise UsageError("--methods takes names with commas between them, and one is empty. Give it or leave it out.")
    return names


def _tell_start(folder: Path) -> None:
    from sequoia.measure.bench.records import ResultsFile
    from sequoia.measure.bench.summary import prompts_done

    file = ResultsFile(folder)
    if not file.path.exists():
        note(f"results go to {folder}")
        return
    results = file.load()
    done, count = prompts_done(results), len(results.run.prompts)
    stand = f"all {count} prompts are done" if done == count else f"going on: {done} of {count} prompts are done"
    note(f"{folder}: {stand}")


@contextmanager
def _going_on_later(folder: Path) -> Iterator[None]:
    """Ctrl-C loses the prompt it falls into, and nothing else."""
    try:
        yield
    except KeyboardInterrupt:
        note(
            f"stopped. The same command with --out {folder} goes on; sequoia bench report {folder} shows what is there."
        )
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[int, int, str], None]]]:
    """What a run tells: notices, and requests done; a bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None, lambda done, total, what: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console(),
        transient=True,
        refresh_per_second=2,
    ) as bar:
        task = bar.add_task("", total=None)
        yield (
            lambda text: bar.update(task, description=_step(text)),
            lambda done, total, what: bar.update(task, completed=done, total=total, description=_step(what)),
        )


def _step(text: str) -> str:
    """As wide as any other, so that the bar stands still."""
    return (text if len(text) <= _WIDEST_STEP else f"{text[: _WIDEST_STEP - 1]}…").ljust(_WIDEST_STEP)


def _report(results: Results, folder: Path, as_json: bool) -> None:
    """Table or JSON, the page, and the faults, which make this a failure."""
    from sequoia.app.bench_table import print_tables
    from sequoia.measure.bench import wording
    from sequoia.measure.bench.page import PAGE_NAME, write_page
    from sequoia.measure.bench.summary import summarize

    summary = summarize(results)
    path = folder / PAGE_NAME
    if as_json:
        write_out(json.dumps({"page": str(path), **summary.to_dict()}, allow_nan=False) + "\n")
    else:
        print_tables(summary)
    write_page(path, results, summary)
    if not as_json:
        write_out(f"page: {path}\n")
    for fault in summary.faults[:_MOST_FAULTS]:
        note(f"✗ {wording.finding(fault)}", "red")
    if len(summary.faults) > _MOST_FAULTS:
        note(f"✗ and {len(summary.faults) - _MOST_FAULTS} more, which the page lists", "red")
    if summary.faults:
        raise typer.Exit(1)
