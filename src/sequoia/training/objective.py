"""What a head is trained for: the target's distributions along its texts, steps ahead on the head's own outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sequoia.training.head_module import HeadModule, Seen
from sequoia.training.texts import Shard

_FADING = 0.8  # weight of each further step, as rounds come to it less often


@dataclass(frozen=True)
class Agreement:
    """How a step's distributions compare with the target's, which are limited to the draft vocabulary."""

    loss: float  # cross entropy
    greedy: float  # share of tokens where the most probable ones are the same: acceptance at temperature 0
    overlap: float  # mean common mass: acceptance at temperature 1


class Objective(nn.Module):
    """Chains of steps from every token of every text.

    Args:
        head: what is trained.
        embedding: [vocab, size] the target's, frozen.
        rows: [draft vocab, size] of the target's output layer, frozen.

    The last feature of a shard is what the target's output rows take.
    """

    def __init__(self, head: HeadModule, embedding: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.head = head
        self.embedding: Tensor
        self.rows: Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, shard: Shard, depth: int) -> Tensor:
        """The loss: cross entropy with the target's distributions, weighted over `depth` steps."""
        weights = [_FADING**step for step in range(depth)]
        losses = [_cross_entropy(logits, goal) for logits, goal in self._steps(shard, depth)]
        return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)

    @torch.no_grad()
    def agreement(self, shard: Shard, depth: int) -> list[Agreement]:
        """Step by step."""
        found = []
        for logits, goal in self._steps(shard, depth):
            same = (logits.argmax(-1) == goal.argmax(-1)).float().mean()
            common = torch.minimum(logits.float().softmax(-1), goal).sum(-1).mean()
            found.append(Agreement(_cross_entropy(logits, goal).item(), same.item(), common.item()))
        return found

    def _steps(self, shard: Shard, depth: int) -> list[tuple[Tensor, Tensor]]:
        """For each step the head's logits and the target's distribution, [chains, draft vocab] both."""
        tokens, positions = shard.tokens.long(), shard.positions.long()
        texts = (positions == 0).cumsum(1)
        visible = (texts[:, :, None] == texts[:, None]).tril()
        with torch.no_grad():
            wanted = functional.linear(shard.features[:, :, -1].to(self.rows.dtype), self.rows)
            goals = wanted.softmax(-1, torch.float32).to(self.rows.dtype)
        seen, steps = Seen(visible), []
        feature = self.head.fused(shard.features)
        for step in range(1, depth + 1):
            inside = _ahead(texts, step) == texts
            inside[:, -step:] = False
            inside &= ~shard.leads
            feature = self.head.step(feature, self.embedding[_ahead(tokens, step)], positions + step - 1, seen)
            outputs = self.head.outputs(feature)[inside]
            steps.append((functional.linear(outputs, self.rows), _ahead(goals, step)[inside]))
        return steps


class _CrossEntropy(torch.autograd.Function):
    """Mean over rows of [rows, vocab] logits and the distributions they should give; in few passes over them."""

    @staticmethod
    def forward(context: Any, logits: Tensor, goal: Tensor) -> Tensor:
        wide = logits.float()
        total = wide.logsumexp(-1, keepdim=True)
        loss = (total - (wide * goal).sum(-1, keepdim=True)).mean()
        slope = wide.sub_(total) if wide is not logits else wide - total
        context.save_for_backward(slope.exp_().sub_(goal).mul_(1 / len(logits)).to(logits.dtype))
        return loss

    @staticmethod
    def backward(context: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (slope,) = context.saved_tensors
        return slope * slopes[0], None


_cross_entropy: Callable[[Tensor, Tensor], Tensor] = _CrossEntropy.apply


def _ahead(rows: Tensor, step: int) -> Tensor:
    """[texts, tokens, …] those `step` tokens later; the last ones are wrong and must not be used."""
    return rows.roll(-step, dims=1)
