"""What a generation tells of its plan: predicted against measured, and what the guard did."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from sequoia.engine import Engine
    from sequoia.speculate.stats import KindCount, PlanRun, Stats
    from sequoia.tree.option import Prediction


def plan_mark(engine: Engine) -> str:
    """For the heading: that the tree comes from a plan, and when that was made."""
    if engine.planned is None:
        return ""
    day = _day(engine.planned.file.data.get("date"))
    return f" (plan of {day})" if day else " (plan)"


def end_mark(stats: Stats) -> str:
    """For the closing line: what the guard had left on at the end, where that is not what it began with."""
    if stats.plan is None or not stats.plan.events:
        return ""
    kind = stats.plan.events[-1].to_kind
    return "" if kind == stats.plan.option.kind else f", at the end {kind}"


def plan_record(stats: Stats) -> dict[str, Any] | None:
    """Plain data for programs; None without a plan."""
    run = stats.plan
    if run is None:
        return None
    return {
        "kind": run.option.kind,
        "predicted": run.option.prediction.to_dict(),
        "measured": {kind: _measured(count) for kind, count in run.kinds.items()},
        "guard": [
            {"at_token": event.at_token, "from": event.from_kind, "to": event.to_kind, "reason": event.reason}
            for event in run.events
        ],
    }


def print_plan(screen: Console, stats: Stats) -> None:
    """Predicted against measured, and the guard's changes; nothing without a plan."""
    from rich.table import Table

    run = stats.plan
    if run is None:
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(run.option.name, no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    for row in _rows(run.option.prediction, run.measured):
        table.add_row(*row)
    screen.print(table)
    for line in _guard_lines(run):
        screen.print(line)


def _rows(predicted: Prediction, measured: KindCount | None) -> list[tuple[str, str, str]]:
    def found(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    tokens = None if measured is None else measured.tokens_per_round
    milliseconds = None if measured is None else 1000 * measured.seconds_per_round
    return [
        (
            "tokens per round",
            f"{predicted.tokens_per_round:.2f} ± {predicted.tokens_error:.2f}",
            found(tokens, ".2f"),
        ),
        (
            "ms per round",
            f"{1000 * predicted.seconds_per_round:.1f} ± {1000 * predicted.seconds_error:.1f}",
            found(milliseconds, ".1f"),
        ),
    ]


def _guard_lines(run: PlanRun) -> list[str]:
    lines = [
        f"guard: {event.from_kind} → {event.to_kind} at token {event.at_token}: {event.reason}" for event in run.events
    ]
    if len(run.kinds) > 1:
        lines.append("rounds: " + ", ".join(f"{kind} {count.rounds}" for kind, count in run.kinds.items()))
    return lines


def _measured(count: KindCount) -> dict[str, Any]:
    return {
        "rounds": count.rounds,
        "tokens_per_round": count.tokens_per_round,
        "seconds_per_round": count.seconds_per_round,
    }


def _day(text: object) -> str | None:
    """As people write it: 29 Nov, with the year where it is another one."""
    try:
        day = date.fromisoformat(str(text)[:10])
    except ValueError:
        return None
    short = f"{day.day} {day:%b}"
    return short if day.year == date.today().year else f"{short} {day.year}"
