"""A widened model is an ordinary folder, as large as asked for, and says what the original says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_engine import VOCAB, tokenizer
from widen import Source, Widening, bytes_of, source_of, widening

import sequoia
from sequoia.errors import FileError, ModelError, UsageError
from sequoia.model.loading import LoadedModel

HIDDEN, INNER, LAYERS = 32, 48, 3
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": ("LlamaConfig", {"mlp_bias": True, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"tie_word_embeddings": True, "sliding_window": 8}),
}
EXTRA = 128


def saved(folder: Path, family: str = "llama") -> Source:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SETTINGS | settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / family)
    tokenizer().save_pretrained(folder / family)
    return Source(folder / family)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return saved(tmp_path)


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_and_computes_the_same_logits(tmp_path: Path, family: str) -> None:
    source, out = saved(tmp_path, family), tmp_path / "wide"
    Widening(source, EXTRA, torch.float32, shard_bytes=20_000).save(out)
    expected = logits(source.folder, torch.float64)
    torch.testing.assert_close(logits(out, torch.float64), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits(out), logits(source.folder), rtol=1e-5, atol=1e-5)


def test_the_original_is_in_it_bit_by_bit_and_nothing_leads_out_of_the_rest(source: Source, tmp_path: Path) -> None:
    Widening(source, EXTRA, torch.float32, shard_bytes=20_000).save(tmp_path / "wide")
    wide = Source(tmp_path / "wide")
    for name in source.files:
        original, found = source.read(name), wide.read(name)
        assert torch.equal(found[tuple(map(slice, original.shape))], original)
        if "down_proj.weight" in name:
            assert found.shape == (HIDDEN, INNER + EXTRA)
            assert not found[:, INNER:].any()
        elif "gate_proj.weight" in name or "up_proj.weight" in name:
            added = found[INNER:]
            assert added.shape == (EXTRA, HIDDEN)
            assert added.ne(0).all()  # real work
            assert 0.2 * original.std() < added.std() < 0.3 * original.std()
        elif "gate_proj.bias" in name or "up_proj.bias" in name:
            assert not found[INNER:].any()
        else:
            assert found.shape == original.shape


def test_no_two_matrices_get_the_same_weights(source: Source) -> None:
    wide = Widening(source, EXTRA, torch.float32)
    names = [name for name in source.files if "gate_proj.weight" in name or "up_proj.weight" in name]
    added = {tuple((wide.tensor(name)[INNER:] / source.read(name).std()).flatten().tolist()) for name in names}
    assert len(added) == len(names) == 2 * LAYERS


def test_the_folder_is_that_of_an_ordinary_sharded_model(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    wide = Widening(source, EXTRA, torch.bfloat16, shard_bytes=20_000)
    wide.save(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {file.name for file in out.glob("*.safetensors")}
    assert len(files) == len(wide.shards) > LAYERS
    assert set(index["weight_map"]) == set(source.files)
    assert index["metadata"]["total_size"] == wide.bytes
    config = json.loads((out / "config.json").read_text())
    assert (config["intermediate_size"], config["dtype"]) == (INNER + EXTRA, "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source.folder / name).read_bytes()
    assert "its text is the real model's" in json.loads((out / "widened.json").read_text())["note"]
    assert Source(out).read("model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_engine_answers_as_with_the_original(source: Source, tmp_path: Path, dtype: str) -> None:
    """In 8 bit too: the new activations are never a row's largest, so they move no scale."""
    out = tmp_path / "wide"
    Widening(source, EXTRA, torch.float32).save(out)
    params = sequoia.SamplingParams(max_tokens=30, temperature=0)
    answers = [
        sequoia.load(str(folder), dtype=dtype, device="cpu").generate([3, 5, 7, 3, 5], params).token_ids
        for folder in (source.folder, out)
    ]
    assert answers[0] == answers[1]


class KilledError(Exception):
    """Stands for a signal."""


def killed_after(count: int) -> Any:
    def following(files: Sequence[int]) -> Iterator[int]:
        yield from files[:count]
        raise KilledError

    return following


def test_a_killed_run_leaves_no_folder_and_goes_on(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    wide = Widening(source, EXTRA, torch.float32, shard_bytes=20_000)
    with pytest.raises(KilledError):
        wide.save(out, killed_after(2))
    assert not out.exists()
    written: list[int] = []

    def noted(files: Sequence[int]) -> Iterator[int]:
        written.extend(files)
        return iter(files)

    wide.save(out, noted)
    assert written == list(range(2, len(wide.shards)))
    wide.save(tmp_path / "unbroken")
    for file in (tmp_path / "unbroken").iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_was_begun_is_written_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        raise KilledError

    out, wide = tmp_path / "wide", Widening(source, EXTRA, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr("widen.save_file", half)
        with pytest.raises(KilledError):
            wide.save(out)
    wide.save(out)
    assert torch.isfinite(logits(out)).all()
    assert not list(out.glob("*.begun"))


def test_what_is_finished_is_left_alone(source: Source, tmp_path: Path) -> None:
    wide = Widening(source, EXTRA, torch.float32)
    wide.save(tmp_path / "wide")
    wide.save(tmp_path / "wide", killed_after(0))


def test_other_work_is_not_written_over(source: Source, tmp_path: Path) -> None:
    wide, out = Widening(source, EXTRA, torch.float32, shard_bytes=20_000), tmp_path / "wide"
    with pytest.raises(KilledError):
        wide.save(out, killed_after(1))
    with pytest.raises(FileError, match="was begun and holds something else"):
        Widening(source, 2 * EXTRA, torch.float32).save(out)
    (tmp_path / "own").mkdir()
    with pytest.raises(FileError, match="is there already and holds something else"):
        wide.save(tmp_path / "own")


def test_a_full_disk_is_found_before_it_is_full(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widen.shutil.disk_usage", lambda folder: transformers.utils.generic.ModelOutput(free=1000))
    with pytest.raises(FileError, match="bytes more and 1,000 are free"):
        Widening(source, EXTRA, torch.float32).save(tmp_path / "wide")


def test_it_is_at_least_as_large_as_asked_for_and_less_than_a_step_larger(source: Source) -> None:
    step = 128 * (3 * HIDDEN + 2) * LAYERS * 2
    wide = widening(source, torch.bfloat16, size=500_000)
    assert 500_000 <= wide.bytes < 500_000 + step
    original = Widening(source, 0, torch.bfloat16).bytes
    assert 3 * original <= widening(source, torch.bfloat16, factor=3).bytes < 3 * original + step


def test_sizes_are_read() -> None:
    assert bytes_of("1.5GiB") == 3 * 2**29
    assert bytes_of("300 MB") == 300_000_000
    assert bytes_of("4096") == 4096
    with pytest.raises(UsageError, match=r"a size is a number of bytes, .* not '2 ells'"):
        bytes_of("2 ells")


def test_less_than_the_original_is_refused(source: Source) -> None:
    with pytest.raises(UsageError, match="bytes already"):
        widening(source, torch.bfloat16, factor=0.5)


def test_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCAB)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match="is a gpt2 whose layers have not the three matrices"):
        widening(Source(tmp_path / "gpt2"), torch.bfloat16, factor=2)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds no config\.json"):
        source_of(str(tmp_path))


@pytest.mark.slow
def test_the_default_model_widened_says_the_same(smollm2: LoadedModel, tmp_path: Path) -> None:
    widening(source_of(None), torch.float32, factor=1.1).save(tmp_path / "wide")
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32).eval()
    ids = smollm2.tokenizer("The sky is blue because of", return_tensors="pt").input_ids
    with torch.inference_mode():
        for count in (1, ids.shape[1]):
            found, expected = wide(ids[:, :count]).logits, smollm2.model(ids[:, :count]).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
