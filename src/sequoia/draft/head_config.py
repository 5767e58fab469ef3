"""What a head is made of, as its config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sequoia.errors import FileError
from sequoia.model.lean.decoder import Heads
from sequoia.model.lean.linear import ACTIVATIONS

FUSES_EMBEDDING = "fuses_embedding"
"""A key of our own, which says of public configs what they say by their layout alone."""
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class HeadName:
    """What plans and people call a head."""

    name: str
    weights: str  # number format, as `--dtype` names it


@dataclass(frozen=True)
class HeadConfig:
    """A head's sizes, and how it goes by the target's features.

    Args:
        target_size: of a feature.
        fuses_embedding: whether it is of the kind of EAGLE and EAGLE-2, which fuse the embedding with one feature.
        feature_layers: the features it reads; see `sequoia.model.features`. None leaves it to the kind of head.
        feature_norm: whether each feature is divided by its root mean square first.
        tie_head: whether its output rows are the target's own.
        residual_norm: whether the sum that its layer adds to starts from the normed feature.
    """

    hidden_size: int
    intermediate_size: int
    heads: Heads
    eps: float
    activation: str
    rope: Mapping[str, Any]
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] | None = None
    feature_norm: bool = False
    tie_head: bool = False
    residual_norm: bool = False
    target_size: int | None = None
    fuses_embedding: bool = False

    @property
    def feature_size(self) -> int:
        """Of the target's features."""
        return self.target_size or self.hidden_size

    @classmethod
    def read(cls, config: Mapping[str, Any], name: str) -> HeadConfig:
        """From a config of Llama's keys and ours.

        Raises:
            FileError: a key is missing, or has a value that none of our passes computes.
        """
        keys = _Keys(config, name)
        hidden, queries = keys.count("hidden_size"), keys.count("num_attention_heads")
        size = keys.count("head_dim", hidden // queries)
        vocab = keys.count("vocab_size")
        activation = config.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise FileError(f"{name} has the activation {activation!r}, not one of {', '.join(sorted(ACTIVATIONS))}.")
        rope = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None}
        return cls(
            hidden,
            keys.count("intermediate_size"),
            Heads(queries, keys.count("num_key_value_heads", queries), size),
            float(config.get("rms_norm_eps", 1e-6)),
            activation,
            {**rope, "hidden_size": hidden, "num_attention_heads": queries, "head_dim": size},
            vocab,
            keys.count("draft_vocab_size", vocab),
            keys.counts("feature_layers"),
            keys.flag("feature_norm"),
            keys.flag("tie_head"),
            keys.flag("norm_before_residual"),
            keys.count("target_hidden_size", hidden),
            keys.flag(FUSES_EMBEDDING),
        )


class _Keys:
    """A config, read strictly."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def count(self, key: str, default: int | None = None) -> int:
        value: Any = self._config.get(key)
        value = default if value is None else value
        if not _is_count(value) or value == 0:
            raise self._error(key, "an integer of at least 1", value)
        return int(value)

    def counts(self, key: str) -> tuple[int, ...] | None:
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(map(_is_count, value)):
            raise self._error(key, "a list of layers", value)
        return tuple(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, "true or false", value)
        return value

    def _error(self, key: str, needed: str, found: object) -> FileError:
        return FileError(f"the config of {self._name} needs {key} to be {needed}, and it is {found!r}. Save it again.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
