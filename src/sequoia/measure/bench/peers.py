"""Other people's ways to generate on the same weights: transformers through the model object, and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia.draft.copying import CopyingDraft
from sequoia.draft.model_draft import ModelDraft
from sequoia.engine import Engine
from sequoia.errors import UsageError
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.llama import LLAMA, llama_method
from sequoia.measure.bench.method import LOOKUP_TOKENS, PLAIN, Emit, Generate, Method, require_mapped
from sequoia.model.causal_lm import CausalLM
from sequoia.model.quiet import quiet
from sequoia.params import SamplingParams

ASSISTANT = {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"}
"""transformers' own defaults, spelled out: with another schedule one request would change the next."""

PEERS = ("transformers", "transformers-assisted", "transformers-lookup", *LLAMA)


def peer_method(name: str, engine: Engine, clock: PassClock, gguf: Path | None = None) -> Method:
    """A method of `PEERS`.

    Args:
        gguf: for llama.cpp, the file that the target was loaded from; without it the default target's.

    Raises:
        UsageError: it is not installed, or cannot run with these models.
        FileError: there is no such file.
    """
    if name in LLAMA:
        return llama_method(name, engine, clock, gguf)
    if gguf is not None:
        raise UsageError(f"{name} runs the engine's own target and takes no file. Leave {gguf} out.")
    if engine.memory is not None:
        raise UsageError(
            f"{name} runs the whole model in memory, and this one is streamed within a budget. Leave the method or "
            "--offload out; benchmarks/offload.py compares with accelerate's disk offload."
        )
    clock.watch(engine.target_model)
    # transformers runs the weights as they were before they were quantised: another model, which claims nothing.
    same_as = None if engine.target.loaded.bits else PLAIN
    if name == "transformers-assisted":
        return Method(name, _transformers(name, engine, assistant=_assistant(engine)), same_as=same_as, spec=name)
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "transformers-lookup" else {}
    return Method(name, _transformers(name, engine, lookup), same_as=same_as, spec=name)


def _assistant(engine: Engine) -> Any:
    draft = engine.draft.own if isinstance(engine.draft, CopyingDraft) else engine.draft
    if not isinstance(draft, ModelDraft) or not isinstance(draft.model, CausalLM):
        raise UsageError("transformers-assisted needs a draft that is a model, and this one is not. Add --draft MODEL.")
    if draft.model.loaded.model is engine.target.loaded.model:
        raise UsageError(
            f"transformers-assisted runs a draft in modules of its own, and {draft.model.loaded.name} has none. Add "
            "--draft MODEL."
        )
    return draft.model.whole_model


def _transformers(name: str, engine: Engine, extra: Mapping[str, Any] | None = None, assistant: Any = None) -> Generate:
    model = engine.target_model
    eos_ids = engine.target.loaded.eos_ids

    def generate(prompt: Sequence[int], params: SamplingParams, emit: Emit) -> None:
        require_mapped(name, params, "logit_bias", "presence_penalty", "frequency_penalty")
        ids = torch.tensor([list(prompt)], device=model.device)
        helper = {} if assistant is None else {"assistant_model": assistant}
        with ExitStack() as undo:
            undo.enter_context(quiet())
            undo.enter_context(_own_noise(params, model.device))
            empty = undo.enter_context(_own_config(model))
            if assistant is not None:
                undo.enter_context(_own_config(assistant)).update(**ASSISTANT)
            undo.enter_context(torch.inference_mode())
            config = type(empty)(**_options(params, eos_ids), **(extra or {}))
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=_Streamer(emit),
                **helper,
            )

    return generate


def _options(params: SamplingParams, eos_ids: frozenset[int]) -> dict[str, Any]:
    """The request as a generation config has it; both run the processors in the same order."""
    eos = [] if params.ignore_eos else sorted(eos_ids)
    options: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "do_sample": params.temperature > 0,
        "repetition_penalty": params.repetition_penalty,
        "eos_token_id": eos or None,
        "pad_token_id": eos[0] if eos else 0,
    }
    if params.temperature > 0:
        options |= {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p}
        options |= {"min_p": params.min_p or None}
    return options


@contextmanager
def _own_config(model: Any) -> Iterator[Any]:
    """An empty generation config in place of the checkpoint's, which would fill in whatever a request leaves open."""
    checkpoint = model.generation_config
    model.generation_config = type(checkpoint)()
    try:
        yield model.generation_config
    finally:
        model.generation_config = checkpoint


@contextmanager
def _own_noise(params: SamplingParams, device: torch.device) -> Iterator[None]:
    """The request's seed in torch's global generators, which transformers draws from; they are put back after it."""
    if params.temperature == 0 or params.seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(params.seed)
        yield


class _Streamer:
    """What `generate` hands its tokens to: first the prompt, then those of each step."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._prompt_came = False

    def put(self, tokens: Tensor) -> None:
        if self._prompt_came:
            self._emit(tokens.flatten().tolist())
        self._prompt_came = True

    def end(self) -> None:
        pass
