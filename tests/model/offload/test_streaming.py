"""A streamed model gives what the same model gives resident, bit for bit, and reads each layer once a pass."""

from __future__ import annotations

import gc
import json
import os
import struct
import threading
from collections.abc import Collection
from itertools import product
from pathlib import Path

import pytest
import torch
from streamed import TREE, engine, resident, saved, streamed
from tiny_models import VOCAB, TreeRun, assert_close, ids, tiny, variant
from torch import Tensor
from torch.nn import functional

import sequoia
from sequoia.engine import Engine
from sequoia.errors import FileError, ModelError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import LoadedModel, load_hollow, load_model
from sequoia.model.probe import proved, settled
from sequoia.params import SamplingParams
from sequoia.tree.shape import TreeShape

FAMILIES = [
    "llama",
    "llama, attention bias",
    "mistral",
    "qwen2, mixed layers",
    "qwen3",
    "gemma3",
    "gpt2",
    "gpt2, untied",
]
FOUR = {"llama": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPT = ids(20)

_formats = pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=["fp32", "fp32 as bf16", "bf16", "fp16 as fp32"],
)


def both(model: CausalLM) -> Tensor:
    """Logits of two requests side by side, so that passes start in the middle of what the ring read ahead."""
    return torch.cat([TreeRun(13).logits(model), TreeRun(5).logits(model)])


@_formats
@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits_bit_for_bit(name: str, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(variant(name), tmp_path, stored)
    found, expected = both(streamed(folder, dtype)), both(resident(folder, dtype))
    if stored == dtype and _depends_on_alignment(dtype):  # matrices lie in the ring as they do in the file
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, expected)


def _depends_on_alignment(dtype: torch.dtype) -> bool:
    """Whether products have other last bits here where a matrix does not begin with a cache line: MKL's do on AMD."""
    noise = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in product((1, 5, 13), (16, 32, 64, 96, 128), (16, 32, 64, 96, 128)):
        weight = torch.randn(outputs, inputs, generator=noise).to(dtype)
        taken = torch.randn(rows, inputs, generator=noise).to(dtype)
        moved = torch.empty(weight.numel() + 64, dtype=dtype)
        for start in (2, 4, 8):
            other = moved[start : start + weight.numel()].view_as(weight).copy_(weight)
            if not torch.equal(functional.linear(taken, other), functional.linear(taken, weight)):
                return True
    return False


@pytest.mark.parametrize(
    ("kept", "slots"), [((), 2), ((), 3), ((), 4), ((1,), 2), ((0, 3), 2), ((3,), 3), (range(4), 2)]
)
@pytest.mark.parametrize("family", FOUR)
def test_same_whatever_is_resident(family: str, kept: Collection[int], slots: int, tmp_path: Path) -> None:
    folder = saved(tiny(family, FOUR[family]), tmp_path, torch.bfloat16)
    expected = both(resident(folder, torch.bfloat16))
    assert torch.equal(both(streamed(folder, torch.bfloat16, kept, slots)), expected)


@_formats
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_same_text_with_a_tree(name: str, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(variant(name), tmp_path, stored)
    expected = engine(resident(folder, dtype)).generate(PROMPT, GREEDY)
    plain, in_tree = (
        engine(streamed(folder, dtype), tree).generate(PROMPT, GREEDY) for tree in (TreeShape.root_only(), TREE)
    )
    assert in_tree.token_ids == expected.token_ids
    assert plain.token_ids == engine(resident(folder, dtype), TreeShape.root_only()).generate(PROMPT, GREEDY).token_ids


def test_each_layer_is_read_once_a_pass(tmp_path: Path) -> None:
    folder = saved(tiny("llama", FOUR["llama"]), tmp_path, torch.bfloat16)
    model = streamed(folder, torch.bfloat16, resident=[0], slots=2)
    link, cache = model.link, model.new_cache()
    assert link is not None
    model.forward(torch.tensor(PROMPT), cache)
    first = link.bytes_moved
    model.forward(torch.tensor([3]), cache)
    matrices = [weight for name, weight in tiny("llama", FOUR["llama"]).named_parameters() if "layers.1." in name]
    least = 3 * sum(2 * weight.numel() for weight in matrices if weight.dim() == 2)
    assert least <= link.bytes_moved - first < 1.5 * least + 3 * 8 * 4096  # whole blocks, and little more


def test_a_file_whose_numbers_lie_at_odd_bytes(tmp_path: Path) -> None:
    folder = saved(variant("llama"), tmp_path, torch.bfloat16, "1GB")
    expected = both(resident(folder, torch.bfloat16))
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    assert torch.equal(both(streamed(folder, torch.bfloat16)), expected)


def test_buffered_reads_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(variant("llama"), tmp_path, torch.bfloat16)
    expected = both(resident(folder, torch.bfloat16))
    monkeypatch.setattr("sequoia.model.offload.files._DIRECT", 0)
    assert torch.equal(both(streamed(folder, torch.bfloat16)), expected)


def test_tensors_without_the_prefix_are_found(tmp_path: Path) -> None:
    model = variant("gpt2")
    folder = saved(model, tmp_path / "whole", torch.float32)
    model.transformer.save_pretrained(tmp_path / "bare")
    expected = both(resident(folder, torch.float32))
    assert torch.equal(both(streamed(tmp_path / "bare", torch.float32)), expected)


def test_missing_tensors_are_told(tmp_path: Path) -> None:
    folder = saved(variant("llama"), tmp_path, torch.float32, "1GB")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.1.mlp.no_proj", 1))
    with pytest.raises(FileError, match=r"lack 1 tensors of the model, first 'model.layers.1.mlp.up_proj.weight'"):
        load_hollow(folder, "tiny", torch.float32, torch.device("cpu"))


def test_other_families_are_refused_with_those_that_can(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"neox \(gpt_neox\) cannot be streamed; .*gpt2, llama"):
        load_hollow(tmp_path, "neox", torch.float32, torch.device("cpu"))


def test_a_forgotten_model_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    folder = saved(variant("llama"), tmp_path, torch.bfloat16)
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    made: Engine | None = engine(streamed(folder, torch.bfloat16))
    assert made is not None
    made.generate(PROMPT, GREEDY)
    assert threading.active_count() > before[0]
    del made
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_text_of_the_default_model(dtype: torch.dtype, smollm2: LoadedModel) -> None:
    folder = Path(smollm2.model.config.name_or_path)
    whole = load_model(folder, dtype=dtype, device="cpu")
    here = engine(proved(load_model((whole.model, whole.tokenizer))))
    there = engine(streamed(folder, dtype, resident=range(0, 30, 2), slots=3))
    params = SamplingParams(max_tokens=24, temperature=0.0)
    for prompt in ("Why is the sky blue?", "def add(first, second):", "One, two, three, one, two, three,"):
        assert there.generate(prompt, params).token_ids == here.generate(prompt, params).token_ids


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_its_own_weights_are_rounded_layer_by_layer(family: str, bits: int, tmp_path: Path) -> None:
    """They give what those of the resident model give, and the hollow one is as hollow as before."""
    folder = saved(tiny(family, FOUR.get(family, {})), tmp_path, torch.float32)
    target = CausalLM(load_model(folder, dtype="fp32", device="cpu"))
    expected = target.rounded(bits)
    settled(target)
    hollow = proved(load_hollow(folder, folder.name, torch.float32, torch.device("cpu")))
    assert hollow.loaded.hollow is not None
    names = {name for name, weight in hollow.loaded.hollow.model.named_parameters() if weight.is_meta}
    twin = hollow.rounded(bits)
    assert {name for name, weight in hollow.loaded.hollow.model.named_parameters() if weight.is_meta} == names
    assert names
    assert twin.loaded.hollow is None
    assert_close(both(twin), both(expected))


@pytest.mark.parametrize("draft", ["self:int4", "self:int8"])
def test_its_own_weights_draft_for_it(draft: str, tmp_path: Path) -> None:
    folder = saved(tiny("llama", FOUR["llama"]), tmp_path, torch.float32)
    expected = sequoia.load(folder, draft, "optimal:16x4", dtype="fp32", device="cpu", offload="off")
    found = sequoia.load(folder, draft, "optimal:16x4", dtype="fp32", device="cpu", offload="disk", context=64)
    assert found.memory is not None
    assert found.generate(PROMPT, GREEDY).token_ids == expected.generate(PROMPT, GREEDY).token_ids
    assert found.stats.mean_accepted_length == expected.stats.mean_accepted_length > 1.2
