"""Layouts that heads are published in, under one set of names: those of EAGLE-3 as SafeAILab writes it.

Sources: https://github.com/SafeAILab/EAGLE (EAGLE, EAGLE-2 and EAGLE-3) and https://github.com/vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sequoia.draft.head_config import FUSES_EMBEDDING
from sequoia.errors import FileError

Config = Mapping[str, Any]

SPECULATORS = "speculators_model_type"
MEDUSA = "medusa_num_heads"
"""A config that has this key is of Medusa heads."""
_OF_EAGLE_3 = ("feature_layers", "draft_vocab_size")  # keys that a config of EAGLE or EAGLE-2 has not
_KINDS = {"eagle3": False, "eagle": True}  # of speculators → whether they fuse the embedding
_UNUSED = ("verifier_", "rotary_emb.inv_freq")  # what training leaves behind: the target's own, and what a config says
_RENAMED = {"layers.0.": "midlayer.", "transformer.": "midlayer.", "fusion_fc.": "fc."}
_NOT_COMPUTED = ("layernorms", "norm_before_fc")


def is_head_config(config: Config) -> bool:
    """Whether a config says that it is a head's. One of EAGLE or EAGLE-2 looks like a model's of one layer."""
    return any(key in config for key in (SPECULATORS, MEDUSA, *_OF_EAGLE_3))


def flattened(config: Config, name: str) -> dict[str, Any]:
    """A config of any layout in the keys that `HeadConfig.read` takes.

    Raises:
        FileError: it is of a kind, or has a part, that is not computed here.
    """
    if SPECULATORS not in config:
        return {**config, FUSES_EMBEDDING: not any(key in config for key in _OF_EAGLE_3)}
    kind = config[SPECULATORS]
    if kind not in _KINDS:
        raise FileError(
            f"{name} is a speculator of type {kind!r}, not one of {', '.join(_KINDS)}. Choose another head."
        )
    strange = next((key for key in _NOT_COMPUTED if config.get(key)), None)
    if strange is not None:
        raise FileError(f"{name} has {strange}, a part that is not computed here. Choose a head without it.")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise FileError(f"the config of {name} needs a transformer_layer_config, and has none. Save it again.")
    return {
        **layer,
        **{key: value for key, value in config.items() if key != "transformer_layer_config"},
        "feature_layers": config.get("eagle_aux_hidden_state_layer_ids"),
        FUSES_EMBEDDING: _KINDS[kind],
    }


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under EAGLE-3's names, without those that no pass uses."""
    return {_new_name(name): tensor for name, tensor in tensors.items() if not any(part in name for part in _UNUSED)}


def _new_name(name: str) -> str:
    start = next((start for start in _RENAMED if name.startswith(start)), None)
    return name if start is None else _RENAMED[start] + name.removeprefix(start)
