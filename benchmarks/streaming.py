"""What the offload benchmark stands on: raw reads, peak memory, accelerate's disk offload, and a rounded draft."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sequoia.model.lean.int4 import rounded
from sequoia.model.loading import load_model, packaged_gguf
from sequoia.model.offload.disk import THREADS
from sequoia.model.offload.files import aligned_buffer
from sequoia.model.offload.layout import PIECE

_RAW_BYTES = 1 << 31  # of one measurement


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def raw_rate(files: Sequence[Path]) -> float:
    """Bytes/s of sequential direct reads, as many in flight as the ring has, and begun in the files' order.

    As in the ring they go into large pages: to small ones, whose every page is pinned for itself, the same reads
    take longer.
    """
    places = [(file, start) for file in files for start in range(0, file.stat().st_size // PIECE * PIECE, PIECE)]
    places = places[: _RAW_BYTES // PIECE]
    opened = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}
    left: SimpleQueue[tuple[Path, int] | None] = SimpleQueue()
    for place in (*places, *[None] * THREADS):
        left.put(place)

    def read(buffer: memoryview) -> None:
        while (place := left.get()) is not None:
            os.preadv(opened[place[0]], [buffer], place[1])

    whole = memoryview(aligned_buffer((THREADS + 2) * PIECE))
    parts = [whole[number * PIECE : (number + 1) * PIECE] for number in range(1, THREADS + 1)]
    threads = [Thread(target=read, args=(part,)) for part in parts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    for descriptor in opened.values():
        os.close(descriptor)
    return len(places) * PIECE / seconds


def drop_pages(files: Sequence[Path]) -> None:
    """From the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def peak_memory() -> int:
    """Of this process, bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def accelerate_model(target: Path, resident: int, folder: str) -> tuple[Any, int]:
    """The model as accelerate keeps it, with its layers from `resident` on on the disk, and the bytes of these.

    Args:
        folder: for what accelerate writes.
    """
    config = json.loads((target / "config.json").read_text())
    places: dict[str, str] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    for layer in range(config["num_hidden_layers"]):
        places[f"model.layers.{layer}"] = "cpu" if layer < resident else "disk"
    causal_lm: Any = AutoModelForCausalLM
    model = causal_lm.from_pretrained(target, dtype=torch.bfloat16, device_map=places, offload_folder=folder)
    return model, sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.is_meta)


def rounded_draft(folder: Path) -> Path:
    """The default model with its layers' matrices rounded to 4 bits, in ordinary numbers."""
    loaded = load_model(packaged_gguf(), dtype="bf16", device="cpu")
    for name, weight in loaded.model.named_parameters():
        if ".layers." in name and weight.dim() == 2:
            weight.data.copy_(rounded(weight.data).restored())
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder
