"""Every kind of decoder: exact in a tree, or refused with the reason. Tiny random models made from configs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sequoia
from sequoia.draft.model_draft import ModelDraft
from sequoia.engine import Engine
from sequoia.errors import ModelError, UsageError
from sequoia.model.causal_lm import CausalLM
from sequoia.model.language_model import Block
from sequoia.params import SamplingParams
from sequoia.speculate.session import Session
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.shape import TreeShape

_VOCAB, _WINDOW = 96, 8
_SLIDING_FULL = ["sliding_attention", "full_attention"]
_COMMON = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_HEADS = _GROUPED | {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT = {"vocab_size": _VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": None}
_FALCON = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}

# name → (class without "ForCausalLM" or whole, config class without "Config", settings)
_SUPPORTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "Llama", _GROUPED),
    "mistral": ("Mistral", "Mistral", _GROUPED | {"sliding_window": _WINDOW}),
    "qwen2": ("Qwen2", "Qwen2", _GROUPED),
    "qwen2-sliding": (
        "Qwen2",
        "Qwen2",
        _GROUPED | {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", "Qwen3", _HEADS),
    "qwen3-moe": ("Qwen3Moe", "Qwen3Moe", _HEADS | _EXPERTS),
    "mixtral": ("Mixtral", "Mixtral", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", "Gemma2", _HEADS | {"sliding_window": _WINDOW}),
    "gemma3": ("Gemma3", "Gemma3Text", _HEADS | {"sliding_window": _WINDOW, "layer_types": _SLIDING_FULL}),
    "phi3": ("Phi3", "Phi3", _GROUPED),
    "phi3-sliding": ("Phi3", "Phi3", _GROUPED | {"sliding_window": _WINDOW}),
    "gpt2": ("GPT2LMHeadModel", "GPT2", _GPT),
    "gpt-neox": ("GPTNeoX", "GPTNeoX", _COMMON),
    "opt": (
        "OPT",
        "OPT",
        {
            "vocab_size": _VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
    ),
    "falcon": ("Falcon", "Falcon", _FALCON | {"alibi": False}),
    "falcon-grouped": (
        "Falcon",
        "Falcon",
        _FALCON | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gptj": ("GPTJ", "GPTJ", _GPT | {"rotary_dim": 4}),
    "stablelm": ("StableLm", "StableLm", _GROUPED),
    "cohere2": ("Cohere2", "Cohere2", _GROUPED | {"sliding_window": _WINDOW, "layer_types": _SLIDING_FULL}),
    "olmo2": ("Olmo2", "Olmo2", _GROUPED),
    "gpt-oss": (
        "GptOss",
        "GptOss",
        _HEADS
        | {
            "sliding_window": _WINDOW,
            "layer_types": _SLIDING_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        "DeepseekV3",
        _COMMON
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
}

_RECURRENT = "recurrent state, which cannot be rolled back"
_LAYERS = "{} layers, whose state cannot follow a token tree"
_NO_POSITIONS = "takes no position ids"
_OWN_WINDOW = "{} of its own"

# name → (class, config, settings, what the refusal says)
_REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bloom": ("Bloom", "Bloom", {"vocab_size": _VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _NO_POSITIONS),
    "mpt": ("Mpt", "Mpt", {"vocab_size": _VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4}, _NO_POSITIONS),
    "falcon-alibi": ("Falcon", "Falcon", _FALCON | {"alibi": True}, "ALiBi"),
    "mamba": (
        "Mamba",
        "Mamba",
        {"vocab_size": _VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8},
        _RECURRENT,
    ),
    "jamba": (
        "Jamba",
        "Jamba",
        _GROUPED
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        _RECURRENT,
    ),
    "qwen3-next": (
        "Qwen3Next",
        "Qwen3Next",
        _HEADS
        | _EXPERTS
        | {
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        _RECURRENT,
    ),
    "lfm2": ("Lfm2", "Lfm2", _GROUPED | {"layer_types": ["conv", "full_attention"]}, _LAYERS.format("conv")),
    "llama4": ("Llama4", "Llama4Text", _HEADS | {"num_local_experts": 2}, _LAYERS.format("chunked_attention")),
    "gpt-neo": (
        "GPTNeo",
        "GPTNeo",
        {
            "vocab_size": _VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 512,
            "window_size": 256,
            "attention_types": [[["global", "local"], 1]],
        },
        _OWN_WINDOW.format("window_size of 256"),
    ),
    "bert": ("BertLMHeadModel", "Bert", _COMMON, "gives other logits"),
    "bart": (
        "Bart",
        "Bart",
        {
            "vocab_size": _VOCAB,
            "d_model": 32,
            "decoder_layers": 1,
            "encoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 32,
        },
        _NO_POSITIONS,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5",
        {"vocab_size": _VOCAB, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        "encoder-decoder",
    ),
}

_BUSHY = TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11, 12, 9, 9))  # not in level order, depth 5
_SHAPES = {
    "root": TreeShape.root_only(),
    "chain": TreeShape.chain(4),
    "kary": TreeShape.kary(2, 3),
    "beam": TreeShape.beam(4, 4),
    "bushy": _BUSHY,
}


def _tiny(kind: str, config: str, settings: dict[str, Any], noise: float = 0.0) -> Any:
    """A random model whose weights are large enough for the context to matter; `noise` moves it a little away."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind if hasattr(transformers, kind) else kind + "ForCausalLM")
    model = model_class(getattr(transformers, config + "Config")(**settings))
    weights, changes = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if weight.dim() > 1 else 0.1 if "bias" in name else 0.0
            weight += scale * torch.randn(weight.shape, generator=weights)
            weight += noise * scale * torch.randn(weight.shape, generator=changes)
    return model.eval()


@lru_cache
def _engine(name: str) -> Engine:
    """Target, and a draft that often agrees with it; both probed."""
    settings = _SUPPORTED[name]
    return sequoia.load(_tiny(*settings), draft=_tiny(*settings, noise=0.2), tree="off", device="cpu")


@pytest.fixture(params=_SUPPORTED)
def engine(request: pytest.FixtureRequest) -> Engine:
    return _engine(request.param)


def _ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, _VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def _linear(model: CausalLM, texts: list[list[int]]) -> Tensor:
    """[texts, vocab] logits after each text, from one pass without a cache; what stands behind a text is not seen."""
    padded = torch.tensor([text + [0] * (max(map(len, texts)) - len(text)) for text in texts])
    logits: Tensor = model.loaded.model(input_ids=padded, use_cache=False).logits
    return logits[range(len(texts)), [len(text) - 1 for text in texts]]


def _assert_equal(found: Tensor, expected: Tensor) -> None:
    errors = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert errors.max() < 1e-4, f"row {errors.argmax()}: relative error {errors.max():.2g}"


def _block(shape: TreeShape, start: int) -> Block:
    return Block(start + torch.tensor(shape.depths), torch.from_numpy(shape.ancestors.copy()))


@pytest.mark.parametrize("length", [1, 13])
def test_node_logits_equal_a_linear_run_over_the_path(engine: Engine, length: int) -> None:
    """Fault 15, 22: whatever the order of storage; then the cache goes on exactly after a kept path."""
    model, prefix, nodes = engine.target, _ids(length), _ids(_BUSHY.size, seed=1)
    cache = model.new_cache()
    model.forward(torch.tensor(prefix), cache)
    tree = model.forward(torch.tensor(nodes), cache, _block(_BUSHY, length))
    texts = [[*prefix, nodes[0], *(nodes[node] for node in path)] for path in _BUSHY.paths]
    _assert_equal(tree, _linear(model, texts))

    deepest = 14
    cache.keep(length, [length + node for node in (0, *_BUSHY.paths[deepest])])
    after = _ids(4, seed=2)
    steps = [model.forward(torch.tensor([token]), cache)[0] for token in after]
    _assert_equal(torch.stack(steps), _linear(model, [texts[deepest] + after[: end + 1] for end in range(4)]))


class _Recorder:
    """A language model that remembers the logits it gave."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.logits.append(self._model.forward(*args, **kwargs))
        return self.logits[-1]


def test_a_draft_grown_level_by_level_gives_the_logits_of_linear_runs(engine: Engine) -> None:
    """Fault 15, 17: over three rounds, so on caches that kept a path."""
    recorder = _Recorder(engine.target)
    draft = ModelDraft(recorder, _VOCAB)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=40, seed=3)
    session = Session(engine.target, draft.start(), _BUSHY, VERIFIERS["sequoia"], _ids(13), params)
    for _ in range(3):
        text = list(session.tokens)
        recorder.logits.clear()
        tree = session.step().tree
        rows = torch.cat([recorder.logits[0][-1:], *recorder.logits[1:]])
        tokens = tree.tokens.tolist()
        inner = [node for level in tree.shape.levels for node in level if tree.shape.children(node)]
        assert len(rows) == len(inner)
        texts = [text + [tokens[step] for step in tree.shape.paths[node]] for node in inner]
        _assert_equal(rows, _linear(engine.target, texts))


@pytest.mark.parametrize(
    ("shape", "length"), [("root", 5), ("chain", 13), ("kary", 5), ("beam", 13), ("bushy", 5), ("bushy", 13)]
)
def test_greedy_output_equals_generate(engine: Engine, shape: str, length: int) -> None:
    """Prompts that reach past the window, and outputs that cross its edge."""
    prompt = _ids(length, seed=4)
    ours = Engine(engine.target, engine.draft, _SHAPES[shape], engine.verifier).generate(
        prompt, SamplingParams(max_tokens=18, temperature=0, ignore_eos=True)
    )
    assert list(ours.token_ids) == _generated(engine, prompt, 18)


def _generated(engine: Engine, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = engine.target_model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def test_these_drafts_are_sometimes_accepted() -> None:
    """Otherwise the comparison with `generate` would show little."""
    prompt, params = _ids(13, seed=4), SamplingParams(max_tokens=18, temperature=0)
    lengths = {}
    for name in ("llama", "mistral", "gemma3", "gpt2", "opt", "qwen3-moe"):
        engine = _engine(name)
        stats = Engine(engine.target, engine.draft, _SHAPES["beam"], engine.verifier).generate(prompt, params).stats
        lengths[name] = stats.mean_accepted_length
    assert sum(1.2 < length < 5 for length in lengths.values()) > len(lengths) / 2, lengths


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_with_the_reason_in_one_line(name: str) -> None:
    *settings, reason = _REFUSED[name]
    with pytest.raises(ModelError, match=reason) as refusal:
        sequoia.load(_tiny(*settings), device="cpu")
    assert "\n" not in str(refusal.value)


def test_refused_as_a_draft_too() -> None:
    with pytest.raises(ModelError, match=_RECURRENT):
        sequoia.load(_tiny(*_SUPPORTED["llama"]), draft=_tiny(*_REFUSED["mamba"][:3]), device="cpu")


def test_longrope_is_exact_up_to_where_its_angles_change_and_stops_there() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    settings = _GROUPED | {"original_max_position_embeddings": 24, "rope_parameters": factors}
    engine = sequoia.load(_tiny("Phi3", "Phi3", settings), tree="kary:2x3", device="cpu")
    prompt = _ids(10, seed=4)
    ours = engine.generate(prompt, SamplingParams(max_tokens=50, temperature=0))
    assert list(ours.token_ids) == _generated(engine, prompt, 14)
    assert ours.finish_reason == "length"
    with pytest.raises(UsageError, match="the target's context 24"):
        engine.generate(_ids(24))


def test_dynamic_rope_is_exact_up_to_the_context() -> None:
    settings = _GROUPED | {"max_position_embeddings": 24, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    engine = sequoia.load(_tiny("Llama", "Llama", settings), tree="kary:2x3", device="cpu")
    prompt = _ids(10, seed=4)
    ours = engine.generate(prompt, SamplingParams(max_tokens=50, temperature=0))
    assert list(ours.token_ids) == _generated(engine, prompt, 14)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3-moe"])
def test_16_bit_models_pass_the_probe(name: str) -> None:
    sequoia.load(_tiny(*_SUPPORTED[name]), dtype="bf16", device="cpu")


def test_eager_attention_is_exact_too() -> None:
    model = _tiny(*_SUPPORTED["gemma3"])
    model.set_attn_implementation("eager")
    engine = sequoia.load(model, tree="kary:2x3", device="cpu")
    prompt = _ids(13, seed=4)
    ours = engine.generate(prompt, SamplingParams(max_tokens=18, temperature=0))
    assert list(ours.token_ids) == _generated(engine, prompt, 18)
