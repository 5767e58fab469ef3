"""What a model's config says of attention and positions: kinds of layers, and up to where they are exact."""

from __future__ import annotations

import math

from sequoia.errors import ModelError
from sequoia.model.loaded import LoadedModel

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(loaded: LoadedModel) -> tuple[str, ...]:
    """The kinds of attention layer in the model; anything a tree mask cannot serve is refused."""
    model, config = loaded.model, loaded.model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{loaded.name} is an encoder-decoder model; Sequoia needs a decoder-only one.")
    if getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{loaded.name} keeps a recurrent state, which cannot be rolled back when a drafted token is rejected. "
            "Choose a model with attention layers only."
        )
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise ModelError(
            f"{loaded.name} uses {attention} attention, which takes no tree mask. Load it with "
            'attn_implementation="sdpa".'
        )
    _refuse_foreign_windows(loaded)
    window = getattr(config, "sliding_window", None)
    kinds = tuple(sorted(set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])))
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise ModelError(
            f"{loaded.name} has {unknown[0]} layers, whose state cannot follow a token tree. "
            "Choose a model with full or sliding-window attention layers only."
        )
    if SLIDING in kinds and not isinstance(window, int):
        raise ModelError(
            f"{loaded.name} has sliding-window layers, but its config's sliding_window is {window!r}, not a number of "
            "tokens. Choose another model."
        )
    return kinds


def _refuse_foreign_windows(loaded: LoadedModel) -> None:
    """A window that models apply by themselves (GPT-Neo's local layers) counts slots, and a tree's are no positions."""
    context = loaded.context_length or math.inf
    for name, width in loaded.model.config.get_text_config().to_dict().items():
        if name.endswith("window_size") and isinstance(width, int) and 0 < width < context:
            raise ModelError(
                f"{loaded.name} limits attention by a {name} of {width} of its own, which cannot follow a token tree. "
                "Choose a model with full or sliding-window attention layers only."
            )


def exact_context(loaded: LoadedModel) -> int | None:
    """Positions up to which a cached key stays valid.

    LongRoPE turns every key by other angles once a text outgrows the length the model was first trained on.
    """
    scaling = getattr(loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    ends = [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]
    limits = [*ends, loaded.context_length, loaded.most_tokens]
    return min((limit for limit in limits if limit is not None), default=None)
