"""GGUF files as transformers reads them, with what it gets wrong put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import transformers.modeling_gguf_pytorch_utils as gguf_reader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

# These vocabularies learned their merges with every digit on its own (llama.cpp, llama-vocab.cpp, the pre-tokenizers
# that split on a single \p{N} before GPT-2's pattern). transformers builds them without it: "a  1" gets other ids.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def read_gguf(file: Path) -> tuple[Any, Any]:
    """The model in 32 bit and the tokenizer.

    Raises:
        ImportError: a package that reading needs is missing.
        Exception: nearly any, where the file is damaged.
    """
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "local_files_only": True,
    }
    # Releases that can compute on packed weights must be told not to; earlier ones always unpack.
    unpack: dict[str, Any] = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if _can_stay_packed() else {}
    )
    causal_lm: Any = AutoModelForCausalLM
    with _without_legacy_bar():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = causal_lm.from_pretrained(**source, **unpack, dtype=torch.float32)
    _split_digits(tokenizer, file)
    return model, tokenizer


def _can_stay_packed() -> bool:
    return hasattr(transformers, "GgufConfig")


@contextmanager
def _without_legacy_bar() -> Iterator[None]:
    """The GGUF reader draws a bar of its own, which no setting of transformers reaches."""
    reader: Any = gguf_reader
    bar = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar


def _split_digits(tokenizer: Any, file: Path) -> None:
    if _pre_tokenizer_name(file) in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _pre_tokenizer_name(file: Path) -> str | None:
    from gguf import GGUFReader

    reader: GGUFReader = GGUFReader(file)
    field = reader.fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())
