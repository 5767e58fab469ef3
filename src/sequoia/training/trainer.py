"""Training a head on shards of texts: steps, checkpoints, and how well it agrees with the target meanwhile."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from sequoia.errors import FileError
from sequoia.training.objective import Agreement, Objective
from sequoia.training.settings import TrainSettings
from sequoia.training.shards import ShardFile
from sequoia.training.texts import Shard
from sequoia.tree.records import save_bytes

_LOOKS = 12  # at the held-out texts, evenly spread over a training
_SHALLOW = 0.5  # of the training, in which chains have one step
_WARM_UP = 50  # steps
_LOWEST = 0.03  # of the learning rate, at the end
_CHECKPOINT_SECONDS = 120.0
_HELD_ROWS = 16
_DECAY, _MOMENTUM, _BETAS, _LARGEST_GRADIENT = 0.01, 0.95, (0.9, 0.95), 1.0
_NORM_RATE = 1e-3


@dataclass(frozen=True)
class Look:
    """At the held-out texts, after so many steps."""

    step: int
    agreements: tuple[Agreement, ...]


@dataclass
class State:
    """How far a training is."""

    step: int = 0
    seconds: float = 0.0
    looks: tuple[Look, ...] = ()


class Trainer:
    """Trains `objective.head`.

    Args:
        accelerator: accelerate's, which knows of devices, processes and number formats.
        held, train: shards.
        checkpoint: file that training goes on from, where it is there.
        on_look: told of each look, once a checkpoint of it is saved.
        on_step: told of steps done, steps in all, the smoothed loss, and tokens per second.
    """

    def __init__(
        self,
        accelerator: Any,
        objective: Objective,
        held: ShardFile,
        train: Sequence[ShardFile],
        settings: TrainSettings,
        checkpoint: Path,
        on_look: Callable[[Look], None],
        on_step: Callable[[int, int, float, float], None],
    ) -> None:
        self._accelerator, self._settings, self._held, self._train = accelerator, settings, held, train
        self._checkpoint, self._on_look, self._on_step = checkpoint, on_look, on_step
        self._objective = objective.to(accelerator.device)
        self._model, *self._optimizers = accelerator.prepare(objective, *_optimizers(objective, settings))
        per_epoch = len(train) * -(-settings.rows // settings.batch)
        self.steps: int = settings.epochs * -(-per_epoch // accelerator.num_processes)
        self.state = State()

    def run(self) -> State:
        """Train to the end.

        Raises:
            FileError: a shard or the checkpoint cannot be read or written.
        """
        self._restore()
        started, before = time.monotonic(), self.state.seconds
        saved, smooth = started, _Smooth()
        if not self.state.looks:
            self._look()
        for shard in self._batches():
            share = self._share()
            if share >= 1:
                break
            smooth.add(self._train_on(shard, share), shard.tokens.numel() * self._accelerator.num_processes)
            self.state.step += 1
            self.state.seconds = before + time.monotonic() - started
            self._on_step(self.state.step, self.steps, smooth.loss, smooth.speed)
            if self.state.step % max(1, self.steps // _LOOKS) == 0:
                self._look()
                saved = time.monotonic()
            elif time.monotonic() - saved > _CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()
        if self.state.looks[-1].step != self.state.step:
            self._look()
        return self.state

    def _share(self) -> float:
        """Of the training that is done."""
        return max(self.state.step / self.steps, self.state.seconds / self._settings.training_seconds)

    def _train_on(self, shard: Shard, share: float) -> float:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * self._slowed(share)
        with self._accelerator.autocast():
            loss = self._model(shard, 1 if share < _SHALLOW else self._settings.depth)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._model.parameters(), _LARGEST_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach())

    def _slowed(self, share: float) -> float:
        """What learning rates are multiplied by: up in a few steps, and down along a cosine."""
        falling = _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * share))
        return float(min(1.0, (self.state.step + 1) / _WARM_UP) * falling)

    def _batches(self) -> Iterator[Shard]:
        """What is left for this process, shuffled anew in each epoch."""
        places = [
            (file, start) for file in self._train for start in range(0, self._settings.rows, self._settings.batch)
        ]
        count, own, step = self._accelerator.num_processes, self._accelerator.process_index, 0
        for epoch in range(self._settings.epochs):
            Random(f"{self._settings.seed} {epoch}").shuffle(order := list(places))
            order += order[: -len(order) % count]  # every process has as many steps
            for file, start in order[own::count]:
                step += 1
                if step > self.state.step:
                    yield self._placed(file.read(start, start + self._settings.batch))

    def _placed(self, shard: Shard) -> Shard:
        return shard.to(self._accelerator.device)

    def _look(self) -> None:
        """Hold the head against the target on texts it is not trained on, and save all there is."""
        shards = [
            self._placed(self._held.read(start, start + self._settings.batch))
            for start in range(0, min(_HELD_ROWS, self._settings.rows), self._settings.batch)
        ]
        with self._accelerator.autocast():
            found = [self._objective.agreement(shard, self._settings.depth) for shard in shards]
        look = Look(self.state.step, tuple(map(_mean, zip(*found, strict=True))))
        self.state.looks = (*self.state.looks, look)
        self._save()
        self._on_look(look)

    def _save(self) -> None:
        if not self._accelerator.is_main_process:
            return
        buffer = io.BytesIO()
        looks = [[look.step, [list(asdict(each).values()) for each in look.agreements]] for look in self.state.looks]
        record = {
            "head": self._objective.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.state.step,
            "seconds": self.state.seconds,
            "looks": looks,
        }
        torch.save(record, buffer)
        save_bytes(self._checkpoint, buffer.getvalue())

    def _restore(self) -> None:
        if not self._checkpoint.is_file():
            return
        try:
            record = torch.load(self._checkpoint, map_location=self._accelerator.device, weights_only=True)
            self._objective.head.load_state_dict(record["head"])
            for optimizer, state in zip(self._optimizers, record["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            looks = tuple(
                Look(step, tuple(Agreement(*each) for each in agreements)) for step, agreements in record["looks"]
            )
        except Exception as error:  # a damaged file makes torch and pickle raise nearly anything
            reason = f"{type(error).__name__}: {error}"
            raise FileError(
                f"{self._checkpoint} is damaged ({reason:.200}). Delete it, and the training starts anew on the same "
                "texts."
            ) from error
        self.state = State(record["step"], record["seconds"], looks)


class _Smooth:
    """Loss and speed of the last steps."""

    def __init__(self) -> None:
        self.loss, self.speed = math.nan, 0.0
        self._time = time.monotonic()

    def add(self, loss: float, tokens: int) -> None:
        now = time.monotonic()
        speed, self._time = tokens / max(now - self._time, 1e-9), now
        first = math.isnan(self.loss)
        self.loss = loss if first else 0.95 * self.loss + 0.05 * loss
        self.speed = speed if first else 0.9 * self.speed + 0.1 * speed


def _optimizers(objective: Objective, settings: TrainSettings) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for matrices, which takes fewer steps than AdamW, and AdamW for norms.

    Source: Jordan et al. 2024, Muon; its rate is scaled to AdamW's as in Liu et al. 2025 (arXiv:2502.16982).
    """
    parameters = list(objective.head.parameters())
    matrices = [each for each in parameters if each.dim() == 2]
    norms = [each for each in parameters if each.dim() != 2]
    muon = torch.optim.Muon(
        matrices, lr=settings.learning_rate, weight_decay=_DECAY, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(norms, lr=_NORM_RATE, betas=_BETAS, weight_decay=0.0)


def _mean(agreements: Sequence[Agreement]) -> Agreement:
    values = zip(*(asdict(each).values() for each in agreements), strict=True)
    return Agreement(*(sum(column) / len(agreements) for column in values))
