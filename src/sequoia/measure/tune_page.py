"""The report of a tuning: one HTML page, and a picture beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from sequoia.errors import UsageError
from sequoia.measure.bench import wording
from sequoia.measure.charts import svg
from sequoia.measure.document import definitions, document, figure, section, table
from sequoia.measure.tree_plot import draw_tree, tree_size
from sequoia.measure.tune_picture import picture
from sequoia.measure.tune_plots import draw_acceptance, draw_latency, draw_rest, draw_speed, power_law
from sequoia.measure.tune_wording import command, subject, verdict, workload
from sequoia.tree.option import Option
from sequoia.tree.plan import BatchOption, Plan, PlanFile, describe_law
from sequoia.tree.records import save_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 3.6  # inches of a plot
# Where there is little room, a heading may break after its stroke.
_OPTION_HEADINGS = ("", "tokens/\u200bround", "ms/\u200bround", "tokens/s", "speedup")
_BATCH_HEADINGS = ("requests", "best", *_OPTION_HEADINGS[1:4], "tokens/s of all", "speedup")
_HOW_TO_READ = (
    ("off, chain 3, tree 16/4", "Plain decoding; a chain of 3 draft tokens; a tree of 16 nodes and depth 4."),
    ("▸, ring", "Chosen: the least predicted time per token."),
    ("tokens/round", "Tokens per pass of the target, the next token included, so that plain decoding has 1."),
    ("ms/round", "The target's pass, the draft's levels and the overhead, from the times of passes."),
    ("speedup", "Plain decoding's predicted time per token, divided by the option's."),
    ("±, bars and bands", "One standard error; in the times of passes, bands hold the middle half of the repeats."),
    (
        "depth 0, 1, …",
        "Of the visits to a node at this depth, the share whose accepted child has this rank. Ranks count from 0, the "
        "child drawn first. Shares of 0 have no place on the axis.",
    ),
    (
        "all rejected",
        "Of the visits to the root, the share in which the children of this rank and of all before it were rejected. "
        "Dashed: the power law k^−η of the number k of children that was fitted to it.",
    ),
    ("score", "The probability that a node is accepted: the product of the rates on its path."),
)


def write_report(file: Path, plan_file: PlanFile) -> None:
    """Write the page, and beside it the picture, whose name ends in .png. Each comes whole or not at all.

    Raises:
        UsageError: the page has the picture's name.
        FileError: one of them cannot be written.
    """
    beside = file.with_suffix(".png")
    if file == beside:
        raise UsageError(f"the report is a page with a picture beside it, and {file} names a picture. Use .html.")
    text, image = page(plan_file), picture(plan_file)
    save_bytes(beside, image)
    save_bytes(file, text.encode("utf-8", "replace"))


def page(plan_file: PlanFile) -> str:
    """The whole document."""
    plans = plan_file.plans
    sections = (
        ("Plan", "", _side_by_side(map(_options, plans))),
        (
            "Predicted speed by size",
            "The best tree and the chain of each size.",
            _plots((plan for plan in plans if plan.sizes), _speed, draw_speed),
        ),
        ("Acceptance by rank", "", _plots(filter(_has_rates, plans), _acceptance, draw_acceptance)),
        ("Time of passes", "", _times(plan_file)),
        (
            "Tree",
            "The wider a node and its branch, the more probable it is accepted; the number is its score. A first child "
            "is on its parent's line, the others are below.",
            _by_plan(plans, _tree),
        ),
        (
            "Several requests at once",
            f"On paper, for requests at {describe_law(plans[0].params)} that share their passes: rows, widths and "
            "sizes count once for each.",
            _batches(plan_file.batch),
        ),
        ("How to read this", "", definitions(_HOW_TO_READ)),
        ("Machine, data and settings", "", _provenance(plan_file)),
    )
    title = f"sequoia tune · {subject(plan_file.pair)}"
    return document(title, _heading(plan_file), (section(*entry) for entry in sections))


def _heading(plan_file: PlanFile) -> str:
    lines = (wording.machine(plan_file.machine), workload(plan_file.data))
    return f"<h1>{escape(subject(plan_file.pair))}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in lines if line)


def _by_plan(plans: Iterable[Plan], content: Callable[[Plan], str]) -> str:
    made = ((plan, content(plan)) for plan in plans)
    return "".join(f"<h3>{escape(describe_law(plan.params))}</h3>{text}" for plan, text in made if text)


def _options(plan: Plan) -> str:
    rows = ((_mark(option is plan.chosen), _option_cells(option, plan)) for option in plan.options)
    title, content = escape(describe_law(plan.params)), table(_OPTION_HEADINGS, rows, "plan")
    return f"<section><h3>{title}</h3><p>{escape(verdict(plan))}</p>{content}</section>"


def _mark(is_chosen: bool) -> str:
    return ' class="chosen"' if is_chosen else ""


def _option_cells(option: Option, plan: Plan) -> list[str]:
    found, plain = option.prediction, plan.plain.prediction
    return [
        f'<span class="mark">{"▸" * (option is plan.chosen)}</span>{escape(option.name)}',
        _with_error(found.tokens_per_round, found.tokens_error),
        _with_error(1e3 * found.seconds_per_round, 1e3 * found.seconds_error),
        _with_error(found.tokens_per_second, found.tokens_per_second_error),
        f"{plain.seconds_per_token / found.seconds_per_token:.2f}×",
    ]


def _with_error(value: float, error: float) -> str:
    small = f"<small>± {wording.three_digits(error, value)}</small>" if error else ""
    return wording.three_digits(value, value) + small


def _plots(plans: Iterable[Plan], describe: Callable[[Plan], str], draw: Callable[[Axes, Plan], None]) -> str:
    return _gallery(_plot(plan, describe(plan), draw) for plan in plans)


def _plot(plan: Plan, description: str, draw: Callable[[Axes, Plan], None]) -> str:
    law = describe_law(plan.params)
    return figure(law, svg(f"{law}: {description}", _HEIGHT, lambda axes: draw(axes, plan)))


def _gallery(figures: Iterable[str]) -> str:
    content = "".join(figures)
    return f'<div class="plots">{content}</div>' if content else ""


def _speed(plan: Plan) -> str:
    return "predicted tokens/s, " + ", ".join(
        f"{option.name} {option.prediction.tokens_per_second:.1f}" for option in plan.options
    )


def _has_rates(plan: Plan) -> bool:
    return any(map(any, plan.profile.rates))


def _acceptance(plan: Plan) -> str:
    law = power_law(plan.profile)
    fitted = f"; η {law.exponent:.2f}, r² {law.fit:.3f}" if law else ""
    return "share of visits by rank at depth 0, " + ", ".join(f"{rate:.3f}" for rate in plan.profile.rates[0]) + fitted


def _times(file: PlanFile) -> str:
    latency, chosen = file.latency, [plan.chosen for plan in file.plans]
    one_row = ", ".join(
        f"{1e3 * timings[1].seconds:.1f} ms after {context:,} tokens" for context, timings in latency.target.items()
    )
    target = svg(f"a target pass of 1 row, {one_row}", _HEIGHT, lambda axes: draw_latency(axes, latency, chosen))
    figures = [figure("the target's pass, by tokens of context", target)]
    if latency.draft or latency.overhead:
        rest = svg("what a round takes besides", _HEIGHT, lambda axes: draw_rest(axes, latency))
        figures.append(figure("the draft's levels, and the round's overhead", rest))
    return _gallery(figures)


def _tree(plan: Plan) -> str:
    """What was chosen; and the best tree where it was not."""
    options = dict.fromkeys((plan.chosen, plan.option("tree")))
    return "".join(_drawn(plan, option) for option in options if option is not None and option.kind != "off")


def _drawn(plan: Plan, option: Option) -> str:
    size = tree_size(option.shape)
    role = "chosen" if option is plan.chosen else "not chosen"
    description = f"{option.name} at {describe_law(plan.params)}, {role}"
    drawing = svg(description, size[1], lambda axes: draw_tree(axes, option.shape, plan.profile, *size), size[0])
    return figure(f"{option.name}: {role}", drawing)


def _batches(options: Iterable[BatchOption]) -> str:
    rows = [("", _batch_cells(option)) for option in options]
    if not rows:
        return ""
    beyond = any(option.extrapolated for option in options)
    return table(_BATCH_HEADINGS, rows, "plan") + "<p>* more rows at once than were measured</p>" * beyond


def _batch_cells(option: BatchOption) -> list[str]:
    found = option.chosen.prediction
    speed = found.tokens_per_second
    numbers = (found.tokens_per_round, 1e3 * found.seconds_per_round, speed, option.batch * speed)
    name = option.chosen.name + " *" * option.extrapolated
    return [f"{option.batch:,}", escape(name), *(wording.three_digits(n, n) for n in numbers), f"{option.speedup:.2f}×"]


def _provenance(file: PlanFile) -> str:
    noted = {**file.pair, **file.data, **file.machine, **file.latency.provenance}
    entries = definitions(wording.described(noted))
    lead = "The command that makes this again, with the models by the names they have here:"
    return f"<p>{lead}</p><pre>{escape(command(file))}</pre>{entries}"


def _side_by_side(parts: Iterable[str]) -> str:
    return f'<div class="beside">{"".join(parts)}</div>'
