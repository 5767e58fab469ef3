"""The page's tables, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sequoia.measure.bench import wording
from sequoia.measure.bench.bootstrap import Estimate
from sequoia.measure.bench.summary import BASELINE, Acceptance, Figures, MethodSummary, SettingSummary
from sequoia.measure.document import table

_HEADINGS = ("method", "speedup", "tokens/s", "accepted length", "first token", "prefill", "output", "requests")
_MOST_DEPTHS, _MOST_RANKS = 12, 8
_DARK = 0.75  # shares from here on get light digits


def figures_table(summary: SettingSummary) -> str:
    """Everything overall, with intervals."""
    return table(_HEADINGS, ((_row_class(entry), _figures_row(entry)) for entry in summary.methods))


def category_table(summary: SettingSummary, categories: Sequence[str]) -> str:
    """Speedup by category, or tokens per second where plain decoding was not run."""
    rows = ((_row_class(entry), _category_row(summary, entry, categories)) for entry in summary.methods)
    return table(("method", *categories), rows)


def acceptance_table(entry: MethodSummary, found: Acceptance) -> str:
    """Shares of visits by depth and rank, the darker the larger; deep and wide trees are summed up at the end."""
    most = max(map(len, found.accepted), default=0)
    ranks, more = range(min(most, _MOST_RANKS)), most > _MOST_RANKS
    headings = (
        "depth",
        "visits",
        *("rank 0" if rank == 0 else str(rank) for rank in ranks),
        *(["others"] if more else []),
        "none",
    )
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    rows = list(zip(found.visits, found.accepted, strict=False))
    body = "".join(
        f'<tr><th scope="row">{depth}</th><td>{visits:,}</td>{_shares(visits, accepted, len(ranks), more)}</tr>'
        for depth, (visits, accepted) in enumerate(rows[:_MOST_DEPTHS])
    )
    below = f"<p>{wording.count(len(rows) - _MOST_DEPTHS, 'deeper level')} not shown</p>" * (len(rows) > _MOST_DEPTHS)
    return (
        f'<figure class="small"><figcaption>{escape(entry.method.name)}</figcaption><div class="scroll">'
        f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}</figure>'
    )


def _row_class(entry: MethodSummary) -> str:
    return ' class="fault"' if entry.is_faulty else ""


def _figures_row(entry: MethodSummary) -> list[str]:
    figures = entry.overall
    return [
        escape(entry.method.name),
        _speedup_cell(entry, figures),
        _cell(figures.tokens_per_second),
        _cell(figures.accepted_length),
        _cell(figures.first_token_seconds, " ms", 1e3),
        _cell(figures.prefill_seconds, " ms", 1e3),
        escape(wording.output(entry)),
        f"{figures.requests:,}",
    ]


def _category_row(summary: SettingSummary, entry: MethodSummary, categories: Sequence[str]) -> list[str]:
    cells = [escape(entry.method.name)]
    for name in categories:
        figures = entry.categories.get(name)
        if figures is None:
            cells.append(wording.NOTHING)
        else:
            cells.append(_speedup_cell(entry, figures) if summary.has_baseline else _cell(figures.tokens_per_second))
    return cells


def _speedup_cell(entry: MethodSummary, figures: Figures) -> str:
    """The baseline's has no interval: it is 1 by definition."""
    return wording.figure(figures.speedup, "×") if entry.method.name == BASELINE else _cell(figures.speedup, "×")


def _cell(estimate: Estimate | None, unit: str = "", scale: float = 1.0) -> str:
    """The figure with its interval below it."""
    value = wording.figure(estimate, unit, scale)
    return value if estimate is None else f"{value}<small>{wording.interval(estimate, scale)}</small>"


def _shares(visits: int, accepted: Sequence[int], ranks: int, more: bool) -> str:
    counts = [*accepted[:ranks], *[0] * (ranks - len(accepted)), *([sum(accepted[ranks:])] if more else [])]
    none = f"<td>{_share(visits - sum(accepted), visits)}</td>"
    return "".join(_heat(count, visits) for count in counts) + none


def _share(count: int, visits: int) -> str:
    return f"{count / visits:.2f}" if count else "0"


def _heat(count: int, visits: int) -> str:
    depth = count / visits if visits else 0.0
    light = ";color:#fff" if depth >= _DARK else ""
    return f'<td style="background:rgba(31,95,143,{depth:.3f}){light}">{_share(count, visits)}</td>'
