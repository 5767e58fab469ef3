"""The report as one HTML page: no scripts, and nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from sequoia.measure.bench import wording
from sequoia.measure.bench.picture import draw_round
from sequoia.measure.bench.plots import fastest, size_plot, speed_plot
from sequoia.measure.bench.records import Finding, Results, RoundEntry
from sequoia.measure.bench.summary import SettingSummary, Summary
from sequoia.measure.bench.tables import acceptance_table, category_table, figures_table
from sequoia.measure.document import definitions, details, document, figure, section
from sequoia.tree.records import save_bytes

PAGE_NAME = "report.html"
_MOST_LISTED = 50
_MOST_ROUNDS = 6
_HOW_TO_READ = (
    ("speedup", "Plain decoding's median time per token, divided by the method's, over the same requests."),
    ("tokens/s", "Of decoding alone, from the first step's tokens to the last; the median over requests."),
    (
        "accepted length",
        "Tokens per pass of the target, the next token included, so that plain decoding has 1. A tree pays where this "
        "grows by more than the time of a pass does.",
    ),
    ("first token", "From the request's start to its first tokens, reading the prompt included; the median."),
    ("prefill", "The part of it until the target's pass over the last of the prompt ends; the median."),
    (
        "small print below a figure",
        "Its 95% interval: bootstrap samples of the prompts, the same prompts for all methods. A dash stands where a "
        "single prompt gives none.",
    ),
    (
        "output",
        "At temperature 0 a lossless method must repeat the named method's tokens (✓). A near tie (≈) is a first "
        "difference between two tokens so close that the order of additions decides. All else is a fault (✗).",
    ),
)


def write_page(path: Path, results: Results, summary: Summary) -> None:
    """Write the page, whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    save_bytes(path, page(results, summary).encode("utf-8", "replace"))


def page(results: Results, summary: Summary) -> str:
    """The whole document."""
    limit = fastest(summary.settings)
    sections = (
        ("Results", "", _by_setting(summary, figures_table)),
        *_category_section(summary),
        ("Speed", "", _plots(summary, lambda setting: speed_plot(setting, limit))),
        ("Tokens per round by tree size", "", _plots(summary, size_plot)),
        (
            "Accepted by depth and rank",
            "Of the visits to a node at this depth, the share whose accepted child had this rank.",
            _by_setting(summary, _acceptances),
        ),
        (
            "A real round",
            "The token tree with its words. Green: the accepted path; filled: the next token, which the target added; "
            "grey: rejected, or never reached.",
            _rounds(results.rounds),
        ),
        ("Findings", "", _findings(summary)),
        ("How to read this", "", definitions(_HOW_TO_READ)),
        ("Machine and settings", "", _provenance(summary)),
    )
    return document(
        f"sequoia bench · {wording.subject(summary.run)}", _heading(summary), (section(*entry) for entry in sections)
    )


def _heading(summary: Summary) -> str:
    unfinished = wording.progress(summary)
    notice = f'<p class="notice">{escape(unfinished)}</p>' if unfinished else ""
    lines = "".join(
        f"<p>{escape(line)}</p>" for line in (wording.machine(summary.run.machine), wording.workload(summary.run))
    )
    return f"<h1>{escape(wording.subject(summary.run))}</h1>{lines}{notice}"


def _by_setting(summary: Summary, content: Callable[[SettingSummary], str]) -> str:
    made = ((setting, content(setting)) for setting in summary.settings)
    return "".join(f"<h3>{escape(str(setting.setting))}</h3>{text}" for setting, text in made if text)


def _category_section(summary: Summary) -> list[tuple[str, str, str]]:
    if len(summary.categories) < 2:
        return []
    compared = all(setting.has_baseline for setting in summary.settings)
    title = "Speedup by category" if compared else "Tokens per second by category"
    return [(title, "", _by_setting(summary, lambda setting: category_table(setting, summary.categories)))]


def _plots(summary: Summary, plot: Callable[[SettingSummary], str | None]) -> str:
    made = ((setting, plot(setting)) for setting in summary.settings)
    figures = "".join(figure(str(setting.setting), svg) for setting, svg in made if svg is not None)
    return f'<div class="plots">{figures}</div>' if figures else ""


def _acceptances(summary: SettingSummary) -> str:
    tables = [acceptance_table(entry, entry.acceptance) for entry in summary.methods if entry.acceptance is not None]
    return f'<div class="multiples">{"".join(tables)}</div>' if tables else ""


def _rounds(rounds: Sequence[RoundEntry]) -> str:
    """Each method's last, which is its best: the one most worth seeing in full, others to be opened."""
    best = {entry.method: entry for entry in rounds}.values()
    figures = [_round(entry) for entry in sorted(best, key=_interest, reverse=True)[:_MOST_ROUNDS]]
    return "".join([*figures[:1], details("other rounds", "".join(figures[1:]))])


def _interest(entry: RoundEntry) -> tuple[bool, int, int]:
    """Trees before chains, then long paths, then large trees."""
    return len(set(entry.parents)) < len(entry.parents), len(entry.path), len(entry.parents)


def _round(entry: RoundEntry) -> str:
    return figure(f"{entry.method}, prompt {entry.prompt}", draw_round(entry))


def _findings(summary: Summary) -> str:
    faults, ties = summary.faults, summary.near_ties
    if not faults and not ties:
        return "<p>No faults and no near ties.</p>"
    faulty = f'<p class="fault">{wording.count(len(faults), "fault")}</p>{_listed(faults)}' if faults else ""
    near = details(wording.count(len(ties), "near tie"), _listed(ties))
    return faulty + near


def _listed(findings: Sequence[Finding]) -> str:
    items = "".join(f"<li>{escape(wording.finding(entry))}</li>" for entry in findings[:_MOST_LISTED])
    rest = len(findings) - _MOST_LISTED
    return f"<ul>{items}</ul>{f'<p>and {rest:,} more</p>' if rest > 0 else ''}" if findings else ""


def _provenance(summary: Summary) -> str:
    run = summary.run
    noted = definitions([*wording.described(run.machine), *wording.described(run.settings)])
    lead = "The command that makes this again, with the models by the names they have here:"
    return f"<p>{lead}</p><pre>{escape(wording.command(run))}</pre>{noted}"
