"""Tensors of a head: read from a folder, and held against what its config asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sequoia.draft.head_config import HeadConfig
from sequoia.errors import FileError
from sequoia.model.torch_files import load_tensors

Shapes = dict[str, tuple[int, ...]]

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files that a head's tensors may lie in, the first there is."""


def read_tensors(folder: Path, names: Sequence[str] = WEIGHTS) -> dict[str, Tensor]:
    """Raises:
    FileError: there is no such file, or it is damaged.
    """
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise FileError(f"{folder} holds no {' or '.join(names)}. Download or save the head again.")
    if file.suffix != ".safetensors":
        return load_tensors(file)
    try:
        with safe_open(file, framework="pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118, not a mapping
    except Exception as error:  # safetensors has an error of its own for a damaged file
        raise FileError(f"{file} is damaged: {error}. Download or save the head again.") from error


def tensor_names(folder: Path, names: Sequence[str] = WEIGHTS) -> frozenset[str]:
    """Names of the tensors in a folder, without reading them where that is possible; none where there are none."""
    file = folder / names[0]
    try:
        if not file.is_file():
            return frozenset(read_tensors(folder, names))
        with safe_open(file, framework="pt") as stored:
            return frozenset(stored.keys())
    except Exception:  # whoever loads it says what is wrong
        return frozenset()


def check_tensors(tensors: Mapping[str, Tensor], config: HeadConfig, name: str) -> None:
    """Raises:
    FileError: one is missing, one is too many, or one has another shape than the config says.
    """
    shapes = _shapes(config, tensors)
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise FileError(f"{name} lacks {len(missing)} tensors of a head, first {missing[0]!r}. Save the head again.")
    if extra:
        raise FileError(
            f"{name} holds {len(extra)} tensors that no head of its config has, first {extra[0]!r}. Mend its config."
        )
    for key, shape in shapes.items():
        if tuple(tensors[key].shape) != shape:
            raise FileError(
                f"{name} needs {key} to be {list(shape)} by its config, and it is {list(tensors[key].shape)}. Mend its "
                "config, or save the head again."
            )


def _shapes(config: HeadConfig, tensors: Mapping[str, Tensor]) -> Shapes:
    """What must be there, and what may be as far as it is."""
    shapes, optional = _layer_shapes(config), _optional_shapes(config)
    shapes |= _eagle_shapes(config) if config.fuses_embedding else _eagle_3_shapes(config)
    if config.draft_vocab_size < config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    if config.feature_size != config.hidden_size:  # the target's embedding does not fit
        shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    biases = {key.removesuffix("weight") + "bias": shape[:1] for key, shape in shapes.items() if len(shape) == 2}
    return shapes | {key: shape for key, shape in (optional | biases).items() if key in tensors}


def _layer_shapes(config: HeadConfig) -> Shapes:
    size, inner, heads = config.hidden_size, config.intermediate_size, config.heads
    queries, keys = heads.queries * heads.size, heads.keys * heads.size
    taken = size if config.fuses_embedding else 2 * size
    return {
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (queries, taken),
        "midlayer.self_attn.k_proj.weight": (keys, taken),
        "midlayer.self_attn.v_proj.weight": (keys, taken),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
    }


def _eagle_shapes(config: HeadConfig) -> Shapes:
    return {"fc.weight": (config.hidden_size, config.hidden_size + config.feature_size)}


def _eagle_3_shapes(config: HeadConfig) -> Shapes:
    size, taps = config.hidden_size, len(config.feature_layers or (0, 0, 0))
    shapes: Shapes = {
        "fc.weight": (size, taps * config.feature_size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    return shapes if config.tie_head else shapes | {"lm_head.weight": (config.draft_vocab_size, size)}


def _optional_shapes(config: HeadConfig) -> Shapes:
    size, own = config.hidden_size, config.draft_vocab_size
    shapes: Shapes = {
        "embed_tokens.weight": (config.vocab_size, size),
        "midlayer.self_attn.q_norm.weight": (config.heads.size,),
        "midlayer.self_attn.k_norm.weight": (config.heads.size,),
        "d2t": (own,),
        "t2d": (config.vocab_size,),
    }
    if config.fuses_embedding:
        return shapes | {"lm_head.weight": (own, size)}
    return shapes | {"fc_embed.weight": (size, size)}  # of heads trained here: the embedding joins the residual stream
