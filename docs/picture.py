"""Draws docs/round.svg from a real round: python docs/picture.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

import sequoia
from sequoia.engine import Engine
from sequoia.speculate.session import Round, Session
from sequoia.text import encode_prompt

PROMPT = "Repeat this list twice, one item per line: apple, banana, cherry, date, elderberry, fig, grape."
OUT = Path(__file__).with_name("round.svg")
COLUMN, ROW, PAD = 150, 34, 20
INK, FADED, ACCEPTED, PAPER = "#24292f", "#8c959f", "#1a7f37", "#ffffff"


def interesting_round(engine: Engine) -> Round:
    """The round of one answer that accepts a child that is not its parent's first, deepest first."""
    prompt = encode_prompt(engine.tokenizer, [{"role": "user", "content": PROMPT}])
    params = sequoia.SamplingParams(max_tokens=96, temperature=0.6, seed=7)
    session = Session(engine.target, engine.draft.start(), engine.shape, engine.verifier, prompt, params)
    rounds = []
    while session.finish_reason is None:
        rounds.append(session.step())

    def interest(outcome: Round) -> tuple[int, int]:
        path = outcome.verdict.path
        return len(path), sum(outcome.tree.shape.ranks[node] > 0 for node in path)

    return max(rounds, key=interest)


def heights(shape: sequoia.TreeShape) -> list[float]:
    """A row for each leaf from the top, inner nodes at the middle of their children."""
    rows = [0.0] * shape.size
    for row, leaf in enumerate(sorted((n for n in range(shape.size) if not shape.children(n)), key=_order(shape))):
        rows[leaf] = float(row)
    for node in reversed(range(shape.size)):
        if children := shape.children(node):
            rows[node] = (rows[children[0]] + rows[children[-1]]) / 2
    return rows


def _order(shape: sequoia.TreeShape):  # type: ignore[no-untyped-def]
    return lambda node: [shape.ranks[ancestor] for ancestor in shape.paths[node]]


def draw(engine: Engine, outcome: Round) -> str:
    tree, shape = outcome.tree, outcome.tree.shape
    rows = heights(shape)
    words = [engine.tokenizer.decode([token]).replace("\n", "↵") or "·" for token in tree.tokens.tolist()]
    after = engine.tokenizer.decode([outcome.verdict.next_token]).replace("\n", "↵")
    accepted = {0, *outcome.verdict.path}
    spots = [(PAD + shape.depths[n] * COLUMN, PAD + rows[n] * ROW + ROW / 2) for n in range(shape.size)]
    end = outcome.verdict.path[-1] if outcome.verdict.path else 0
    parts = []
    for node in range(1, shape.size):
        (x0, y0), (x1, y1) = spots[shape.parents[node]], spots[node]
        kept = node in accepted
        parts.append(
            f'<path d="M{x0 + 92},{y0} C{x0 + 122},{y0} {x1 - 30},{y1} {x1},{y1}" fill="none" '
            f'stroke="{ACCEPTED if kept else "#d0d7de"}" stroke-width="{3 if kept else 1.5}"/>'
        )
    parts += [_box(*spots[n], words[n], ACCEPTED if n in accepted else FADED, n in accepted) for n in range(shape.size)]
    x, y = spots[end]
    parts.append(f'<text x="{x + 102}" y="{y - 9}" fill="{ACCEPTED}" font-size="13">+ {escape(after)!s}</text>')
    width, height = PAD * 2 + shape.depth * COLUMN + 150, PAD * 2 + (max(rows) + 1) * ROW + 26
    count = len(outcome.verdict.path) + 1
    caption = f"one pass of the target checked {shape.size} nodes and emitted {count} tokens"
    parts.append(f'<text x="{PAD}" y="{height - 14}" fill="{INK}" font-size="14">{caption}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'font-family="ui-monospace, monospace" font-size="13"><rect width="100%" height="100%" fill="{PAPER}"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _box(x: float, y: float, word: str, colour: str, bold: bool) -> str:
    weight = "bold" if bold else "normal"
    return (
        f'<rect x="{x}" y="{y - 13}" width="92" height="26" rx="6" fill="{PAPER}" stroke="{colour}"/>'
        f'<text x="{x + 46}" y="{y + 4.5}" text-anchor="middle" fill="{colour}" font-weight="{weight}">'
        f"{escape(word[:11])}</text>"
    )


def main() -> None:
    engine = sequoia.load(tree="optimal:16x5", dtype="fp32")
    OUT.write_text(draw(engine, interesting_round(engine)), encoding="utf-8")


if __name__ == "__main__":
    main()
