"""Lossless tree-speculative decoding: measure, plan, prove, run, report."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequoia.engine import Chunk, Engine, Generation, load
    from sequoia.errors import FileError, ModelError, SequoiaError, UsageError, VocabularyError
    from sequoia.params import SamplingParams
    from sequoia.speculate.stats import Stats
    from sequoia.tree.dynamic import DynamicTree
    from sequoia.tree.latency import LatencyProfile
    from sequoia.tree.plan import Plan, PlanFile
    from sequoia.tree.planner import expected_tokens, optimal_shape
    from sequoia.tree.profile import AcceptanceProfile
    from sequoia.tree.shape import TreeShape

# Looked up on first use, so that drawing a tree does not wait for torch and transformers to import.
_HOMES = {
    "Chunk": "sequoia.engine",
    "Engine": "sequoia.engine",
    "Generation": "sequoia.engine",
    "load": "sequoia.engine",
    "FileError": "sequoia.errors",
    "ModelError": "sequoia.errors",
    "SequoiaError": "sequoia.errors",
    "UsageError": "sequoia.errors",
    "VocabularyError": "sequoia.errors",
    "SamplingParams": "sequoia.params",
    "Stats": "sequoia.speculate.stats",
    "expected_tokens": "sequoia.tree.planner",
    "optimal_shape": "sequoia.tree.planner",
    "AcceptanceProfile": "sequoia.tree.profile",
    "LatencyProfile": "sequoia.tree.latency",
    "Plan": "sequoia.tree.plan",
    "PlanFile": "sequoia.tree.plan",
    "TreeShape": "sequoia.tree.shape",
    "DynamicTree": "sequoia.tree.dynamic",
}

__all__ = [
    "AcceptanceProfile",
    "Chunk",
    "DynamicTree",
    "Engine",
    "FileError",
    "Generation",
    "LatencyProfile",
    "ModelError",
    "Plan",
    "PlanFile",
    "SamplingParams",
    "SequoiaError",
    "Stats",
    "TreeShape",
    "UsageError",
    "VocabularyError",
    "expected_tokens",
    "load",
    "optimal_shape",
]

try:
    __version__ = version("sequoia")
except PackageNotFoundError:  # run from a source folder that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sequoia' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
