"""The law that a run is held against: processors and joint probabilities written plainly, apart from the product's.

Nothing here is shared with `speculate/`, so that a fault there cannot hide by being here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sequoia.params import SamplingParams

Floats = NDArray[np.float64]


def reference_probs(
    logits: Sequence[float] | Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """The distribution of the next token after `prompt` and `output`: order and meanings as in transformers.

    Args:
        logits: [vocab] of the model, unprocessed.

    Returns:
        [vocab] in 64 bit.
    """
    scores = np.array(logits, dtype=np.float64)
    for token, amount in params.logit_bias.items():
        scores[token] += amount
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.temperature == 0:
        return np.array(np.arange(len(scores)) == np.argmax(scores), dtype=np.float64)
    scores /= params.temperature
    if params.top_k is not None and params.top_k < len(scores):
        scores[scores < np.sort(scores)[-params.top_k]] = -np.inf
    _drop_beyond_mass(scores, params.top_p)
    probs = _softmax(scores)
    scores[probs < params.min_p * probs.max()] = -np.inf
    return _softmax(scores)


def joint_law(
    logits_after: Callable[[Sequence[int]], Sequence[float] | Floats],
    params: SamplingParams,
    prompt: Sequence[int],
    length: int,
) -> Floats:
    """The probability of every continuation of `prompt` by `length` tokens, [vocab] * length.

    Args:
        logits_after: tokens → [vocab] logits of the token that follows them.
    """

    def law(output: tuple[int, ...]) -> Floats:
        if len(output) == length:
            return np.ones(())
        probs = reference_probs(logits_after([*prompt, *output]), params, prompt, output)
        return np.stack([p * law((*output, token)) for token, p in enumerate(probs)])

    return law(())


def _drop_beyond_mass(scores: Floats, mass: float) -> None:
    """Ban in place what comes after the token whose probability brings the sum, likeliest first, to `mass`."""
    probs, reached = _softmax(scores), 0.0
    for token in np.argsort(-scores, kind="stable"):
        if reached >= mass:
            scores[token] = -np.inf
        reached += probs[token]


def _softmax(scores: Floats) -> Floats:
    weights: Floats = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights
