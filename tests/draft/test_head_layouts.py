"""Heads in the layouts that they are published in, beside a plain computation of what their papers say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_heads import PlainHead, true_features
from torch import Tensor

from sequoia.draft.head_files import head_folder
from sequoia.draft.heads import load_head
from sequoia.errors import FileError, ModelError, SequoiaError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.loading import load_model
from sequoia.params import SamplingParams
from sequoia.speculate.session import Session
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.shape import TreeShape

VOCAB, OWN, SIZE, LAYERS, INNER = 40, 15, 32, 6, 48
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
_LAYER = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_LLAMA = {**_LAYER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_SPECULATOR: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "transformer_layer_config": _LLAMA,
    "draft_vocab_size": OWN,
    "norm_before_residual": True,
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def target(request: pytest.FixtureRequest) -> CausalLM:
    return make_target(request.param)


def make_target(family: str) -> CausalLM:
    name = family.capitalize()
    sizes = {"hidden_size": SIZE, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, num_hidden_layers=LAYERS, vocab_size=VOCAB, head_dim=8)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    return CausalLM(load_model(model, dtype="fp32", device="cpu"))


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def _layer_tensors(taken: int, start: str, head: int = 8) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (4 * head, taken),
        "self_attn.k_proj": (2 * head, taken),
        "self_attn.v_proj": (2 * head, taken),
        "self_attn.o_proj": (SIZE, 4 * head),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
    }
    found = {f"{start}{name}.weight": _random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    return found | {f"{start}post_attention_layernorm.weight": 1 + _random(SIZE, seed=20)}


def _map() -> dict[str, Tensor]:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))[:OWN].sort().values
    return {"d2t": ids - torch.arange(OWN), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}


def _eagle_3(start: str = "midlayer.", taps: int = 3, feature: int = SIZE) -> dict[str, Tensor]:
    return {
        "fc.weight": _random(SIZE, taps * feature, seed=10),
        f"{start}input_layernorm.weight": 1 + _random(SIZE, seed=11),
        f"{start}hidden_norm.weight": 1 + _random(SIZE, seed=12),
        "norm.weight": 1 + _random(SIZE, seed=13),
        "lm_head.weight": 3 * _random(OWN, SIZE, seed=14),
        **_layer_tensors(2 * SIZE, start),
        **_map(),
    }


def _eagle(start: str = "layers.0.", fuse: str = "fc.") -> dict[str, Tensor]:
    return {f"{fuse}weight": _random(SIZE, 2 * SIZE, seed=10), **_layer_tensors(SIZE, start)}


@dataclass(frozen=True)
class Published:
    """A checkpoint as somebody writes it, and what it means."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...]
    start: str = "midlayer."  # of the layer's names
    fuse: str = "fc."
    file: str = "model.safetensors"
    means: Mapping[str, Any] = field(default_factory=dict)  # for the plain computation

    def save(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if self.file.endswith(".bin"):
            torch.save(dict(self.tensors), folder / self.file)
        else:
            save_file(dict(self.tensors), folder / self.file)
        return folder

    def plain(self, target: CausalLM) -> PlainHead:
        ours = {
            name.replace(self.start, "midlayer.").replace(self.fuse, "fc."): tensor
            for name, tensor in self.tensors.items()
        }
        return PlainHead(None, target, {**_LAYER, "head_dim": 8, **self.means}, ours)


_EAGLE_3 = {**_LLAMA, "draft_vocab_size": OWN}
_BIASES = {f"layers.0.self_attn.{part}_proj.bias": _random(rows, seed=30) for part, rows in (("q", 32), ("k", 16))}
_QWEN3_NORMS = {f"layers.0.self_attn.{part}_norm.weight": 1 + _random(8, seed=40) for part in ("q", "k")}
LAYOUTS: dict[str, Published] = {
    "EAGLE-3": Published(_EAGLE_3, _eagle_3(), (2, 3, 3)),
    "EAGLE-3 as a torch file": Published(_EAGLE_3, _eagle_3(), (2, 3, 3), file="pytorch_model.bin"),
    "EAGLE-3, an embedding of its own": Published(
        _EAGLE_3, _eagle_3() | {"embed_tokens.weight": _random(VOCAB, SIZE, seed=50)}, (2, 3, 3)
    ),
    "EAGLE": Published(_LLAMA, _eagle(), (LAYERS + 1,), "layers.0."),
    "EAGLE-2 as a torch file": Published(
        _LLAMA, _eagle() | {"fc.bias": _random(SIZE, seed=31)}, (LAYERS + 1,), "layers.0.", file="pytorch_model.bin"
    ),
    "EAGLE for Qwen2, with biases": Published(_LLAMA, _eagle() | _BIASES, (LAYERS + 1,), "layers.0."),
    "EAGLE, what training left": Published(
        _LLAMA, _eagle() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, (LAYERS + 1,), "layers.0."
    ),
    "speculators, EAGLE-3": Published(
        _SPECULATOR, _eagle_3("layers.0."), (2, 3, 3), "layers.0.", means={"norm_before_residual": True}
    ),
    "speculators, EAGLE-3 with layers and without the norm before": Published(
        {**_SPECULATOR, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
        _eagle_3("layers.0.") | {"fc.bias": _random(SIZE, seed=32), "verifier_norm.weight": torch.ones(SIZE)},
        (1, 4, 6),
        "layers.0.",
    ),
    "speculators, a layer of Qwen3": Published(
        {**_SPECULATOR, "transformer_layer_config": {**_LLAMA, "model_type": "qwen3", "head_dim": 8}},
        _eagle_3("layers.0.") | _QWEN3_NORMS,
        (2, 3, 3),
        "layers.0.",
        means={"norm_before_residual": True},
    ),
    "speculators, EAGLE": Published(
        {
            "speculators_model_type": "eagle",
            "transformer_layer_config": _LLAMA,
            "layernorms": False,
            "fusion_bias": True,
        },
        _eagle("transformer.", "fusion_fc.") | {"fusion_fc.bias": _random(SIZE, seed=33)},
        (LAYERS + 1,),
        "transformer.",
        "fusion_fc.",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_a_plain_computation(tmp_path: Path, target: CausalLM, layout: str) -> None:
    """On the target's features, and on the head's own outputs after them."""
    published = LAYOUTS[layout]
    folder = published.save(tmp_path / "head")
    assert head_folder(folder) == folder
    model, plain = load_head(folder, target, "fp32").model, published.plain(target)
    assert model.taps == published.taps
    features, cache = true_features(target, TEXT, model.taps), model.new_cache()
    outputs = model.forward(model.fused(features[:-1]), torch.tensor(TEXT[1:]), cache)
    for end in range(2, len(TEXT) + 1):
        expected = plain.logits(features[: end - 1], TEXT[:end]).float()
        torch.testing.assert_close(model.logits(outputs)[end - 2], expected, rtol=1e-4, atol=1e-4)
    guess, last = [7, 11], outputs[-1:]
    for count in (1, 2):
        last = model.forward(last, torch.tensor(guess[count - 1 : count]), cache)
        expected = plain.logits(features[:-1], [*TEXT, *guess[:count]], guesses=count).float()
        torch.testing.assert_close(model.logits(last)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("layout", ["EAGLE", "speculators, a layer of Qwen3"])
def test_greedy_output_is_the_targets(tmp_path: Path, layout: str, dtype: str) -> None:
    target = make_target("llama")
    draft = load_head(LAYOUTS[layout].save(tmp_path), target, dtype)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = []
    for tree in (TreeShape.kary(2, 3), TreeShape.root_only()):
        session = Session(target, draft.start(), tree, VERIFIERS["sequoia"], TEXT, params)
        while session.finish_reason is None:
            session.step()
        outputs.append(session.tokens)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("layout", ["EAGLE", "EAGLE-3"])
def test_an_embedding_that_is_the_targets_is_not_kept_twice(tmp_path: Path, layout: str) -> None:
    target, published = make_target("llama"), LAYOUTS[layout]
    own = target.loaded.model.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    both = {**published.tensors, "embed_tokens.weight": own}
    folder = Published(published.config, both, published.taps).save(tmp_path)
    assert load_head(folder, target, "fp32").model._embedding is None


def test_a_head_narrower_than_its_target(tmp_path: Path) -> None:
    """Its embedding is its own."""
    wide = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=INNER, num_attention_heads=4, num_hidden_layers=LAYERS, vocab_size=VOCAB
    )
    target = CausalLM(load_model(transformers.LlamaForCausalLM(wide), dtype="fp32", device="cpu"))
    tensors = _eagle_3(feature=64) | {"embed_tokens.weight": _random(VOCAB, SIZE, seed=50)}
    published = Published({**_EAGLE_3, "target_hidden_size": 64}, tensors, (2, 3, 3))
    model, plain = load_head(published.save(tmp_path), target, "fp32").model, published.plain(target)
    features = true_features(target, TEXT, model.taps)
    outputs = model.forward(model.fused(features[:-1]), torch.tensor(TEXT[1:]), model.new_cache())
    torch.testing.assert_close(
        model.logits(outputs)[-1], plain.logits(features[:-1], TEXT).float(), rtol=1e-4, atol=1e-4
    )


def _without(published: Published, *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in published.tensors.items() if name not in names}


_E3, _E1, _SP = LAYOUTS["EAGLE-3"], LAYOUTS["EAGLE"], LAYOUTS["speculators, EAGLE-3"]
FAULTS: dict[str, tuple[Callable[[], Published], type[SequoiaError], str]] = {
    "an unknown speculator": (
        lambda: Published({**_SPECULATOR, "speculators_model_type": "mlp"}, _SP.tensors, ()),
        FileError,
        "speculator of type 'mlp', not one of eagle3, eagle",
    ),
    "norms around the fusion": (
        lambda: Published({**_SPECULATOR, "speculators_model_type": "eagle", "layernorms": True}, _SP.tensors, ()),
        FileError,
        "has layernorms, a part that is not computed here",
    ),
    "no layer config": (
        lambda: Published({**_SPECULATOR, "transformer_layer_config": None}, _SP.tensors, ()),
        FileError,
        "needs a transformer_layer_config",
    ),
    "two layers": (
        lambda: Published(_SPECULATOR, {**_SP.tensors, "layers.1.mlp.up_proj.weight": torch.ones(2)}, ()),
        FileError,
        r"no head of its config has, first 'layers\.1\.mlp\.up_proj\.weight'",
    ),
    "no map of the vocabulary": (
        lambda: Published(_EAGLE_3, _without(_E3, "d2t"), ()),
        FileError,
        "lacks 1 tensors of a head, first 'd2t'",
    ),
    "another target's size": (
        lambda: Published({**_EAGLE_3, "target_hidden_size": 16}, _eagle_3(feature=16), ()),
        FileError,
        "embed_tokens",
    ),
    "another target's vocabulary": (
        lambda: Published({**_LLAMA, "vocab_size": VOCAB + 8}, _E1.tensors, ()),
        ModelError,
        "48 token ids, and .* has 40",
    ),
    "features of more layers": (
        lambda: Published({**_SPECULATOR, "eagle_aux_hidden_state_layer_ids": [2, 9, 12]}, _SP.tensors, ()),
        ModelError,
        "reads features 2, 9, 12, and .* has 6 layers",
    ),
    "features of another number of layers": (
        lambda: Published({**_SPECULATOR, "eagle_aux_hidden_state_layer_ids": [2, 3]}, _SP.tensors, ()),
        FileError,
        r"fc\.weight to be \[32, 64\] by its config, and it is \[32, 96\]",
    ),
    "a file that runs code": (
        lambda: Published(_EAGLE_3, {"fc.weight": print}, (), file="pytorch_model.bin"),  # type: ignore[dict-item]
        FileError,
        "is no torch file of tensors",
    ),
    "a file of other data": (
        lambda: Published(_EAGLE_3, {"fc.weight": [1, 2]}, (), file="pytorch_model.bin"),  # type: ignore[dict-item]
        FileError,
        "is no torch file of tensors by name",
    ),
    "no file": (
        lambda: Published(_EAGLE_3, _E3.tensors, (), file="other.bin"),
        FileError,
        r"holds no model\.safetensors or pytorch_model\.bin",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_on_one_line(tmp_path: Path, fault: str) -> None:
    make, kind, message = FAULTS[fault]
    folder = make().save(tmp_path)
    with pytest.raises(kind, match=message) as caught:
        load_head(folder, make_target("llama"), "fp32")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
