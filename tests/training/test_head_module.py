"""The head as it is trained against the head as it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_training import VOCAB, tiny_target

from sequoia.draft.heads import load_head
from sequoia.model.language_model import Block
from sequoia.model.placement import Numbers
from sequoia.training.beginning import as_record, head_config, last_layer
from sequoia.training.head_module import HeadModule, Seen
from sequoia.tree.records import save_record

_TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
_IDS = torch.arange(4, 44)


def _module(seed: int = 0) -> HeadModule:
    target = tiny_target()
    head = HeadModule(replace(head_config(target, (1, 2, 3), len(_IDS)), eps=1e-5))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in head.parameters():
            value.normal_(0 if value.dim() == 2 else 1, 0.3, generator=generator)
    return head


def test_a_saved_head_computes_what_it_was_trained_to(tmp_path: Path) -> None:
    """Along a text, and then two steps on its own outputs."""
    target, head = tiny_target(), _module()
    save_file(head.tensors() | {"d2t": _IDS - torch.arange(len(_IDS))}, tmp_path / "model.safetensors")
    save_record(tmp_path / "config.json", as_record(head.config))
    model = load_head(tmp_path, target, Numbers(torch.float32)).model

    tokens, later = torch.tensor(_TEXT), torch.tensor([8, 9])
    cache, own = target.new_cache(model.taps), model.new_cache()
    target.forward(tokens, cache)
    features = cache.features.read(0, len(tokens))  # type: ignore[union-attr]
    outputs = model.forward(model.fused(features[:-1]), tokens[1:], own)
    first = model.forward(outputs[-1:], later[:1], own, Block.linear(own.length, 1, target.device))
    second = model.forward(first, later[1:], own, Block.linear(own.length, 1, target.device))
    running = torch.cat([model.logits(rows) for rows in (outputs, first, second)])

    count = len(_TEXT) - 1
    visible = torch.ones(1, count, count, dtype=torch.bool).tril()
    seen, feature, positions = Seen(visible), head.fused(features[None, :-1]), torch.arange(count)[None]
    weight, steps = target.ends.head_weight()[_IDS], []
    followed = torch.cat([tokens, later])
    with torch.no_grad():
        for step in range(1, 4):
            feature = head.step(
                feature, target.ends.embed(followed[step : step + count])[None], positions + step - 1, seen
            )
            steps.append(head.outputs(feature)[0] @ weight.T)
    trained = torch.cat([steps[0], steps[1][-1:], steps[2][-1:]])
    torch.testing.assert_close(running, trained, rtol=1e-4, atol=1e-4)


def test_it_begins_as_the_targets_last_layer() -> None:
    target = tiny_target()
    head = HeadModule(head_config(target, (1, 3), VOCAB))
    head.begin(last_layer(target), seed=0)
    layer = target.loaded.model.model.layers[-1]
    size = target.hidden_size
    assert torch.equal(head.k_proj.weight[:, size:], layer.self_attn.k_proj.weight)
    assert torch.equal(head.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(head.fc.weight[:, size:], torch.eye(size))
    assert not head.fc.weight[:, :size].any()
    again = HeadModule(head.config)
    again.begin(last_layer(target), seed=1)
    assert not torch.equal(head.k_proj.weight[:, :size], again.k_proj.weight[:, :size])
