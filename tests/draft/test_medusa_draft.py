"""Medusa heads as draft: what they say at each depth, which files are read, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_heads import VOCAB, tiny_target, true_features
from torch import Tensor

import sequoia
from sequoia.draft.heads import load_any_head
from sequoia.draft.medusa_draft import MedusaDraft
from sequoia.errors import FileError, ModelError, SequoiaError
from sequoia.measure.rolling import Reach, draft_nodes
from sequoia.measure.texts import Ask, Text
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.placement import resident_bytes
from sequoia.params import SamplingParams
from sequoia.planning.pair import pair_of
from sequoia.speculate.growth import Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.sampling import Draws
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.shape import TreeShape

SIZE, HEADS = 16, 3
TEXT = [3, 1, 4, 1, 5, 9]


def _tensors(outputs: bool, blocks: int = 1, start: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for head in range(HEADS):
        for block in range(blocks):
            found[f"{start}{head}.{block}.linear.weight"] = torch.randn(SIZE, SIZE, generator=generator) / 4
            found[f"{start}{head}.{block}.linear.bias"] = torch.randn(SIZE, generator=generator)
        if outputs:
            found[f"{start}{head}.{blocks}.weight"] = torch.randn(VOCAB, SIZE, generator=generator)
    return found


def _save(folder: Path, tensors: dict[str, Any], file: str = "medusa_lm_head.pt", heads: Any = HEADS) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": "somewhere/else"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


@pytest.mark.parametrize("tree", [TreeShape.kary(3, 3), TreeShape.chain(5), DynamicTree(20, 4)])
@pytest.mark.parametrize(
    ("outputs", "file", "start"),
    [
        (True, "medusa_lm_head.pt", ""),
        (False, "medusa_lm_head.safetensors", ""),
        (True, "medusa_lm_head.safetensors", "medusa_head."),
    ],
)
def test_each_depth_has_its_heads_distribution_whatever_the_path(
    tmp_path: Path, outputs: bool, file: str, start: str, tree: Tree
) -> None:
    target, tensors = tiny_target(), _tensors(outputs, start=start)
    draft = load_any_head(_save(tmp_path, tensors, file), target, "fp32")
    assert isinstance(draft, MedusaDraft)
    proposer = draft.start()
    cache = target.new_cache(proposer.taps)
    target.forward(torch.tensor(TEXT[:-1]), cache)
    proposer.follow(cache)  # type: ignore[arg-type]
    draws = Draws.TOP_K if isinstance(tree, DynamicTree) else Draws.WITHOUT_REPLACEMENT
    processors = Processors(SamplingParams(temperature=1.0), TEXT, VOCAB)
    growth = Growth(tree, processors, draws, VOCAB, torch.Generator().manual_seed(0), torch.device("cpu"))
    grown = proposer.propose(TEXT, growth)
    feature = true_features(target, TEXT[:-1], (3,))[-1, 0]
    inner = [node for node in range(grown.shape.size) if grown.shape.children(node)]
    for node, probs in zip(inner, grown.draft_probs(inner, VOCAB), strict=True):
        head = min(grown.shape.depths[node], HEADS - 1)
        weight, bias = tensors[f"{start}{head}.0.linear.weight"], tensors[f"{start}{head}.0.linear.bias"]
        row = feature.double() + torch.nn.functional.silu(weight.double() @ feature.double() + bias.double())
        output = tensors[f"{start}{head}.1.weight"] if outputs else target.loaded.model.lm_head.weight
        torch.testing.assert_close(probs, (output.double() @ row).softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("outputs", [True, False])
def test_a_folder_of_heads_drafts_and_the_text_is_the_targets(tmp_path: Path, outputs: bool, dtype: str) -> None:
    folder = _save(tmp_path / "snakes", _tensors(outputs, blocks=2))
    engine = sequoia.load(tiny_llama(VOCAB, 3, device="cpu").model, folder, "kary:2x3", draft_dtype=dtype)
    assert isinstance(engine.draft, MedusaDraft)
    pair = pair_of(engine.target, engine.draft)
    assert (pair["draft"], pair["draft_dtype"]) == ("snakes", dtype)
    assert "3 heads" in engine.draft.model.path
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    found = engine.generate(TEXT, params)
    assert found.token_ids == engine.with_tree("off").generate(TEXT, params).token_ids
    assert found.stats.drafted_tokens > 0


def test_acceptance_is_measured_along_texts(tmp_path: Path) -> None:
    """By their own proposer, from the second round on."""
    target = tiny_target()
    draft = load_any_head(_save(tmp_path, _tensors(True)), target, "fp32")
    text = Text(Ask((3, 1, 4)), (2, 6, 5, 3, 5, 8))
    nodes = draft_nodes(target, draft, SamplingParams(), text, Draws.WITHOUT_REPLACEMENT, Reach(3, 2))
    assert set(nodes.starts.tolist()) == {1, 2, 3, 4, 5}
    features = true_features(target, [3, 1, 4, *text.tokens], draft.model.taps)
    for start, depth, scores in zip(nodes.starts.tolist(), nodes.depths.tolist(), nodes.candidates.scores, strict=True):
        expected = draft.model.logits(features[3 + start - 2], depth)[0]  # type: ignore[arg-type]
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


FAULTS: dict[str, tuple[dict[str, Any], Any, type[SequoiaError], str]] = {
    "fewer heads than the config says": (_tensors(True), 4, FileError, "needs 4 heads by its config, and holds 3"),
    "a strange number of heads": (_tensors(True), "many", FileError, "needs 'many' heads"),
    "a strange tensor": ({**_tensors(True), "other": torch.ones(1)}, 3, FileError, "holds 'other', which is no part"),
    "another target's size": (
        {"0.0.linear.weight": torch.ones(8, 8)},
        1,
        ModelError,
        r"0\.0\.linear\.weight as \[8, 8\], and .* needs \[16, 16\]",
    ),
    "another target's vocabulary": (
        {"0.0.linear.weight": torch.ones(16, 16), "0.1.weight": torch.ones(50, 16)},
        1,
        ModelError,
        r"0\.1\.weight as \[50, 16\], and .* needs \[48, 16\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_on_one_line(tmp_path: Path, fault: str) -> None:
    tensors, heads, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message) as caught:
        load_any_head(_save(tmp_path, tensors, heads=heads), tiny_target(), "fp32")
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path, _tensors(True), "other.pt")
    with pytest.raises(FileError, match=r"holds no medusa_lm_head\.safetensors or medusa_lm_head\.pt"):
        load_any_head(folder, tiny_target(), "fp32")


def test_nothing_is_proposed_before_the_target_has_read(tmp_path: Path) -> None:
    proposer = load_any_head(_save(tmp_path, _tensors(True)), tiny_target(), "fp32").start()
    processors = Processors(SamplingParams(), TEXT, VOCAB)
    generator = torch.Generator().manual_seed(0)
    growth = Growth(TreeShape.chain(2), processors, Draws.TOP_K, VOCAB, generator, torch.device("cpu"))
    assert proposer.propose(TEXT, growth).shape.size == 1


def test_a_streamed_targets_memory_counts_their_features(tmp_path: Path) -> None:
    target = tmp_path / "target"
    tiny_llama(VOCAB, 3, device="cpu").model.to(torch.bfloat16).save_pretrained(target)
    heads = _save(tmp_path / "heads", _tensors(outputs=True))
    budget = resident_bytes() + (300 << 20)
    caches = []
    for draft in ("ngram", heads):
        memory = sequoia.load(target, draft, offload="disk", memory_budget=budget, context=64, dtype="bf16").memory
        assert memory is not None
        caches.append(memory.caches)
    assert caches[1] - caches[0] == 64 * SIZE * 2
