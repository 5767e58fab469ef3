"""A pair whose draft and whose clock follow a script, and plans for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sequoia.engine import Engine, load
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.token_tree import TokenTree
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option, Prediction, kind_of
from sequoia.tree.plan import Plan, PlanFile
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

VOCAB = 32
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FREE = {"max_tokens": 200, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **FREE)

TREE = TreeShape((-1, 0, 0, 1, 1, 3, 3, 5))  # 8 nodes, depth 4
CHAIN = TreeShape.chain(3)
OFF = TreeShape.root_only()
PASS_SECONDS = {1: 0.020, 4: 0.024, 8: 0.028, 64: 0.084}


class Clock:
    """Moves on by what the target's passes are scripted to take, and by nothing else."""

    def __init__(self, base: float = 0.019, row: float = 0.001) -> None:
        self.now = 0.0
        self.base, self.row = base, row

    def __call__(self) -> float:
        return self.now

    def passed(self, rows: int) -> None:
        self.now += self.base + self.row * rows


class ScriptedDraft:
    """Proposes the script's tokens up to `useful` of them, and afterwards nothing that is right."""

    proposable = VOCAB
    context_length: int | None = None

    def __init__(self, script: Sequence[int] = (), useful: int = 10**6) -> None:
        self.script, self.useful = list(script), useful

    def start(self) -> ScriptedDraft:
        return self

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        start = len(tokens) - len(PROMPT)

        def level_logits(frontier: Frontier) -> Tensor:
            return torch.stack([self._logits(start + len(path)) for path in frontier.paths()])

        return growth.run(tokens[-1], torch.arange(VOCAB), level_logits)

    def keep(self, path: Sequence[int]) -> None:
        pass

    def _logits(self, place: int) -> Tensor:
        logits = torch.linspace(1.0, 0.0, VOCAB)
        if place < len(self.script):
            logits[self.script[place]] = 9.0 if place < self.useful else -9.0
        return logits


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=1024, **sizes)).eval()


def option(shape: TreeShape, tokens: float, seconds: float) -> Option:
    return Option(kind_of(shape), shape, Prediction(tokens, 0.05, seconds, 0.001))


OPTIONS = (option(OFF, 1.0, 0.020), option(CHAIN, 2.5, 0.024), option(TREE, 3.5, 0.028))
PROFILE = AcceptanceProfile([[0.7, 0.1]])
LATENCY = LatencyProfile(
    {64: {rows: Timing(seconds, 0.0) for rows, seconds in PASS_SECONDS.items()}},
    {1: Timing(0.0, 0.0), 64: Timing(0.0, 0.0)},
    {},
)


def plan(options: Sequence[Option] = OPTIONS, **params: Any) -> Plan:
    return Plan({"temperature": 0.0} | params, PROFILE, tuple(options))


def plan_file(pair: Mapping[str, Any], *plans: Plan, **fields: Any) -> PlanFile:
    return PlanFile(pair, {}, {"date": "2020-02-29"}, LATENCY, plans or (plan(),), **fields)


def engine(draft: Any = None, file: PlanFile | None = None, clock: Clock | None = None, **arguments: Any) -> Engine:
    """The pair, by default with a plan."""
    model, draft = tiny(), draft or ScriptedDraft()
    if file is None and "tree" not in arguments:
        file = plan_file(load(model, draft, "off", device="cpu").pair)
    loaded = load(model, draft, device="cpu", plan=file, **arguments)
    if clock is not None:
        loaded.clock = clock
        loaded.target.on_pass.append(clock.passed)
    return loaded


def plain_answer(params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return engine(tree="off").generate(PROMPT, params).token_ids
