"""`sequoia tune`: measure a pair of models on this machine, and plan what to run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sequoia.app import options
from sequoia.app.failure import INTERRUPTED
from sequoia.app.lists import integers, numbers
from sequoia.app.output import console, note, print_out, write_out
from sequoia.app.report import memory_line
from sequoia.app.waiting import waiting
from sequoia.errors import FileError, UsageError
from sequoia.params import SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from sequoia.engine import Engine
    from sequoia.tree.plan import BatchOption, Plan, PlanFile

TEMPERATURES, BATCHES = "0,0.6,1", "1,4,16"
_UNITS = {"accepting": "texts", "timing": "sweeps", "planning": "plans"}
_BUSY = 0.3  # scatter of times: on an idle machine it is below 0.1
_WIDEST_PART = max(map(len, _UNITS))

Tell = Callable[[str], None]
Progress = Callable[[str, int, int], None]


def tune(
    target: options.Target = None,
    draft: options.Draft = "auto",
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    compile: options.Compile = False,
    offload: options.Offload = "auto",
    memory_budget: options.MemoryBudget = None,
    context: options.Context = None,
    prompts: options.TunePrompts = None,
    count: options.TunePromptCount = 200,
    samples: options.Samples = 200,
    tokens: options.SampleTokens = 128,
    prompt_tokens: options.TunePromptTokens = 128,
    seed: options.TuneSeed = 0,
    seconds: options.Seconds = 60.0,
    from_run: options.FromRun = None,
    temperature: options.TuneTemperatures = TEMPERATURES,
    top_p: options.TopP = SamplingParams.top_p,
    top_k: options.TopK = SamplingParams.top_k,
    min_p: options.MinP = SamplingParams.min_p,
    repetition_penalty: options.RepetitionPenalty = SamplingParams.repetition_penalty,
    presence_penalty: options.PresencePenalty = SamplingParams.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = SamplingParams.frequency_penalty,
    max_size: options.MaxSize = 128,
    max_depth: options.MaxDepth = 16,
    batch: options.Batch = BATCHES,
    out: options.PlanOut = None,
    report: options.ReportOut = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Measure how often draft and target agree and how long their passes take here, and plan the fastest tree.

    The plan is used from then on for this pair of models. A run that was stopped goes on with the same command.
    """
    law = SamplingParams(
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    params = tuple(replace(law, temperature=value) for value in numbers("--temperature", temperature))
    batches = integers("--batch", batch)
    _require_places(out, report)
    sources = prompts or ["built-in"]

    from sequoia.engine import load
    from sequoia.measure.prompts import read_prompts
    from sequoia.measure.runs import read_runs
    from sequoia.measure.tune import TuneSettings
    from sequoia.model.threads import set_threads

    settings = TuneSettings(
        params,
        samples=samples,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        seed=seed,
        seconds=seconds,
        max_size=max_size,
        max_depth=max_depth,
        batch=batches,
    )
    runs = [run for path in from_run or () for run in read_runs(path)]
    records = read_prompts(sources, count)
    set_threads(threads)
    with waiting("loading the model") as tell_loading:
        engine = load(
            target,
            draft,
            "off",
            dtype=dtype,
            device=device,
            draft_dtype=draft_dtype,
            compile=compile,
            offload=offload,
            memory_budget=memory_budget,
            context=context,
            notice=tell_loading,
        )
        engine.wait_until_compiled()  # what is timed is what will run
    _tell_pair(engine)

    from sequoia.measure.tune import about
    from sequoia.measure.tune import tune as measured
    from sequoia.measure.tune_store import kept_parts

    with (
        _going_on_later(),
        _progress() as (tell, progress),
        kept_parts(about(engine, records, settings), tell) as store,
    ):
        file = measured(engine, records, settings, store, progress, sources=sources, runs=runs, notice=tell)
        kept = _save(file, out, report)
    _report(file, kept, out, report, as_json)


def _require_places(out: Path | None, report: Path | None) -> None:
    """Refuse what could not be written, before minutes are spent on it."""
    for name, path in (("--out", out), ("--report", report)):
        if path is not None and not path.parent.is_dir():
            raise FileError(f"{name} {path}: there is no folder {path.parent}. Make it first.")
        if path is not None and path.is_dir():
            raise FileError(f"{name} {path} is a folder. Give the name of a file.")
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--report writes an HTML page, and {report} ends in {report.suffix or 'nothing'}. Use .html.")


def _tell_pair(engine: Engine) -> None:
    from sequoia.measure.tune_wording import subject

    note(subject(engine.pair), "dim")
    if engine.memory is not None:
        note(memory_line(engine.memory), "dim")


def _save(file: PlanFile, out: Path | None, report: Path | None) -> Path:
    """Everywhere it is wanted; returns where it is found from now on."""
    from sequoia.tree import plan_cache

    path = plan_cache.store(file)
    if out is not None:
        file.save(out)
    if report is not None:
        from sequoia.measure.tune_page import write_report

        write_report(report, file)
    return path


@contextmanager
def _going_on_later() -> Iterator[None]:
    """Ctrl-C loses the part that it falls into, and nothing else."""
    try:
        yield
    except KeyboardInterrupt:
        note("stopped. The same command goes on from here; what is finished is kept in the cache until then.")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _progress() -> Iterator[tuple[Tell, Progress]]:
    """What tells people something, and how far each part is: bars on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield note, _Lines().tell
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), TextColumn("{task.fields[count]}", markup=False), TimeElapsedColumn())
    with Progress(
        TextColumn("{task.description}", markup=False), *columns, console=console(), refresh_per_second=4
    ) as bar:
        yield (lambda text: bar.console.print(text, soft_wrap=True)), _Bars(bar).tell


class _Lines:
    """A line as each part begins."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def tell(self, part: str, done: int, total: int) -> None:
        if part not in self._begun:
            self._begun.add(part)
            note(f"{part}: {_counted(part, done, total)}")


class _Bars:
    """A bar for each part, which stops its clock when the next begins."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def tell(self, part: str, done: int, total: int) -> None:
        if part not in self._tasks:
            self._tasks[part] = self._bar.add_task(part.ljust(_WIDEST_PART), total=total, count="")
        self._bar.update(self._tasks[part], completed=done, total=total, count=_counted(part, done, total))


def _counted(part: str, done: int, total: int) -> str:
    return f"{done}/{total} {_UNITS[part]}"


def _report(file: PlanFile, kept: Path, out: Path | None, report: Path | None, as_json: bool) -> None:
    """The tables or JSON, and where everything is."""
    if as_json:
        paths = {"kept": kept, "out": out, "report": report}
        places = {name: None if path is None else str(path) for name, path in paths.items()}
        write_out(json.dumps({**places, **file.to_dict()}, allow_nan=False) + "\n")
    else:
        for plan in file.plans:
            _print_plan(plan)
        if line := _batch_line(file.batch):
            print_out(line, "dim")
    _tell_busy(file)
    extra = [f"also in {out}" if out else "", f"report: {report}" if report else ""]
    note(" · ".join(["saved; used from now on for this pair", *filter(None, extra)]))


def _tell_busy(file: PlanFile) -> None:
    """Times of a busy machine are no good to choose by."""
    scatter = file.latency.provenance.get("scatter", 0.0)
    if scatter > _BUSY:
        note(
            f"the machine was busy: times of the same pass scatter by {scatter:.0%}. Tune again when it is idle, "
            "or with more --seconds.",
            "yellow",
        )


def _print_plan(plan: Plan) -> None:
    """Its table, the chosen option set off."""
    title, *rows = repr(plan).splitlines()
    print_out(title, "bold")
    for row in rows:
        print_out(row, "bold green" if row.startswith("▸") else None)
    print_out("")


def _batch_line(batch: Sequence[BatchOption]) -> str:
    """What several requests at once would best run, on paper."""
    several = [option for option in batch if option.batch > 1]
    found = [
        f"{option.batch}: {option.chosen.name}" + (f", {option.speedup:.2f}× plain" if option.speedup > 1 else "")
        for option in several
    ]
    return "requests at once, on paper · " + " · ".join(found) if found else ""
