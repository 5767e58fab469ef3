"""What a plan is for: a target, a draft, their number formats, and where they run; and whether it fits what runs."""

from __future__ import annotations

from typing import Any

import torch

from sequoia.draft.copying import SUFFIX, CopyingDraft
from sequoia.draft.head_config import HeadName
from sequoia.draft.head_model import HeadModel
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.errors import FileError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.machine import cpu_name, gpu_name
from sequoia.tree.plan import PlanFile

_IDENTITY = {  # what makes another pair, and how people call it
    "target": "{}",
    "draft": "draft {}",
    "vocab_size": "{} token ids",
    "target_dtype": "a target in {}",
    "draft_dtype": "a draft in {}",
    "offload": "offload {}",
}


def pair_of(target: CausalLM, draft: object) -> dict[str, Any]:
    """Plain data, as `PlanFile.pair` holds it."""
    loaded = _loaded(draft)
    return {
        "target": target.loaded.name,
        "draft": draft_name(draft),
        "vocab_size": target.vocab_size,
        "target_dtype": target.loaded.weights,
        "draft_dtype": None if loaded is None else loaded.weights,
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "compiled": target.is_compiled,
        "offload": target.offload,
    }


def draft_name(draft: object) -> str:
    """ "ngram", the name of the model or head, or that of the caller's own class."""
    if isinstance(draft, NgramDraft):
        return "ngram"
    if isinstance(draft, CopyingDraft):
        return f"{draft_name(draft.own)}{SUFFIX}"
    loaded = _loaded(draft)
    return type(draft).__name__ if loaded is None else str(loaded.name)


def loaded_by_name(target: CausalLM, draft: object) -> bool:
    """Whether the pair's names say which models they are: objects' names do not."""
    loaded = _loaded(draft)
    known = isinstance(draft, NgramDraft) or isinstance(loaded, HeadName) or getattr(loaded, "load_again", None)
    return bool(known) and target.loaded.load_again is not None


def require_pair(file: PlanFile, name: str, target: CausalLM, draft: object) -> None:
    """Raises:
    FileError: the plan was tuned for other models, or for other number formats of them.
    """
    here = pair_of(target, draft)
    for key, what in _IDENTITY.items():
        if file.pair.get(key) != here[key]:
            there = what.format(file.pair.get(key))
            raise FileError(f"{name} was tuned for {there}, not {here[key]}. Run `sequoia tune` for this pair.")


def is_for_pair(file: PlanFile, target: CausalLM, draft: object) -> bool:
    """Whether a plan was tuned for these models in these number formats."""
    here = pair_of(target, draft)
    return all(file.pair.get(key) == here[key] for key in _IDENTITY)


def differences(file: PlanFile, target: CausalLM, draft: object) -> tuple[str, ...]:
    """How the machine that was measured differs from this one, each as "that, not this"."""
    here, device = pair_of(target, draft), target.device
    chip = "gpu" if device.type == "cuda" else "cpu"
    compared = [
        ("{}", file.pair.get("device"), here["device"]),
        ("{}", _passes(file.pair.get("compiled")), _passes(here["compiled"])),
        ("{}", file.machine.get(chip), gpu_name(device) or cpu_name()),
    ]
    if chip == "cpu":
        compared.append(("{} threads", file.pair.get("threads"), here["threads"]))
    return tuple(
        f"{what.format(there)}, not {ours}" for what, there, ours in compared if there is not None and there != ours
    )


def models_of(target: CausalLM, draft: object) -> list[CausalLM | HeadModel]:
    """Those of a pair that run here as models."""
    drafting = getattr(draft, "model", None)
    return [target, drafting] if isinstance(drafting, (CausalLM, HeadModel)) else [target]


def _passes(compiled: object) -> str:
    return "compiled passes" if compiled else "passes as they are"


def _loaded(draft: object) -> Any:
    """None where the draft is no model loaded here."""
    return getattr(getattr(draft, "model", None), "loaded", None)
