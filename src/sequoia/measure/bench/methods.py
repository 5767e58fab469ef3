"""Names become methods: trees of ours, peers, and users' files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sequoia.engine import Engine
from sequoia.errors import UsageError
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.files import Spec, check_spec, is_method_list, read_method_list, user_method
from sequoia.measure.bench.method import PLAIN, Emit, Method
from sequoia.measure.bench.peers import PEERS, peer_method
from sequoia.params import SamplingParams
from sequoia.planning.named import AUTO
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.specs import TREE_FORMS

NAMED = {
    PLAIN: "off",
    "chain": "chain:4",
    "chains": "chains:4x4",
    "beam": "beam:4x4",
    "optimal": "optimal:16x4",
    "dynamic": "dynamic:16x4",
    "sequoia": "sequoia:optimal:16x4",
    "specinfer": "specinfer:optimal:16x4",
    "spectr": "spectr:optimal:16x4",
    "sampler-match": "sampler-match:optimal:16x4",
}
"""Short names, and what they stand for."""

METHOD_FORMS = (
    f"{', '.join((*NAMED, *PEERS))}; a tree ({TREE_FORMS}); VERIFIER:TREE such as specinfer:chains:4x4; plan or "
    "plan:FILE, which `sequoia tune` makes; a .py file with a function generate; or a .yaml file with a list of methods"
)
"""What a method can be given as, for help texts."""

_PLAN = "plan"
_TREES = ("off", "chain", "chains", "beam", "kary", "optimal", "dynamic", _PLAN)


def build_methods(specs: Iterable[Spec], engine: Engine, clock: PassClock) -> tuple[Method, ...]:
    """All methods in their order; plain decoding comes first where it is not named.

    Args:
        specs: see `METHOD_FORMS`, or mappings as a .yaml file holds them.

    Raises:
        UsageError: a method is unknown, cannot run with these models, or is named twice.
        FileError: a file is missing or damaged.
    """
    methods = [build_method(spec, engine, clock) for spec in _expanded(specs)]
    if all(method.name != PLAIN for method in methods):
        methods.insert(0, build_method(PLAIN, engine, clock))
    _require_true_plain(methods)
    names = [method.name for method in methods]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"method {twice} is named twice. Leave one out, or name them in a .yaml file.")
    return tuple(method if method.same_as in names else replace(method, same_as=None) for method in methods)


def _require_true_plain(methods: Iterable[Method]) -> None:
    for method in methods:
        if method.name == PLAIN and method.spec != NAMED[PLAIN]:
            raise UsageError(
                f"{PLAIN} is plain decoding, which all others are held against, and {method.spec} has that name too. "
                "Give it another, in a .yaml file or by renaming."
            )


def build_method(spec: Spec, engine: Engine, clock: PassClock) -> Method:
    """One method; see `build_methods`."""
    spec = check_spec(spec)
    if isinstance(spec, Mapping):
        return _from_mapping(spec, engine, clock)
    peer, _, file = spec.partition(":")
    if peer in PEERS:
        return peer_method(peer, engine, clock, Path(file) if file else None)
    if spec.endswith(".py"):
        return user_method(Path(spec), engine, clock)
    verifier, tree = _verifier_and_tree(NAMED.get(spec, spec))
    if tree.partition(":")[0] not in _TREES and not _is_shape_file(tree):
        raise UsageError(f"unknown method {spec!r}. There are {METHOD_FORMS}.")
    return tree_method(Path(spec).stem if spec == tree and _is_shape_file(tree) else spec, engine, tree, verifier)


def tree_method(name: str, engine: Engine, tree: str, verifier: str = "auto") -> Method:
    """Ours: rounds of a session, without any text."""
    own = _with_tree(engine, tree, verifier.replace("-", "_"))
    chosen = [] if own.planned is None else [plan.chosen for plan in own.planned.file.plans]
    size = max((option.shape.size for option in chosen), default=own.tree.size)
    built_from = f"{tree} ({', '.join(option.name for option in chosen)})" if chosen else tree

    def generate(prompt: Sequence[int], params: SamplingParams, emit: Emit) -> None:
        for round_ in own.rounds(prompt, params):
            emit(round_)

    return Method(
        name,
        generate,
        same_as=None if name == PLAIN else PLAIN,
        tree_size=size if size > 1 else None,
        tree_kind=_kind(tree) if size > 1 else None,
        spec=built_from if verifier == "auto" else f"{verifier}:{built_from}",
    )


def _with_tree(engine: Engine, tree: str, verifier: str) -> Engine:
    kind, _, file = tree.partition(":")
    if kind != _PLAN:
        return engine.with_tree(tree, verifier)
    own = engine.with_tree(AUTO, verifier, plan=file or None)
    if own.planned is None:
        raise UsageError("method plan: this pair has no plan yet. Run `sequoia tune` for it, or name a plan:FILE.")
    return own


def _expanded(specs: Iterable[Spec]) -> list[Spec]:
    """Lists of methods in .yaml files put in their place."""
    expanded: list[Spec] = []
    for spec in specs:
        if is_method_list(spec):
            expanded += read_method_list(Path(str(spec)))
        else:
            expanded.append(spec)
    return expanded


def _verifier_and_tree(spec: str) -> tuple[str, str]:
    verifier, _, tree = spec.partition(":")
    return (verifier, tree) if tree and verifier.replace("-", "_") in VERIFIERS else ("auto", spec)


def _is_shape_file(tree: str) -> bool:
    return tree.endswith(".json") or os.sep in tree


def _kind(tree: str) -> str:
    kind = tree.partition(":")[0]
    return "file" if _is_shape_file(tree) and kind != _PLAN else kind


def _from_mapping(spec: Mapping[str, str], engine: Engine, clock: PassClock) -> Method:
    if "file" in spec:
        return user_method(Path(spec["file"]), engine, clock, spec.get("name"))
    tree, verifier = spec["tree"], spec.get("verifier", "auto")
    name = spec.get("name", tree if verifier == "auto" else f"{verifier}:{tree}")
    return tree_method(name, engine, tree, verifier)
