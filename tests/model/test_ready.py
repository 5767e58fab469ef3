"""Models on record: what a later start reads is what an earlier one proved, and only in the same situation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_loading import tiny_model, tiny_tokenizer
from torch import Tensor

import sequoia
from sequoia.errors import FileError
from sequoia.model import kept, ready, situation
from sequoia.model.causal_lm import CausalLM
from sequoia.model.kept import Page
from sequoia.model.lean.linear import can_pack
from sequoia.model.ready import ready_model
from sequoia.params import SamplingParams


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sequoia" / "proved"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "tiny-llama"
    tiny_model(initializer_range=0.3).save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return where


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each model that is loaded in transformers' modules."""
    seen: list[Any] = []
    load = ready._load

    def counted(source: Any, *arguments: Any) -> Any:
        seen.append(source)
        return load(source, *arguments)

    monkeypatch.setattr(ready, "_load", counted)
    return seen


def logits(model: CausalLM) -> Tensor:
    return model.forward(torch.arange(3, 19), model.new_cache())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_the_second_start_loads_and_proves_nothing(folder: Path, loads: list[Any], dtype: str) -> None:
    first, second = ready_model(folder, dtype=dtype, device="cpu"), ready_model(folder, dtype=dtype, device="cpu")
    assert loads == [folder]
    assert torch.equal(logits(first), logits(second))
    for model in (first, second):
        loaded = model.loaded
        assert (loaded.name, loaded.weights, loaded.eos_ids, loaded.token_count) == ("tiny-llama", dtype, {2}, 20)
        assert (model.vocab_size, model.context_length, model.device.type) == (24, 64, "cpu")
    assert first.path == second.path
    assert second.loaded.tokenizer("w3 w7")["input_ids"] == first.loaded.tokenizer("w3 w7")["input_ids"]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_tied_head_is_packed_beside_an_embedding_that_stays_pages_of_a_file(
    tmp_path: Path, stored: torch.dtype
) -> None:
    """In the first start and in a later one, whatever the format of the file."""
    model = tiny_model(initializer_range=0.3, tie_word_embeddings=True).to(stored)
    model.save_pretrained(tmp_path / "tied")
    for _ in range(2):
        ready = ready_model(tmp_path / "tied", dtype="bf16", device="cpu")
        assert ready.recipe is not None
        assert ready.recipe.shares_head
        assert ready.recipe.packs_head
        assert (ready.recipe.head._packed is not None) == can_pack(torch.bfloat16, ready.device)
        assert torch.equal(ready.ends.head_weight(), model.lm_head.weight.bfloat16())
        assert torch.equal(ready.ends.embed(torch.arange(24)), ready.ends.head_weight())


def test_formats_are_proved_one_by_one(folder: Path, loads: list[Any], own_cache: Path) -> None:
    for dtype in ("fp32", "bf16", "fp32", "bf16"):
        ready_model(folder, dtype=dtype, device="cpu")
    assert len(loads) == len(list(own_cache.iterdir())) == 2


def test_the_whole_model_is_loaded_when_it_is_asked_for(folder: Path, loads: list[Any]) -> None:
    ready_model(folder, dtype="fp32", device="cpu")
    engine = sequoia.load(folder, dtype="fp32", device="cpu", tree="chain:2")
    assert loads == [folder]
    whole = engine.target_model
    assert loads == [folder] * 2
    assert engine.target_model is whole
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    output = whole.generate(torch.arange(3, 9)[None], max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert engine.generate(list(range(3, 9)), params).token_ids == tuple(output[0, 6:].tolist())


def test_a_draft_is_on_record_too(folder: Path, loads: list[Any]) -> None:
    for _ in range(2):
        engine = sequoia.load(folder, folder, "chain:2", dtype="fp32", device="cpu", draft_dtype="fp32")
    assert loads == [folder]
    assert len(engine.generate("w3 w7", SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


def change_weights(folder: Path, patch: pytest.MonkeyPatch) -> None:
    file = folder / "model.safetensors"
    save_file({name: 0.5 * tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def change_config(folder: Path, patch: pytest.MonkeyPatch) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))


def change_tokenizer(folder: Path, patch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer(18).save_pretrained(folder)


def change_threads(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 77)


def change_kernels(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


def change_torch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "git_version", "another")


def change_transformers(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(situation, "version", lambda name: "99.0")


def change_processor(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(situation, "cpu_name", lambda: "another")


def change_code(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(situation, "_code", lambda folder: "another")


@pytest.mark.parametrize(
    "change",
    [
        change_weights,
        change_config,
        change_tokenizer,
        change_threads,
        change_kernels,
        change_torch,
        change_transformers,
        change_processor,
        change_code,
    ],
)
def test_another_situation_is_proved_anew(
    folder: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    before = ready_model(folder, dtype="fp32", device="cpu")
    change(folder, monkeypatch)
    after = ready_model(folder, dtype="fp32", device="cpu")
    assert loads == [folder] * 2
    assert torch.equal(logits(before), logits(after)) == (change not in (change_weights, change_config))
    ready_model(folder, dtype="fp32", device="cpu")
    assert loads == [folder] * 2


def test_weights_that_are_damaged_later_are_refused_as_ever(folder: Path) -> None:
    ready_model(folder, dtype="fp32", device="cpu")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(FileError, match="cannot load the weights"):
        ready_model(folder, dtype="fp32", device="cpu")


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, None])
def test_a_damaged_record_is_no_record(folder: Path, loads: list[Any], own_cache: Path, damage: bytes | None) -> None:
    ready_model(folder, dtype="fp32", device="cpu")
    (page,) = own_cache.iterdir()
    page.write_bytes(page.read_bytes()[:-8] if damage is None else damage)
    ready_model(folder, dtype="fp32", device="cpu")
    ready_model(folder, dtype="fp32", device="cpu")
    assert loads == [folder] * 2


def test_a_record_of_something_else_is_no_record(
    folder: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready_model(folder, dtype="fp32", device="cpu")
    find = Page.find

    def changed(page: Page) -> Any:
        entry = find(page)
        if entry is not None:
            entry.content["recipe"] = {"Recipe": {}}
        monkeypatch.setattr(Page, "find", find)
        return entry

    monkeypatch.setattr(Page, "find", changed)
    ready_model(folder, dtype="fp32", device="cpu")
    assert loads == [folder] * 2


def test_a_model_whose_files_hold_other_numbers_is_not_kept(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = kept._reader
    monkeypatch.setattr(kept, "_reader", lambda *place: lambda name: reader(*place)(name) + 1)
    ready_model(folder, dtype="fp32", device="cpu")
    assert not own_cache.exists()


def test_a_cache_that_cannot_be_written_is_told_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    assert ready_model(folder, dtype="fp32", device="cpu", notice=told.append).is_lean
    assert len(told) == 1
    assert told[0].startswith("the next start will not be faster: cannot write ")


def test_nothing_is_left_of_a_record_that_could_not_be_finished(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "replace", full)
    ready_model(folder, dtype="fp32", device="cpu")
    assert list(own_cache.iterdir()) == []


def test_objects_are_never_on_record(own_cache: Path) -> None:
    ready_model(tiny_model(), device="cpu")
    ready_model((tiny_model(), tiny_tokenizer()), device="cpu")
    assert not own_cache.exists()


def test_what_is_no_model_is_refused_as_ever() -> None:
    for source, words in ((3, "a model is a path"), ("", "a model is a path"), ("./nowhere", "no file or folder")):
        with pytest.raises(sequoia.SequoiaError, match=words):
            ready_model(source, device="cpu")


_LATER = """
import sys, torch
torch.set_num_threads(1)
import sequoia
engine = sequoia.load(sys.argv[1], dtype="fp32", device="cpu", tree="chain:2")
first = engine.generate("w3 w7", sequoia.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)).token_ids
heavy = ["transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "scipy", "accelerate"]
print([name for name in heavy if name in sys.modules])
import torch._dynamo, torch.distributed.tensor, transformers.modeling_utils
engine.target_model(input_ids=torch.tensor([[3, 7]]))
print(engine.generate("w3 w7", sequoia.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)).token_ids == first)
"""


def test_a_start_on_record_imports_none_of_transformers_models_and_bars_none(folder: Path) -> None:
    ready_model(folder, dtype="fp32", device="cpu")
    later = subprocess.run([sys.executable, "-c", _LATER, folder], capture_output=True, text=True, timeout=300)
    assert (later.stdout.splitlines(), later.returncode) == (["[]", "True"], 0), later.stderr
