"""Proof by trial that a model can verify trees: node logits must equal those of a linear run over the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block
from sequoia.model.loaded import LoadedModel
from sequoia.model.offload.hollow import sample_model

# A root with two children; the first has two, of which the second goes on. Stored out of level order on purpose.
_PATHS = ((0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 3, 4), (0, 5), (0, 5, 6))  # of node i, itself included
_LEAVES = (_PATHS[2], _PATHS[4], _PATHS[6])
_PREFIX = 5
_AFTER = 3  # tokens run after a path was kept: one alone, then the others
_WINDOW = 3  # sliding windows are narrowed to this for the probe, so that the prefix and the longest path cross them
# Two 16-bit passes that add up in another order came up to 0.09 apart; a wrong mask, position or slot moves logits by
# about their whole spread.
_TOLERANCE_16_BIT = 0.2
_SMALLEST_CONTEXT = 1 + len(_LEAVES[1]) + _AFTER


def proved(loaded: LoadedModel) -> CausalLM:
    """The model, shown to follow trees exactly and then settled into its fastest form.

    Of a hollow model a sample of its layers is probed; how it is to be filled is the caller's to say.

    Raises:
        ModelError: see `probe`.
    """
    return settled(probed(loaded))


def probed(loaded: LoadedModel) -> CausalLM:
    """The model, lean where that follows trees exactly, else in its modules.

    Raises:
        ModelError: see `probe`.
    """
    model = CausalLM(loaded)
    if loaded.hollow is not None:
        sample = sample_model(loaded.hollow, loaded.dtype)
        probe(CausalLM(replace(loaded, model=sample, hollow=None)))
        return model
    try:
        probe(model)
    except ModelError:
        if not model.is_lean:
            raise
        model = CausalLM(loaded, lean=False)
        probe(model)
    return model


def settled(model: CausalLM) -> CausalLM:
    """The model in its fastest form, which is tried too; a hollow one as it is.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    if model.loaded.hollow is not None:
        return model
    model.settle()
    check_settled(model)
    return model


@torch.inference_mode()
def probe(model: CausalLM) -> None:
    """Check one small tree, then a few steps after keeping a path, against the model's own run without a cache.

    Raises:
        ModelError: the logits differ by more than rounding, or the model's forward fails.
    """
    name, context, fine = model.loaded.name, model.context_length, _is_fine(model.loaded)
    if context is not None and context < _SMALLEST_CONTEXT:
        raise ModelError(
            f"{name} has a context of {context} tokens; Sequoia needs {_SMALLEST_CONTEXT}. Choose another model."
        )
    try:
        with _narrow_window(model):
            error = _typical_error(model, _linear, fine)
    except Exception as failure:
        reason = " ".join(str(failure).split())[:200] or type(failure).__name__
        raise ModelError(
            f"{name} cannot run with a tree mask and our cache: {_weakness(model)} ({reason}). Choose another model."
        ) from failure
    tolerance = _tolerance(fine)
    if not error <= tolerance:
        raise ModelError(
            f"{name} gives other logits in a token tree than in a linear run (relative error {error:.2g}, rounding "
            f"explains {tolerance:g}): {_weakness(model)}. Choose another model."
        )


@torch.inference_mode()
def check_settled(model: CausalLM) -> None:
    """The same tree again, against the settled model's own linear run: kernels differ from machine to machine.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    loaded = model.loaded
    fine = _is_fine(loaded) and loaded.bits != 8  # a last bit can move an 8-bit number by one
    with _narrow_window(model):
        error = _typical_error(model, lambda settled, tokens: settled.forward(tokens, settled.new_cache()), fine)
    if not error <= _tolerance(fine):
        raise ModelError(
            f"{loaded.name} with {loaded.weights} weights gives other logits in a token tree than in a linear run here "
            f"(relative error {error:.2g}, rounding explains {_tolerance(fine):g}): this torch's kernels do not suit "
            'this machine. Choose dtype="fp32".'
        )


def _tolerance(fine: bool) -> float:
    return 1e-4 if fine else _TOLERANCE_16_BIT


def _is_fine(loaded: LoadedModel) -> bool:
    return loaded.dtype == torch.float32


def _weakness(model: CausalLM) -> str:
    if not model.takes_positions:
        return "it takes no position ids, so no token can be told its depth in the tree"
    if getattr(model.loaded.model.config.get_text_config(), "alibi", False):
        return "its ALiBi biases follow the order in the cache, not the depth in the tree"
    return "its positions, masks or cache cannot follow a tree"


@contextmanager
def _narrow_window(model: CausalLM) -> Iterator[None]:
    """Models and `CausalLM` alike read the window from the config at each forward."""
    window = model.window
    if window is None or window <= _WINDOW:
        yield
        return
    config = model.loaded.model.config.get_text_config()
    config.sliding_window = _WINDOW
    try:
        yield
    finally:
        config.sliding_window = window


def _typical_error(model: CausalLM, linear_run: Callable[[CausalLM, Tensor], Tensor], fine: bool) -> float:
    """The largest error of the tree's nodes and of the steps after it; in 16 bit apart from the worst third of each."""
    context = model.context_length or _PREFIX + _SMALLEST_CONTEXT
    length = min(_PREFIX, 1 + context - _SMALLEST_CONTEXT)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (length + len(_PATHS) + _AFTER,), generator=generator).to(model.device)
    prefix, nodes, after = ids[:length], ids[length:-_AFTER], ids[-_AFTER:]

    cache = model.new_cache()
    model.forward(prefix, cache, last=1)
    tree = model.forward(nodes, cache, _block(length, model.device))
    linear = [linear_run(model, torch.cat([prefix, nodes[list(path)]]))[length:] for path in _LEAVES]
    first = {node: run[depth] for path, run in zip(_LEAVES, linear, strict=True) for depth, node in enumerate(path)}
    in_tree = [_error(tree[node], expected) for node, expected in first.items()]

    path = _LEAVES[1]
    cache.keep(length, [length + node for node in path])
    steps = torch.cat([model.forward(after[:1], cache), model.forward(after[1:], cache)])
    expected_steps = linear_run(model, torch.cat([prefix, nodes[list(path)], after]))[-_AFTER:]
    later = [_error(found, expected) for found, expected in zip(steps, expected_steps, strict=True)]
    if fine:
        return max(in_tree + later)
    # A router's near tie can send a row elsewhere; a wrong mask, position or slot moves more than a third of them.
    return max(sorted(errors)[-1 - len(errors) // 3] for errors in (in_tree, later))


def _block(length: int, device: torch.device) -> Block:
    visible = torch.zeros(len(_PATHS), len(_PATHS), dtype=torch.bool, device=device)
    for path in _PATHS:
        visible[path[-1], list(path)] = True
    depths = torch.tensor([len(path) - 1 for path in _PATHS], device=device)
    return Block(length + depths, visible)


def _linear(model: CausalLM, tokens: Tensor) -> Tensor:
    logits: Tensor = model.loaded.model(input_ids=tokens[None], use_cache=False, return_dict=True).logits[0]
    return logits


def _error(found: Tensor, expected: Tensor) -> float:
    """Root mean square difference in units of the expected logits' spread."""
    found, expected = found.float(), expected.float()
    return float((found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12))
