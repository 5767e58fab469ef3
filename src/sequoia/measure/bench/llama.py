"""llama.cpp through llama-cpp-python, on the GGUF file that the target came from.

Its numbers are its own: weights stay quantised, so its answers are held against each other, not against the target's.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sequoia.engine import Engine
from sequoia.errors import FileError, UsageError
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.method import LOOKUP_TOKENS, Emit, Method, require_mapped
from sequoia.model.gguf_cache import converted_folder, gguf_name, packaged_gguf
from sequoia.params import SamplingParams

_FIRST_PASS = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).eval([1, 2, 3])"

PLAIN_LLAMA, LOOKUP_LLAMA = LLAMA = ("llama.cpp", "llama.cpp-lookup")


def llama_method(name: str, engine: Engine, clock: PassClock, gguf: Path | None) -> Method:
    """One of `LLAMA`.

    Args:
        gguf: the file that the target was loaded from; without it the default target's.

    Raises:
        UsageError: llama-cpp-python is not installed or does not run here, or the target is not from the file.
        FileError: there is no such file.
    """
    try:
        library = importlib.import_module("llama_cpp")
    except (ImportError, OSError) as error:  # OSError where its shared library cannot be loaded
        raise UsageError(f'{name} needs llama-cpp-python ({error}): pip install "sequoia[peers]".') from error
    file = _target_file(name, engine, gguf)
    require_sound(name, file)
    llama = LlamaCpp(library, name, file, engine, clock)
    return Method(
        name,
        llama.generate,
        same_as=PLAIN_LLAMA if name == LOOKUP_LLAMA else None,
        spec=f"{name}:{file.name}",
        own_model=True,
        prepare=llama.prepare,
    )


class LlamaCpp:
    """A llama.cpp model, opened when it is known how long requests are."""

    def __init__(self, library: Any, name: str, file: Path, engine: Engine, clock: PassClock) -> None:
        self._library, self._name, self._file = library, name, file
        self._on_gpu = engine.target.device.type == "cuda"
        self._eos_ids = engine.target.loaded.eos_ids
        self._clock = clock
        self._llama: Any = None

    def prepare(self, most_tokens: int) -> None:
        """Open the model with a context of `most_tokens` and what a lookup may propose past them."""
        lookup = self._name == LOOKUP_LLAMA
        decoding = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding if lookup else None
        self._llama = self._library.Llama(
            str(self._file),
            n_ctx=most_tokens + LOOKUP_TOKENS,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            n_gpu_layers=-1 if self._on_gpu else 0,
            logits_all=lookup,  # else its lookup writes past the end of an array
            draft_model=decoding(num_pred_tokens=LOOKUP_TOKENS) if decoding else None,
            verbose=False,
        )
        evaluate = self._llama.eval

        def counted(tokens: Sequence[int]) -> None:
            rows = len(tokens)
            evaluate(tokens)
            self._clock.record(rows)

        self._llama.eval = counted

    def generate(self, prompt: Sequence[int], params: SamplingParams, emit: Emit) -> None:
        """See `Generate`. At temperatures other than 1 its top-p is another: it comes before the temperature."""
        fields = ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty")
        require_mapped(self._name, params, *fields)
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        if params.seed is not None:
            self._llama.set_seed(params.seed)
        self._llama.reset()  # else it goes on from what the last prompt had in common with this one
        tokens = self._llama.generate(
            list(prompt),
            temp=params.temperature,
            top_k=params.top_k or 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repeat_penalty=1.0,
        )
        for count, token in enumerate(tokens, start=1):
            emit([token])
            if count == params.max_tokens or token in eos_ids:
                return


def _target_file(name: str, engine: Engine, gguf: Path | None) -> Path:
    """The GGUF file whose conversion is the target."""
    if gguf is not None and not gguf.is_file():
        raise FileError(f"there is no file {gguf}. Check the path.")
    file = gguf or packaged_gguf()
    loaded = Path(engine.target_model.config.name_or_path)
    # The name first: another file would be converted only to be refused.
    if file is None or not loaded.name.startswith(gguf_name(file) + "-") or converted_folder(file) != loaded:
        raise UsageError(
            f"{name} runs the GGUF file that the target was loaded from, and {engine.target.loaded.name} was not "
            f"loaded from {file or 'one'}. Use the default target, or --target FILE.gguf with {name}:FILE.gguf."
        )
    return file


def require_sound(name: str, file: Path) -> None:
    """Refuse a llama-cpp-python that does not run here.

    The first pass is another process's: builds that do not suit the processor crash, and take theirs with them.

    Raises:
        UsageError: the first pass failed; the message says how.
    """
    command = [sys.executable, "-c", _FIRST_PASS, str(file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    reason = signal.Signals(-done.returncode).name if done.returncode < 0 else said[-1]
    raise UsageError(
        f"{name} does not run on this machine: its first pass ended with {reason}. Build llama-cpp-python anew for "
        "this processor (CMAKE_ARGS, docs/harness.md), or leave it out."
    )
