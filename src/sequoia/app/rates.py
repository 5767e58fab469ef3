"""The acceptance rates that a command plans with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sequoia.tree.profile import AcceptanceProfile


def rates_for(profile: Path | None, draft: str) -> AcceptanceProfile:
    """The profile in the file, or without one the rates shipped for the kind of draft."""
    from sequoia.tree.profile import AcceptanceProfile

    if profile is not None:
        return AcceptanceProfile.load(profile)
    return AcceptanceProfile.shipped("ngram" if draft == "ngram" else "model")
