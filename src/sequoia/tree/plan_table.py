"""A plan as a table: for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sequoia.tree.option import Option, fastest

_HEAD = ("", "tokens/round", "ms/round", "tokens/s", "")


def table_rows(options: Sequence[Option]) -> list[tuple[str, ...]]:
    """For each option its name, tokens per round, ms per round, tokens/s with one standard error, and the speedup over
    plain decoding, which the options must hold."""
    plain = next(option for option in options if option.kind == "off").prediction
    return [_row(option, plain.seconds_per_token) for option in options]


def text_table(title: str, options: Sequence[Option]) -> str:
    """Lines of text, the chosen option marked."""
    chosen = fastest(options)
    marks = ["  ", *("▸ " if option is chosen else "  " for option in options)]
    cells = [_HEAD, *table_rows(options)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    lines = [title]
    for mark, (name, *values) in zip(marks, cells, strict=True):
        columns = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
        lines.append((mark + "   ".join([name.ljust(widths[0]), *columns])).rstrip())
    return "\n".join(lines)


def html_table(title: str, options: Sequence[Option]) -> str:
    """The same as an HTML table."""
    chosen = fastest(options)
    rows = ["".join(f"<th>{escape(cell)}</th>" for cell in _HEAD)]
    for option, cells in zip(options, table_rows(options), strict=True):
        style = ' style="font-weight:bold"' if option is chosen else ""
        rows.append("".join(f"<td{style}>{escape(cell)}</td>" for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"


def _row(option: Option, plain: float) -> tuple[str, ...]:
    p = option.prediction
    error = f" ± {p.tokens_per_second_error:.1f}" if p.tokens_per_second_error >= 0.05 else ""
    speedup = "" if option.kind == "off" else f"{plain / p.seconds_per_token:.2f}× plain"
    speed = f"{p.tokens_per_second:.1f}{error}"
    return option.name, f"{p.tokens_per_round:.2f}", f"{p.seconds_per_round * 1000:.1f}", speed, speedup
