"""Draws docs/round.svg from a real round: python docs/picture.py"""

from __future__ import annotations

from pathlib import Path

import sequoia
from sequoia.engine import Engine
from sequoia.measure.bench.picture import draw_round
from sequoia.measure.bench.records import RoundEntry
from sequoia.speculate.session import Round
from sequoia.text import encode_prompt

PROMPT = "Repeat this list twice, one item per line: apple, banana, cherry, date, elderberry, fig, grape."
SEEDS = (1, 2, 3)
OUT = Path(__file__).with_name("round.svg")


def interesting_round(engine: Engine) -> Round:
    """Of all rounds of a few answers the one that accepts most, if need be by leaving the first children."""
    prompt = encode_prompt(engine.tokenizer, [{"role": "user", "content": PROMPT}])
    rounds = []
    for seed in SEEDS:
        session = engine.session(prompt, sequoia.SamplingParams(max_tokens=96, temperature=0.6, seed=seed))
        while session.finish_reason is None:
            rounds.append(session.step())

    def interest(outcome: Round) -> tuple[int, int]:
        path = outcome.verdict.path
        return len(path), sum(outcome.tree.shape.ranks[node] > 0 for node in path)

    return max(rounds, key=interest)


def entry(engine: Engine, outcome: Round) -> RoundEntry:
    """The round as words."""
    tokens = [*outcome.tree.tokens.tolist(), outcome.verdict.next_token]
    *words, next_word = (engine.tokenizer.decode([token]) for token in tokens)
    return RoundEntry("", "", outcome.tree.shape.parents, tuple(words), outcome.verdict.path, next_word)


def main() -> None:
    engine = sequoia.load(tree="optimal:16x5", dtype="fp32")
    OUT.write_text(draw_round(entry(engine, interesting_round(engine))), encoding="utf-8")


if __name__ == "__main__":
    main()
