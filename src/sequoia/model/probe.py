"""Proof by trial that a model can verify trees: node logits must equal those of a linear run over the path."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia.errors import ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block

# A root with two children; the first has two, of which the second goes on. Stored out of level order on purpose.
_PATHS = ((0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 3, 4), (0, 5), (0, 5, 6))  # of node i, itself included
_LEAVES = (_PATHS[2], _PATHS[4], _PATHS[6])
_LONGEST_WINDOW = 128  # a window up to this width is crossed by the probe's prefix


@torch.inference_mode()
def probe(model: CausalLM) -> None:
    """Check one small tree, then one step after keeping a path, against the model's own run without a cache.

    Raises:
        ModelError: the logits differ by more than rounding, or the model's forward fails.
    """
    try:
        error = _largest_error(model)
    except ModelError:
        raise
    except Exception as failure:
        raise ModelError(f"{model.loaded.name} cannot run with a tree mask and our cache: {failure}") from failure
    tolerance = 1e-4 if model.loaded.dtype == torch.float32 else 0.1
    if not error <= tolerance:
        raise ModelError(
            f"{model.loaded.name} gives other logits in a token tree than in a linear run (relative error {error:.2g}, "
            f"rounding explains {tolerance:g}): its positions or its cache cannot follow a tree. Choose another model."
        )


def _largest_error(model: CausalLM) -> float:
    window = model.window or 0
    length = 5 + (window if window <= _LONGEST_WINDOW else 0)
    length = min(length, (model.context_length or length + 8) - 8)
    ids = torch.randint(0, model.vocab_size, (length + len(_PATHS) + 1,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    prefix, nodes, after = ids[:length], ids[length:-1], ids[-1:]

    cache = model.new_cache()
    model.forward(prefix, cache, last_only=True)
    tree = model.forward(nodes, cache, _block(length, model.device))
    errors = []
    for path in _LEAVES:
        linear = _linear(model, torch.cat([prefix, nodes[list(path)]]))
        errors += [_error(tree[node], linear[length + depth]) for depth, node in enumerate(path)]

    path = _LEAVES[1]
    cache.keep(length, [length + node for node in path])
    step = model.forward(after, cache)[-1]
    errors.append(_error(step, _linear(model, torch.cat([prefix, nodes[list(path)], after]))[-1]))
    # In 16 bit a router's near tie can send one row elsewhere; a wrong mask or position moves most of them.
    return max(errors) if model.loaded.dtype == torch.float32 else sorted(errors)[len(errors) // 2]


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
