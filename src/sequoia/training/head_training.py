"""From a target to a head for it: texts are written, then trained on, and the head is saved with its card."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from sequoia.draft.head_files import CONFIG, WEIGHTS
from sequoia.errors import UsageError
from sequoia.measure.lock import locked
from sequoia.measure.prompts import PromptRecord
from sequoia.model.causal_lm import CausalLM
from sequoia.training.beginning import as_record, head_config, last_layer
from sequoia.training.card import card, describe
from sequoia.training.frame import Openings
from sequoia.training.head_module import HeadModule
from sequoia.training.objective import Objective
from sequoia.training.settings import TrainSettings
from sequoia.training.shards import ShardFile
from sequoia.training.texts import write_shard
from sequoia.training.trainer import Look, State, Trainer
from sequoia.tree.records import load_record, save_bytes, save_record

_TAPPED = (0.14, 0.4, 0.7)  # of the target's layers, after which features are taken
Progress = Callable[[str, int, int, str], None]
"""Told of a part, how much is done, of how much, and what there is to say of it."""


@dataclass(frozen=True)
class Sources:
    """What texts begin with, and what people call it; nothing for the built-in openings."""

    names: Sequence[str]
    openings: Openings

    @classmethod
    def of(cls, target: CausalLM, names: Sequence[str], records: Sequence[PromptRecord] | None, length: int) -> Sources:
        """The built-in openings, or prompts where they are given.

        Args:
            length: tokens of a row of texts.

        Raises:
            UsageError: the target has no tokenizer, or all prompts are too long.
        """
        tokenizer = target.loaded.tokenizer
        if records is None:
            return cls((), Openings.built_in(tokenizer))
        return cls(names, Openings.given(records, tokenizer, target.vocab_size, length))


def train_head(
    target: CausalLM,
    folder: Path,
    settings: TrainSettings,
    sources: Sources,
    *,
    resume: bool,
    accelerator: Any,
    progress: Progress,
) -> State:
    """Train one, or go on with it.

    Args:
        folder: holds the head afterwards, as `sequoia.load(draft=folder)` takes it, and what is kept of the training
            in a folder of its own.
        accelerator: accelerate's.

    Raises:
        UsageError: the folder holds another training, or none to go on with.
        ModelError: the target has no lean decoder.
        FileError: something cannot be read or written.
    """
    with locked(folder, "Wait for it.") if accelerator.is_main_process else nullcontext():
        training = _Training(target, folder, settings, sources, accelerator, progress)
        if accelerator.is_main_process:
            training.claim(resume)
        accelerator.wait_for_everyone()
        return training.run()


class _Training:
    def __init__(
        self,
        target: CausalLM,
        folder: Path,
        settings: TrainSettings,
        sources: Sources,
        accelerator: Any,
        progress: Progress,
    ) -> None:
        self._target, self._folder, self._settings = target, folder, settings
        self._sources, self._accelerator, self._progress = sources, accelerator, progress
        self._kept = folder / "training"
        layers = target.layer_count
        # The last one is what the output layer takes: the target's distributions come from it.
        self._taps = (*sorted({max(1, round(layers * share)) for share in _TAPPED}), layers + 1)
        per_token = len(self._taps) * target.hidden_size * target.loaded.dtype.itemsize
        self._shards = settings.shards(per_token)

    def claim(self, resume: bool) -> None:
        """Make sure that the folder is this training's, and that going on is what is wanted."""
        about = {
            "target": self._target.loaded.name,
            "prompts": list(self._sources.names),
            **{name: value for name, value in asdict(self._settings).items() if name != "disk"},
        }
        record = self._kept / "run.json"
        if not record.exists():
            if resume:
                raise UsageError(f"{self._folder} holds no training to go on with. Leave --resume out.")
            self._kept.mkdir(parents=True, exist_ok=True)
            save_record(record, about)
            return
        if not resume:
            raise UsageError(f"{self._folder} holds a training already. Go on with --resume, or choose another folder.")
        found = load_record(record, dict)
        if changed := sorted(key for key in about.keys() | found.keys() if about.get(key) != found.get(key)):
            name = changed[0]
            raise UsageError(
                f"the training in {self._folder} has {name} {found.get(name)!r}, not {about.get(name)!r}. Go on with "
                "the same options, or choose another folder."
            )

    def run(self) -> State:
        began = time.monotonic()
        held, *train = self._write(began)
        ids = self._frequent_ids(train)
        config = head_config(self._target, self._taps, len(ids))
        head = HeadModule(config)
        head.begin(last_layer(self._target), self._settings.seed)
        rows = self._target.ends.head_weight()[ids.to(self._target.device)].detach()
        every = torch.arange(self._target.vocab_size, device=self._target.device)
        objective = Objective(head, self._target.ends.embed(every).detach().float(), rows)

        def on_look(look: Look) -> None:
            if self._accelerator.is_main_process:
                self._save(head, ids, trainer)

        def seen() -> str:
            return describe(trainer.state.looks[-1])

        def on_step(step: int, steps: int, loss: float, speed: float) -> None:
            self._progress("training", step, steps, f"loss {loss:.3f} · {speed:.0f} tokens/s · {seen()}")

        trainer = Trainer(
            self._accelerator,
            objective,
            held,
            train,
            self._settings,
            self._kept / "checkpoint.pt",
            on_look,
            on_step,
        )
        return trainer.run()

    def _write(self, began: float) -> list[ShardFile]:
        """All shards; those that are there stay."""
        texts = self._kept / "texts"
        texts.mkdir(exist_ok=True)
        files = [ShardFile(texts / f"{number:04d}.safetensors") for number in range(self._shards)]
        tokens, done = self._settings.rows * self._settings.length, 0
        for number, file in enumerate(files):
            if number % self._accelerator.num_processes != self._accelerator.process_index or file.path.exists():
                continue
            if number >= 2 and time.monotonic() - began > self._settings.writing_seconds:
                break
            start = number * tokens

            def tick(count: int, start: int = start) -> None:
                nonlocal done
                done += count
                speed = done / (time.monotonic() - began)
                written = start + (done - 1) % tokens + 1
                self._progress("writing", written, self._shards * tokens, f"{speed:.0f} tokens/s")

            file.save(
                write_shard(
                    self._target,
                    self._sources.openings,
                    self._taps,
                    self._settings.rows,
                    self._settings.length,
                    f"{self._settings.seed}/{number}",
                    tick,
                )
            )
        self._accelerator.wait_for_everyone()
        return [file for file in files if file.path.exists()]

    def _frequent_ids(self, train: Sequence[ShardFile]) -> torch.Tensor:
        """The ids of the draft vocabulary, increasing."""
        counts = sum((file.token_counts(self._target.vocab_size) for file in train), torch.tensor(0))
        counts = counts[: self._target.loaded.token_count]
        most = min(self._settings.draft_vocab, int((counts > 0).sum()))
        return counts.argsort(descending=True, stable=True)[:most].sort().values

    def _save(self, head: HeadModule, ids: torch.Tensor, trainer: Trainer) -> None:
        """The head as it is now."""
        tensors = {
            name: value.to(self._target.loaded.dtype).cpu().contiguous() for name, value in head.tensors().items()
        }
        tensors["d2t"] = ids - torch.arange(len(ids))
        save_bytes(self._folder / WEIGHTS, save(tensors))
        save_record(self._folder / CONFIG, as_record(head.config))
        text = card(self._target.loaded.name, self._sources.names, self._settings, trainer.steps, trainer.state)
        save_bytes(self._folder / "README.md", text.encode("utf-8"))
