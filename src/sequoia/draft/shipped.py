"""Heads that come with the package, and the targets that they were trained for."""

from __future__ import annotations

from pathlib import Path

from sequoia.draft.head_files import read_config
from sequoia.model.causal_lm import CausalLM

_FOLDER = Path(__file__).with_name("shipped_heads")
PLAN = "plan.json"
"""Beside a head's weights: what was planned for it where it was trained."""


def shipped_head(target: CausalLM) -> Path | None:
    """The folder of the head for this target; None where there is none.

    A head is named by its target. One for another model of the same name could only be slow.
    """
    folder = _FOLDER / target.loaded.name
    config = read_config(folder)
    if config is None or "/" in target.loaded.name:
        return None
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    fits = all(config.get(key) == size for key, size in sizes.items())
    return folder if fits else None
