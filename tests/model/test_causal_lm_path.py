"""What a model says of the code that runs its passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from sequoia.model.lean.linear import can_pack
from sequoia.model.loading import load_model
from sequoia.model.probe import proved

PACKED = can_pack(torch.bfloat16, torch.device("cpu"))
LLAMA = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OPT = {"ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 32}


def _model(kind: str) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 64}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, **LLAMA))
    return OPTForCausalLM(OPTConfig(**sizes, **OPT))


@pytest.mark.parametrize(
    ("kind", "dtype", "path"),
    [
        ("llama", "bf16", "lean decoder, packed bf16" if PACKED else "lean decoder, bf16"),
        ("llama", "fp32", "lean decoder, fp32"),
        ("llama", "int8", "lean decoder, int8"),
        ("opt", "bf16", f"transformers' modules with {'packed' if PACKED else 'plain'} linear layers"),
        ("opt", "fp32", "transformers' modules with plain linear layers"),
        ("opt", "int8", "transformers' modules with int8 linear layers"),
    ],
)
def test_the_path_is_what_runs(tmp_path: Path, kind: str, dtype: str, path: str) -> None:
    _model(kind).save_pretrained(tmp_path)
    expected = path if kind == "llama" else f"{path}: no lean decoder for opt"
    assert proved(load_model(str(tmp_path), dtype=dtype, device="cpu")).path == expected


def test_an_object_is_left_whole_and_so_not_packed() -> None:
    assert proved(load_model(_model("llama"), dtype="bf16", device="cpu")).path == "lean decoder, bf16"
