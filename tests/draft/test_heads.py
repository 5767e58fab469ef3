"""Heads in folders: what loads as one, and what does not fit its target or its own config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import DRAFT_VOCAB, VOCAB, tiny_target
from torch import Tensor

import sequoia
from sequoia.draft.head_draft import HeadDraft
from sequoia.draft.head_files import head_folder
from sequoia.draft.heads import load_head
from sequoia.engine import Engine
from sequoia.errors import FileError, ModelError, SequoiaError, UsageError
from sequoia.measure.random_head import save_random_head
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.model.lean.int8 import has_kernels
from sequoia.params import SamplingParams
from sequoia.planning.pair import draft_name, loaded_by_name, models_of, pair_of


@pytest.fixture
def target() -> CausalLM:
    return tiny_target()


@pytest.fixture
def folder(tmp_path: Path, target: CausalLM) -> Path:
    return save_random_head(tmp_path / "clever", target, draft_vocab_size=DRAFT_VOCAB)


def _edit(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> None:
    """Change a head; None leaves out."""
    for name, changes in (("config.json", config or {}),):
        merged = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    if tensors:
        both = load_file(folder / "model.safetensors") | tensors
        save_file({key: value for key, value in both.items() if value is not None}, folder / "model.safetensors")


def _engine(draft: Any, **options: Any) -> Engine:
    return sequoia.load(tiny_llama(VOCAB, 3, device="cpu").model, draft, "chain:3", **options)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_folder_whose_config_says_so_is_loaded_as_a_head(folder: Path, kind: Callable[[Path], Any]) -> None:
    engine = _engine(kind(folder))
    assert isinstance(engine.draft, HeadDraft)
    numbers = "int8" if has_kernels() else "fp32"
    assert (engine.pair["draft"], engine.pair["draft_dtype"]) == ("clever", numbers)
    assert engine.pair == pair_of(engine.target, engine.draft)
    assert draft_name(engine.draft) == "clever"
    assert models_of(engine.target, engine.draft) == [engine.target, engine.draft.model]
    assert not loaded_by_name(engine.target, engine.draft)  # the target is an object
    assert "draft=clever" in repr(engine)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    plain = engine.with_tree("off").generate([3, 1, 4], params)
    assert engine.generate([3, 1, 4], params).token_ids == plain.token_ids


def test_asked_for_numbers_are_used(folder: Path) -> None:
    for asked, name in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8")):
        assert _engine(folder, draft_dtype=asked).pair["draft_dtype"] == name
    with pytest.raises(UsageError, match="dtype"):
        _engine(folder, draft_dtype="fp64")


def test_a_models_folder_is_no_head(tmp_path: Path) -> None:
    tiny_llama(VOCAB, 1, device="cpu").model.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "absent", "ngram", None, 3, ""):
        assert head_folder(source) is None


@pytest.mark.parametrize("tied", [True, False])
def test_tied_output_rows_are_the_targets_own(folder: Path, target: CausalLM, tied: bool) -> None:
    ids = torch.arange(DRAFT_VOCAB) + load_file(folder / "model.safetensors")["d2t"]
    rows = target.loaded.model.lm_head.weight[ids].clone().contiguous()
    if tied:
        _edit(folder, {"tie_head": True}, {"lm_head.weight": None})
    else:
        _edit(folder, tensors={"lm_head.weight": rows})
    model = load_head(folder, target, "fp32").model
    outputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    norm = load_file(folder / "model.safetensors")["norm.weight"]
    normed = outputs / (outputs.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    torch.testing.assert_close(model.logits(outputs), normed @ rows.T, rtol=1e-4, atol=1e-5)


def test_ids_in_any_order_stand_for_what_they_name(folder: Path, target: CausalLM) -> None:
    model = load_head(folder, target, "fp32").model
    outputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    expected = model.logits(outputs)
    stored = load_file(folder / "model.safetensors")
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(DRAFT_VOCAB) + stored["d2t"])[order]
    changed = {"d2t": ids - torch.arange(DRAFT_VOCAB), "lm_head.weight": stored["lm_head.weight"][order].contiguous()}
    _edit(folder, tensors=changed)
    again = load_head(folder, target, "fp32").model
    assert again.support.tolist() == model.support.tolist() == sorted(ids.tolist())
    torch.testing.assert_close(again.logits(outputs), expected)


def test_padding_is_never_proposed(folder: Path, target: CausalLM) -> None:
    object.__setattr__(target.loaded, "token_count", 30)
    draft = load_head(folder, target, "fp32")
    assert draft.proposable == 30
    assert 0 < len(draft.model.support) < DRAFT_VOCAB
    assert int(draft.model.support.max()) < 30


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path, target: CausalLM) -> None:
    folder = save_random_head(tmp_path, target, draft_vocab_size=VOCAB)
    _edit(folder, {"draft_vocab_size": None}, {"d2t": None})
    assert load_head(folder, target, "fp32").model.support.tolist() == list(range(VOCAB))


def test_features_that_the_config_does_not_name_are_eagle_3s(folder: Path) -> None:
    target = tiny_target()
    _edit(folder, {"feature_layers": None})
    with pytest.raises(ModelError, match="reads features 2, 1, -1"):
        load_head(folder, target, "fp32")


ODD = torch.zeros(3)
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], type[SequoiaError], str]] = {
    "another target's size": ({"hidden_size": 8, "head_dim": 8}, {}, FileError, r"to be \[.*\] by its config"),
    "another target's vocabulary": ({"vocab_size": 50}, {}, ModelError, "50 token ids, and .* has 48"),
    "features past the last layer": ({"feature_layers": [1, 2, 4]}, {}, ModelError, "1, 2, 4, and .* has 2 layers"),
    "no size": ({"hidden_size": None}, {}, FileError, "needs hidden_size to be an integer of at least 1"),
    "a strange size": ({"intermediate_size": "large"}, {}, FileError, "needs intermediate_size"),
    "strange layers": ({"feature_layers": "all"}, {}, FileError, "needs feature_layers to be a list of layers"),
    "a strange flag": ({"tie_head": 1}, {}, FileError, "needs tie_head to be true or false"),
    "an unknown activation": ({"hidden_act": "swoosh"}, {}, FileError, "activation 'swoosh'"),
    "a tensor missing": ({}, {"norm.weight": None}, FileError, "lacks 1 tensors of a head, first 'norm.weight'"),
    "a tensor too many": ({}, {"midlayer.more": ODD}, FileError, "first 'midlayer.more'"),
    "a wrong shape": ({}, {"norm.weight": ODD}, FileError, r"norm.weight to be \[16\] by its config, and it is \[3\]"),
    "no map": ({}, {"d2t": None}, FileError, "first 'd2t'"),
    "a map out of the vocabulary": (
        {},
        {"d2t": torch.full((DRAFT_VOCAB,), VOCAB)},
        ModelError,
        "d2t of clever names no 20 different",
    ),
    "rotary positions unknown": ({"rope_scaling": {"rope_type": "odd"}}, {}, ModelError, "rotary positions"),
    "rotary positions that move": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {},
        ModelError,
        "dynamic rotary positions",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(folder: Path, target: CausalLM, fault: str) -> None:
    config, tensors, kind, message = FAULTS[fault]
    _edit(folder, config, tensors)
    with pytest.raises(kind, match=message) as caught:
        load_head(folder, target, "fp32")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_head_for_a_larger_target_is_refused(folder: Path) -> None:
    wide = tiny_llama(VOCAB, 3, device="cpu").model
    wide.config.hidden_size = 24
    target = CausalLM(sequoia.model.loading.load_model(wide))
    with pytest.raises(ModelError, match=r"targets of size 16, and .* has 24"):
        load_head(folder, target, "fp32")


def test_weights_that_are_missing_or_damaged_are_named(folder: Path, target: CausalLM) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FileError, match="damaged"):
        load_head(folder, target, "fp32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileError, match=r"holds no model\.safetensors"):
        load_head(folder, target, "fp32")
