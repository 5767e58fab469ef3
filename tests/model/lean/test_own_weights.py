"""A target's own weights in integers as its draft: what it computes, what it shares, and that it changes no answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import BASES, TreeRun, assert_close, ids, loaded_here, restored, tiny
from torch import nn
from transformers import PhiConfig, PhiForCausalLM
from transformers.pytorch_utils import Conv1D

import sequoia
from sequoia.draft.model_draft import ModelDraft
from sequoia.errors import ModelError, UsageError
from sequoia.measure.joint_law import LENGTH, PROMPT, VOCAB
from sequoia.measure.reference import Floats, joint_law
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.model.probe import check_settled, settled
from sequoia.params import SamplingParams
from sequoia.planning.pair import pair_of
from sequoia.tree.shape import TreeShape

_GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def _with_rounded_layers(model: Any) -> Any:
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if module is twin.lm_head:
            continue
        if isinstance(module, nn.Linear):
            module.weight.data = restored(module.weight.data)
        elif isinstance(module, Conv1D):
            module.weight.data = restored(module.weight.data.T).T
    return twin


@pytest.mark.parametrize("family", BASES)
def test_in_4_bits_it_computes_what_the_restored_weights_do(family: str) -> None:
    model, run = tiny(family), TreeRun(11)
    expected = run.logits(CausalLM(loaded_here(_with_rounded_layers(model))))
    whole = run.logits(CausalLM(loaded_here(copy.deepcopy(model))))
    target = CausalLM(loaded_here(model))
    twin = target.rounded(4)
    settled(target)
    check_settled(twin)
    assert_close(run.logits(twin), expected)
    assert_close(run.logits(target), whole)
    assert (twin.loaded.name, twin.loaded.weights) == ("self:int4", "int4")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_in_8_bits_it_is_the_quantised_model_but_for_the_head(tied: bool, dtype: str) -> None:
    changes, run = {"tie_word_embeddings": tied}, TreeRun(11)
    target = CausalLM(loaded_here(tiny("llama", changes), dtype))
    whole = run.logits(CausalLM(loaded_here(tiny("llama", changes), dtype))).float()
    twin = target.rounded(8)
    settled(target)
    check_settled(twin)
    error = (run.logits(twin).float() - whole).norm() / whole.norm()
    assert error < 0.05
    assert twin.path == "lean decoder, int8"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_embedding_norms_and_head_are_shared(bits: int, family: str) -> None:
    target = CausalLM(loaded_here(tiny(family)))
    twin = target.rounded(bits)
    assert target._decoder is not None
    assert twin._decoder is not None
    ours, theirs = target._decoder.recipe, twin._decoder.recipe
    assert (theirs.embed, theirs.norm, theirs.head) == (ours.embed, ours.norm, ours.head)
    for mine, own in zip(ours.layers, theirs.layers, strict=True):
        assert mine.before_mlp is own.before_mlp
        assert mine.qkv is not own.qkv


def test_passes_and_compiling_are_its_own() -> None:
    target = CausalLM(loaded_here(tiny("llama")))
    twin, seen = target.rounded(4), []
    settled(target)
    target.on_pass.append(seen.append)
    twin.forward(torch.tensor(ids(5)), twin.new_cache())
    assert seen == []
    assert not twin.is_compiled


def _saved(folder: Path, family: str = "llama") -> str:
    tiny(family).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("draft", ["self:int4", "self:int8"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "fp32"), ("llama", "int4"), ("llama", "int8"), ("gemma3_text", "fp32"), ("gpt2", "fp32")],
)
def test_answers_are_plain_decodings(
    tmp_path: Path, family: str, draft: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sequoia.model.placement.cpu_has_bf16", lambda: False)  # 16 bit would leave ties
    engine = sequoia.load(_saved(tmp_path, family), draft, "off", dtype=dtype, device="cpu")
    expected = engine.generate(ids(12), _GREEDY).token_ids
    for tree in ("optimal:16x4", "dynamic:16x4"):
        found = engine.with_tree(tree)
        assert found.generate(ids(12), _GREEDY).token_ids == expected
        assert found.stats.mean_accepted_length > 1.5


def test_a_targets_own_weights_are_a_good_draft(tmp_path: Path) -> None:
    """The same integers on both sides agree always, and rounding in 8 bits leaves next to nothing to disagree on."""
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    for draft, dtype, least in (("self:int4", "int4", 4.99), ("self:int8", "fp32", 4.0), ("self:int4", "fp32", 2.0)):
        engine = sequoia.load(_saved(tmp_path), draft, "chain:4", dtype=dtype, device="cpu")
        engine.generate(ids(12), params)
        assert engine.stats.emitted_tokens == 80
        assert engine.stats.mean_accepted_length >= least, (draft, dtype)


@pytest.mark.parametrize("draft", ["self:int4", "self:int8"])
def test_the_joint_law_of_several_tokens_is_the_targets(draft: str) -> None:
    target, count = tiny_llama(VOCAB, seed=3, device="cpu").model, 700
    engine = sequoia.load(target, draft, TreeShape((-1, 0, 0, 1, 1, 2)), "sequoia", device="cpu")
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=0, ignore_eos=True)

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Floats:
        found: Floats = target(torch.tensor([list(tokens)])).logits[0, -1].double().numpy()
        return found

    law = joint_law(logits, params, PROMPT, LENGTH)
    counts = np.zeros(law.shape)
    for request in range(count):
        counts[engine.generate(PROMPT, params, request=request).token_ids] += 1
    chi_square = ((counts - count * law) ** 2 / (count * law)).sum()
    assert chi_square < law.size + 4 * (2 * law.size) ** 0.5


def test_a_target_given_as_an_object_is_left_whole() -> None:
    model = tiny("llama")
    engine = sequoia.load(model, "self:int4", device="cpu")
    assert engine.target_model is model
    assert engine.generate(ids(8), _GREEDY).token_ids
    assert torch.isfinite(model(torch.tensor([ids(4)])).logits).all()


def test_the_pair_is_named_by_the_targets_own_weights(tmp_path: Path) -> None:
    engine = sequoia.load(_saved(tmp_path), "self:int4", dtype="fp32", device="cpu")
    assert isinstance(engine.draft, ModelDraft)
    pair = pair_of(engine.target, engine.draft)
    assert (pair["draft"], pair["draft_dtype"], pair["target_dtype"]) == ("self:int4", "int4", "fp32")


def test_a_target_without_a_lean_decoder_is_refused() -> None:
    config = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = PhiForCausalLM(PhiConfig(**config, num_attention_heads=4, max_position_embeddings=64))
    with pytest.raises(
        ModelError, match=r"\(phi\) has no lean decoder, which a draft of its own rounded weights needs"
    ):
        sequoia.load(model, "self:int4", device="cpu")


def test_what_there_is_not_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match="is self:int4 or self:int8, not 'self:int2'"):
        sequoia.load("/no/such/model", "self:int2")
    with pytest.raises(
        UsageError, match=r'names its own number format, and draft_dtype is int8\. Leave draft_dtype "auto"'
    ):
        sequoia.load("/no/such/model", "self:int4", draft_dtype="int8")


@pytest.mark.slow
def test_smollm2_drafts_for_itself(smollm2: object) -> None:
    engine = sequoia.load(draft="self:int4", tree="off", dtype="fp32", device="cpu")
    prompt = engine.tokenizer.encode("The capital of France is")
    params = SamplingParams(max_tokens=24, temperature=0)
    expected = engine.generate(prompt, params).token_ids
    found = engine.with_tree("optimal:16x6")
    assert found.generate(prompt, params).token_ids == expected
    assert found.stats.mean_accepted_length > 2
