"""What a head is, for those who find it: README.md beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sequoia import __version__
from sequoia.training.settings import TrainSettings

if TYPE_CHECKING:
    from sequoia.training.trainer import Look, State


def describe(look: Look) -> str:
    """How a head agrees with its target, depth by depth."""
    greedy = " ".join(f"{each.greedy:.2f}" for each in look.agreements)
    overlap = " ".join(f"{each.overlap:.2f}" for each in look.agreements)
    return f"agrees at depths 0 to {len(look.agreements) - 1}: {greedy} greedily, {overlap} in mass"


def card(target: str, sources: Sequence[str], settings: TrainSettings, steps: int, state: State) -> str:
    """In Markdown."""
    tokens = state.step * settings.batch * settings.length
    command = " ".join(
        [
            f"sequoia train-draft --target {target}",
            *(f"--data {source}" for source in sources),
            f"--tokens {settings.tokens} --epochs {settings.epochs} --draft-vocab {settings.draft_vocab}",
            f"--seed {settings.seed}",
            *([f"--hours {settings.hours:g}"] if settings.hours is not None else []),
        ]
    )
    rows = "\n".join(
        f"| {look.step} | "
        + " | ".join(f"{each.loss:.3f} | {each.greedy:.3f} | {each.overlap:.3f}" for each in look.agreements)
        + " |"
        for look in state.looks
    )
    depths = range(len(state.looks[-1].agreements)) if state.looks else range(0)
    heading = "| step | " + " | ".join(f"loss {d} | greedy {d} | overlap {d}" for d in depths) + " |"
    rule = "|--|" + "--|--|--|" * len(depths)
    return f"""# A draft head for {target}

One decoder layer that reads the target's features and proposes what it may say next. It changes the speed of the target
and nothing that it says: `sequoia generate --target {target} --draft FOLDER`.

- Made by `{command}` (sequoia {__version__}).
- Data: texts of the target's own{", on its answers to " + ", ".join(sources) if sources else ""}.
- Training: {state.step} of {steps} steps, {tokens} tokens seen, {state.seconds / 3600:.2f} hours.

Held-out texts of the target's: cross entropy with its distributions, share of tokens where the most probable one is the
same (acceptance at temperature 0), and common mass (at temperature 1), by depth.

{heading}
{rule}
{rows}
"""
