"""Advice for other engines: their numbers, and the text to paste."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequoia.errors import UsageError
from sequoia.tree.advice import advise_plan, advise_tree, batch_table
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.plan import PAIR_KEYS, BatchOption, Option, Plan, PlanFile, Prediction
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

TREE = TreeShape([-1, 0, 0, 0, 1, 1, 2, 4])  # levels 1 3 3 1; 1, 2 and 1 nodes are continued


def options(off: float, chain: tuple[int, float], tree: float) -> tuple[Option, ...]:
    """One of each kind with these seconds per token."""
    shapes = {"off": TreeShape.root_only(), "chain": TreeShape.chain(chain[0]), "tree": TREE}
    seconds = {"off": off, "chain": chain[1], "tree": tree}
    return tuple(Option(kind, shapes[kind], Prediction(1.0, 0.0, seconds[kind], 0.0)) for kind in shapes)


def plan_file(*plans: Plan, batch: tuple[BatchOption, ...] = ()) -> PlanFile:
    latency = LatencyProfile({128: {1: Timing(1.0, 0.0), 8: Timing(2.0, 0.0)}}, {1: Timing(0.1, 0.0)}, {}, {})
    return PlanFile(dict.fromkeys(PAIR_KEYS, "x"), {}, {}, latency, plans, batch)


def plan(*arguments: object) -> Plan:
    return Plan({"temperature": 0.0}, AcceptanceProfile([[0.5, 0.2]]), options(*arguments))


def numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"--speculative-([a-z-]+) (\d+)", text)}


def grown(steps: int, topk: int, draft_tokens: int, shape: TreeShape) -> bool:
    """Whether an EAGLE-2 tree of these numbers can be `shape`: topk nodes a level go on, each with topk children."""
    inner = [sum(bool(shape.children(node)) for node in level) for level in shape.levels]
    return shape.depth <= steps and shape.max_children <= topk and max(inner) <= topk and shape.size <= draft_tokens


def test_sglang_takes_three_flags():
    advice = advise_tree("sglang", TREE)
    assert advice.text == ("--speculative-num-steps 3 --speculative-eagle-topk 3 --speculative-num-draft-tokens 8")
    assert any("own tree" in line for line in advice.notes)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_chain_is_a_chain_everywhere(depth):
    chain = TreeShape.chain(depth)
    # With topk 1 SGLang insists on one more draft token than steps.
    assert numbers(advise_tree("sglang", chain).text) == {
        "num-steps": depth,
        "eagle-topk": 1,
        "num-draft-tokens": depth + 1,
    }
    assert advise_tree("trtllm", chain).text.splitlines() == [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {depth}",
    ]
    assert json.loads(advise_tree("vllm", chain).text) == {"num_speculative_tokens": depth}


@given(st.data())
def test_the_numbers_are_the_least_that_hold_the_tree(data):
    size = data.draw(st.integers(2, 30))
    shape = TreeShape([-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, size))])
    flags = numbers(advise_tree("sglang", shape).text)
    steps, topk, tokens = flags["num-steps"], flags["eagle-topk"], flags["num-draft-tokens"]
    assert grown(steps, topk, tokens, shape)
    assert not grown(steps - 1, topk, tokens, shape)
    assert not grown(steps, topk - 1, tokens, shape)
    assert not grown(steps, topk, tokens - 1, shape)
    if shape.max_children > 1:
        fields = dict(line.split(": ") for line in advise_tree("trtllm", shape).text.splitlines()[1:])
        fields = {name.strip(): value for name, value in fields.items()}
        most, drafted = int(fields["dynamic_tree_max_topK"]), int(fields["max_total_draft_tokens"])
        assert fields["use_dynamic_tree"] == "true"
        assert grown(int(fields["max_draft_len"]), most, 1 + drafted, shape)
        assert shape.depth <= drafted <= most * shape.depth  # else TensorRT-LLM refuses them
        assert most in (topk, -(-drafted // shape.depth))


def test_trtllm_takes_fields():
    assert advise_tree("trtllm", TREE).text.splitlines() == [
        "speculative_config:",
        "  decoding_type: Eagle3",
        "  max_draft_len: 3",
        "  use_dynamic_tree: true",
        "  dynamic_tree_max_topK: 3",
        "  max_total_draft_tokens: 7",
    ]


def test_plain_decoding_is_no_flags():
    for engine in ("sglang", "trtllm", "vllm"):
        assert advise_tree(engine, TreeShape.root_only()).text == ""
        assert advise_plan(engine, plan_file(plan(1.0, (2, 2.0), 3.0)), plan(1.0, (2, 2.0), 3.0)).text == ""


def test_vllm_takes_no_branches_and_others_are_unknown():
    with pytest.raises(UsageError, match="vLLM drafts chains only"):
        advise_tree("vllm", TREE)
    with pytest.raises(UsageError, match="engine must be one of sglang, trtllm, vllm, not 'exllama'"):
        advise_tree("exllama", TREE)


def test_plans_give_their_chosen_shape_and_vllm_their_best_chain():
    made = plan(3.0, (4, 2.0), 1.0)
    assert advise_plan("sglang", plan_file(made), made) == advise_tree("sglang", TREE)
    assert advise_plan("trtllm", plan_file(made), made) == advise_tree("trtllm", TREE)
    assert json.loads(advise_plan("vllm", plan_file(made), made).text) == {"num_speculative_tokens": 4}


def test_vllm_takes_a_table_by_batch_size():
    batch = (
        BatchOption(16, options(1.0, (1, 2.0), 0.5), False),  # the tree would pay, but no chain does
        BatchOption(4, options(2.0, (2, 1.0), 0.5), False),
        BatchOption(8, options(2.0, (2, 1.0), 3.0), False),
    )
    made = plan(3.0, (4, 2.0), 1.0)
    advice = advise_plan("vllm", plan_file(made, batch=batch), made)
    assert json.loads(advice.text) == {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 2], [9, 16, 0]],
    }
    assert any("Past 16 requests" in line for line in advice.notes)


@given(st.dictionaries(st.integers(2, 200), st.integers(0, 6), max_size=6), st.integers(0, 6))
def test_tables_start_at_one_have_no_gaps_and_say_what_was_planned(planned, first):
    lengths = {1: first} | planned
    table = batch_table(lengths)
    assert table[0][0] == 1
    assert table[-1][1] == max(lengths)
    for (_, end, length), (start, _, after) in pairwise(table):
        assert start == end + 1
        assert length != after
    for batch, length in lengths.items():
        assert [row[2] for row in table if row[0] <= batch <= row[1]] == [length]
