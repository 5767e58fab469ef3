"""What a head is trained for."""

from __future__ import annotations

import pytest
import torch
from tiny_training import VOCAB, tiny_target
from torch.nn import functional

from sequoia.training.beginning import head_config, last_layer
from sequoia.training.head_module import HeadModule, Seen
from sequoia.training.objective import Objective, _cross_entropy
from sequoia.training.texts import Shard

_IDS = torch.arange(4, 44)


def _objective() -> Objective:
    target = tiny_target()
    head = HeadModule(head_config(target, (1, 2, 3), len(_IDS)))
    head.begin(last_layer(target), seed=0)
    every = torch.arange(VOCAB)
    return Objective(head, target.ends.embed(every).detach(), target.ends.head_weight()[_IDS].detach())


def _shard(seed: int = 0) -> Shard:
    """Two rows: texts of 5, 7 and 4 tokens, and one of 16; the first 2 tokens of each are its lead."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([[*range(5), *range(7), *range(4)], [*range(16)]], dtype=torch.int32)
    tokens = torch.randint(VOCAB, (2, 16), generator=generator, dtype=torch.int32)
    return Shard(tokens, positions, positions < 2, torch.randn(2, 16, 3, 16, generator=generator))


def test_cross_entropy_and_its_slope_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, 9, generator=generator)).requires_grad_()
    goal = torch.rand(6, 9, generator=generator).softmax(-1)
    found = _cross_entropy(logits, goal)
    expected = functional.cross_entropy(logits, goal)
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(2 * loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*slopes)


def test_each_chain_is_what_it_would_be_alone() -> None:
    """A chain from one token of one text, run by itself over that text alone, gives the same logits and goals."""
    objective, shard = _objective(), _shard()
    steps = objective._steps(shard, depth=3)
    starts = {0: (0, 0), 5: (0, 5), 12: (0, 12), 16: (1, 0)}  # of the texts, on end: (row, place)
    ends = {0: 5, 5: 12, 12: 16, 16: 32}
    for step, (logits, goals) in enumerate(steps, start=1):
        row = 0
        for begin, (line, place) in starts.items():
            length = ends[begin] - begin
            for chain in range(2, length - step):  # after the lead, with the goal's token inside
                end = place + chain
                feature = objective.head.fused(shard.features[line : line + 1, place : end + 1])
                seen = Seen(torch.ones(1, chain + 1, chain + 1, dtype=torch.bool).tril())
                positions = torch.arange(chain + 1)[None]
                for ahead in range(1, step + 1):
                    tokens = shard.tokens[line, place + ahead : end + ahead + 1].long()
                    feature = objective.head.step(
                        feature, objective.embedding[tokens][None], positions + ahead - 1, seen
                    )
                alone = objective.head.outputs(feature)[0, -1] @ objective.rows.T
                torch.testing.assert_close(logits[row], alone, rtol=1e-4, atol=1e-4)
                wanted = (shard.features[line, end + step, -1] @ objective.rows.T).softmax(-1)
                torch.testing.assert_close(goals[row], wanted)
                row += 1
        assert row == len(logits) == len(goals) > 0


def test_a_head_that_says_what_the_target_says_agrees_wholly() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    class Perfect(Objective):
        def _steps(self, shard: Shard, depth: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(logits, logits.softmax(-1))] * depth

    objective = _objective()
    found = Perfect(objective.head, objective.embedding, objective.rows).agreement(_shard(), 2)
    assert [(each.greedy, each.overlap) for each in found] == [(1.0, pytest.approx(1.0))] * 2
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    assert found[0].loss == pytest.approx(entropy.item(), rel=1e-5)
