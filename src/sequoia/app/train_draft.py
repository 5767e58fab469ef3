"""`sequoia train-draft`: a head for a target, trained on the target's own texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sequoia.app import options
from sequoia.app.failure import INTERRUPTED
from sequoia.app.output import console, note
from sequoia.app.waiting import waiting
from sequoia.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Progress = Callable[[str, int, int, str], None]
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def train_draft(
    out: options.HeadOut,
    target: options.Target = None,
    data: options.TrainData = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    tokens: options.TrainTokens = 1_000_000,
    epochs: options.Epochs = 6,
    hours: options.Hours = None,
    draft_vocab: options.DraftVocab = 8192,
    disk: options.Disk = "16GiB",
    seed: options.TrainSeed = 0,
    resume: options.Resume = False,
    debug: options.Debug = False,
) -> None:
    """Train a head that drafts for a target, on texts that the target writes itself.

    Ctrl-C keeps what is done; --resume goes on, to the same weights as if nothing had happened.
    """
    from sequoia.training.settings import TrainSettings

    settings = TrainSettings(
        tokens=tokens, epochs=epochs, hours=hours, draft_vocab=draft_vocab, disk=parse_size("--disk", disk), seed=seed
    )

    from sequoia.measure.prompts import read_prompts

    records = read_prompts(data) if data else None

    from sequoia.engine import load
    from sequoia.model.threads import set_threads
    from sequoia.training.accelerated import accelerator
    from sequoia.training.head_training import Sources, train_head

    set_threads(threads)
    own = accelerator(device)
    with waiting("loading the model") as tell:
        engine = load(target, tree="off", dtype=dtype, device=own.device, notice=tell)
    with _going_on_later(out), _progress() as progress:
        state = train_head(
            engine.target,
            out,
            settings,
            Sources.of(engine.target, data or (), records, settings.length),
            resume=resume,
            accelerator=own,
            progress=progress if own.is_main_process else lambda part, done, total, words: None,
        )

    from sequoia.training.card import describe

    if own.is_main_process:
        note(f"{describe(state.looks[-1])}, after {state.step} steps")
        name = "" if target is None else f" --target {target}"
        note(
            f'saved in {out}. Run: sequoia generate{name} --draft {out} "…", or first sequoia tune{name} --draft {out}'
        )


def parse_size(name: str, text: str) -> int:
    """Bytes. UsageError, naming the option, where `text` is no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)?\s*", text)
    unit = _UNITS.get((found[2] or "B") if found else "")
    if found is None or unit is None:
        raise UsageError(f"{name} takes a size such as 4GiB or 500MB, not {text!r}.")
    return int(float(found[1]) * unit)


@contextmanager
def _going_on_later(out: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped. The same command with --resume goes on from here; {out}/training keeps what is done.")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _progress() -> Iterator[Progress]:
    """How far each part is: bars on stderr where that is a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines().tell
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(20),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Progress(
        TextColumn("{task.description}", markup=False), *columns, console=console(), refresh_per_second=4
    ) as bar:
        yield _Bars(bar).tell


class _Lines:
    """A line for each twentieth of a part."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def tell(self, part: str, done: int, total: int, words: str) -> None:
        twentieth = 20 * done // total
        if self._told.get(part) != twentieth:
            self._told[part] = twentieth
            note(f"{part}: {done}/{total} · {words}")


class _Bars:
    """A bar for each part."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def tell(self, part: str, done: int, total: int, words: str) -> None:
        if part not in self._tasks:
            self._tasks[part] = self._bar.add_task(part, total=total, words="")
        self._bar.update(self._tasks[part], completed=done, total=total, words=words)
