"""What a tree or a plan comes to in engines that take numbers only, as text to paste."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from sequoia.errors import UsageError
from sequoia.tree.latency import level_widths
from sequoia.tree.option import Option, fastest
from sequoia.tree.plan import Plan, PlanFile
from sequoia.tree.shape import TreeShape

ENGINES = ("sglang", "trtllm", "vllm")
"""Who can be advised: SGLang, TensorRT-LLM, vLLM."""

_OWN_TREE = "The engine grows its own tree in each round; these are the least numbers that leave room for this one."


@dataclass(frozen=True)
class Advice:
    """What to give an engine, and what to know about it."""

    text: str
    """Ready to paste; empty where plain decoding is the advice."""
    notes: tuple[str, ...]


def advise_tree(engine: str, shape: TreeShape) -> Advice:
    """Advice for a tree.

    Raises:
        UsageError: vLLM is asked for a tree with branches, which it does not draft; or there is no such engine.
    """
    if engine == "vllm":
        if shape.max_children > 1:
            raise UsageError("vLLM drafts chains only; this tree branches. Give a plan, or a chain such as chain:4.")
        return _vllm({1: shape.depth})
    if engine not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}.")
    if shape.size == 1:
        return _plain()
    return _sglang(shape) if engine == "sglang" else _trtllm(shape)


def advise_plan(engine: str, plan_file: PlanFile, plan: Plan) -> Advice:
    """Advice for one of a file's plans: its chosen shape; for vLLM its best chain, and one for each batch size.

    Raises:
        UsageError: there is no such engine.
    """
    if engine != "vllm":
        return advise_tree(engine, plan.chosen.shape)
    lengths = {1: _chain_length(plan.options)}
    return _vllm(lengths | {option.batch: _chain_length(option.options) for option in plan_file.batch})


def batch_table(lengths: Mapping[int, int]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first batch size, last batch size, draft tokens], from 1 on.

    `lengths` holds draft tokens by batch size, size 1 among them. Sizes between two of these get what the larger one
    gets: too short a draft costs less than too long a one. Neighbours with equal drafts are one range.
    """
    table: list[list[int]] = []
    for batch, length in sorted(lengths.items()):
        if table and table[-1][2] == length:
            table[-1][1] = batch
        else:
            table.append([table[-1][1] + 1 if table else 1, batch, length])
    return table


def _chain_length(options: tuple[Option, ...]) -> int:
    """Draft tokens of the faster of plain decoding and the best chain."""
    return fastest([option for option in options if option.kind != "tree"]).shape.depth


def _sglang(shape: TreeShape) -> Advice:
    # A round continues the best `topk` nodes of each level with `topk` children each; draft tokens count the root.
    numbers = {"num-steps": shape.depth, "eagle-topk": _topk(shape), "num-draft-tokens": shape.size}
    text = " ".join(f"--speculative-{name} {number}" for name, number in numbers.items())
    notes = ["Add --speculative-algorithm and --speculative-draft-model-path."]
    if _topk(shape) > 1:
        notes += [_OWN_TREE, "Not every attention backend and page size takes a topk above 1."]
    return Advice(text, tuple(notes))


def _trtllm(shape: TreeShape) -> Advice:
    # Draft tokens leave out the root, and must be at most topK for each level.
    lines = ["speculative_config:", "  decoding_type: Eagle3", f"  max_draft_len: {shape.depth}"]
    notes = ["Add speculative_model; give the file with --config."]
    if shape.max_children > 1:
        drafted = shape.size - 1
        lines += [
            "  use_dynamic_tree: true",
            f"  dynamic_tree_max_topK: {max(_topk(shape), math.ceil(drafted / shape.depth))}",
            f"  max_total_draft_tokens: {drafted}",
        ]
        notes += [_OWN_TREE, "Dynamic trees are refused for models with sliding windows or latent attention (MLA)."]
    return Advice("\n".join(lines), tuple(notes))


def _vllm(lengths: Mapping[int, int]) -> Advice:
    most = max(lengths.values())
    if most == 0:
        return _plain()
    config: dict[str, object] = {"num_speculative_tokens": most}
    notes = ["Add method and model; give it with --speculative-config."]
    if len(lengths) > 1:
        config["num_speculative_tokens_per_batch_size"] = batch_table(lengths)
        notes.append(f"Past {max(lengths)} requests at once vLLM goes on with the last range.")
    return Advice(json.dumps(config), tuple(notes))


def _topk(shape: TreeShape) -> int:
    """Children of a node and continued nodes of a level, whichever is more."""
    return max(shape.max_children, *level_widths(shape))


def _plain() -> Advice:
    return Advice("", ("This is plain decoding: leave speculation off.",))
