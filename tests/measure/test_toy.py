"""The toy model sees a tree as attention would."""

from __future__ import annotations

import torch

from sequoia.measure.toy import ToyModel
from sequoia.speculate.token_tree import layout_of
from sequoia.tree.shape import TreeShape

SHAPE = TreeShape((-1, 0, 0, 1, 1, 2, 4))


def test_logits_at_a_node_are_those_after_its_path() -> None:
    model, prompt, tokens = ToyModel.random(5, seed=0), [1, 4, 2], [3, 0, 2, 1, 4, 0, 2]
    cache = model.new_cache()
    model.forward(torch.tensor(prompt), cache)
    block = layout_of(SHAPE, torch.device("cpu")).block(len(prompt))
    logits = model.forward(torch.tensor(tokens), cache, block)
    for node, path in enumerate(SHAPE.paths):
        expected = model.logits_after([*prompt, *(tokens[step] for step in (0, *path))])
        assert torch.equal(logits[node], expected)


def test_keeping_a_path_goes_on_from_its_end() -> None:
    model, prompt, tokens = ToyModel.random(5, seed=0), [1, 4, 2], [3, 0, 2, 1, 4, 0, 2]
    cache = model.new_cache()
    model.forward(torch.tensor(prompt), cache)
    model.forward(torch.tensor(tokens), cache, layout_of(SHAPE, torch.device("cpu")).block(len(prompt)))
    cache.keep(len(prompt), [len(prompt) + node for node in (0, 1, 4)])
    assert cache.length == len(prompt) + 3
    logits = model.forward(torch.tensor([1]), cache)[-1]
    assert torch.equal(logits, model.logits_after([*prompt, 3, 0, 4, 1]))
