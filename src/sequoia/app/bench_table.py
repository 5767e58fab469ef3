"""The terminal's report of a comparison: a table for each setting, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from textwrap import fill
from typing import TYPE_CHECKING

from sequoia.app.output import print_out, terminal_width
from sequoia.measure.bench import wording

if TYPE_CHECKING:
    from rich.table import Table

    from sequoia.measure.bench.summary import MethodSummary, SettingSummary, Summary

_GAP = 2
_NARROWEST_NAME, _WIDEST_NAME, _WIDEST_CATEGORY = 8, 32, 16


@dataclass(frozen=True)
class _Column:
    """A heading, whose lines lie one above the other, and what each method has below it."""

    heading: str
    cells: tuple[str, ...]

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        return max(map(cell_len, (*self.heading.split("\n"), *self.cells)))


def print_tables(summary: Summary) -> None:
    """The tables and what must stand beside them, on stdout."""
    width = terminal_width()
    for setting in summary.settings:
        requests = max(entry.overall.requests for entry in setting.methods)
        print_out(f"{setting.setting} · {wording.count(requests, 'request')}", "bold")
        for table in _tables(setting, summary.categories, width):
            print_out(table)
            print_out("")
    for line in _lines_below(summary):
        print_out(fill(line, width, break_long_words=False, break_on_hyphens=False), "dim")


def _lines_below(summary: Summary) -> list[str]:
    run = summary.run
    about = " · ".join(filter(None, (wording.subject(run), wording.machine(run.machine), wording.workload(run))))
    return [*filter(None, [wording.progress(summary)]), about, wording.CONVENTIONS]


def _tables(summary: SettingSummary, categories: Sequence[str], width: int) -> Iterator[Table]:
    """As few as there is room for; where one is not enough the categories come last."""
    main, by_category = _main_columns(summary.methods), _category_columns(summary, categories)
    name_width = _name_width(summary.methods, max(column.width for column in main), width)
    room = width - name_width
    together = [main[0], *by_category, *main[1:]]
    groups = [together] if _fits(together, room) else _in_turn(main, by_category, room)
    return (_table(summary.methods, columns, name_width) for columns in groups)


def _in_turn(main: Iterable[_Column], others: Iterable[_Column], room: int) -> list[list[_Column]]:
    """What of `main` needs a table of its own shares it with `others`."""
    first, *rest = _filled(main, room)
    rest, last = rest[:-1], rest[-1:]
    return [first, *rest, *_filled(chain(*last, others), room)]


def _fits(columns: Iterable[_Column], room: int) -> bool:
    return sum(_GAP + column.width for column in columns) <= room


def _filled(columns: Iterable[_Column], room: int) -> Iterator[list[_Column]]:
    """One after another as long as there is room, and at least one in each table."""
    table: list[_Column] = []
    for column in columns:
        if table and not _fits((*table, column), room):
            yield table
            table = []
        table.append(column)
    if table:
        yield table


def _name_width(methods: Sequence[MethodSummary], widest_column: int, width: int) -> int:
    from rich.cells import cell_len

    longest = max(len("method"), *(cell_len(entry.method.name) for entry in methods))
    return min(longest, _WIDEST_NAME, max(_NARROWEST_NAME, width - _GAP - widest_column))


def _main_columns(methods: Sequence[MethodSummary]) -> list[_Column]:
    cells: dict[str, Callable[[MethodSummary], str]] = {
        "speedup": wording.speedup,
        "tokens/s": lambda entry: wording.with_interval(entry.overall.tokens_per_second),
        "accepted\nlength": lambda entry: wording.figure(entry.overall.accepted_length),
        "first\ntoken": lambda entry: wording.milliseconds(entry.overall.first_token_seconds),
        "output": wording.output,
    }
    return [_Column(heading, tuple(map(cell, methods))) for heading, cell in cells.items()]


def _category_columns(summary: SettingSummary, categories: Sequence[str]) -> list[_Column]:
    """Speedups, or tokens per second where plain decoding was not run; a single category says nothing more."""
    if len(categories) < 2:
        return []
    return [
        _Column(_shortened(name), tuple(_category_cell(summary, entry, name) for entry in summary.methods))
        for name in categories
    ]


def _shortened(name: str) -> str:
    return name if len(name) <= _WIDEST_CATEGORY else f"{name[: _WIDEST_CATEGORY - 1]}…"


def _category_cell(summary: SettingSummary, entry: MethodSummary, category: str) -> str:
    figures = entry.categories.get(category)
    if figures is None:
        return wording.NOTHING
    return wording.figure(figures.speedup, "×") if summary.has_baseline else wording.figure(figures.tokens_per_second)


def _table(methods: Sequence[MethodSummary], columns: Sequence[_Column], name_width: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True, width=name_width, vertical="bottom")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True, width=column.width, vertical="bottom")
    for row, entry in enumerate(methods):
        cells = (column.cells[row] for column in columns)
        table.add_row(entry.method.name, *cells, style="red" if entry.is_faulty else None)
    return table
