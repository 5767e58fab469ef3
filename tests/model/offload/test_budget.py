"""Budgets: sizes as people write them, what fits, what is refused, and what the smallest budget is worth."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from streamed import saved
from tiny_models import ids, tiny

import sequoia
from sequoia.errors import UsageError
from sequoia.model.offload.budget import PARTS, Needs, plan_memory
from sequoia.model.offload.request import OffloadRequest, parse_bytes
from sequoia.model.placement import Numbers, resident_bytes
from sequoia.params import SamplingParams

MIB = 2**20
NEEDS = Needs(
    libraries=400 * MIB,
    ends=100 * MIB,
    draft=0,
    context=4096,
    caches=50 * MIB,
    rows=20 * MIB,
    row=50_000,
    layer=10 * MIB,
    layers=30,
    read=20 * MIB,
    slot=10 * MIB,
    buffers=8 * MIB,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2**31), ("800 MiB", 800 * MIB), ("1.5gib", 3 * 2**29), ("500MB", 500_000_000), (12345, 12345), ("9", 9)],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "two", "2GiBs", "-1GiB", "0", "1.2.3GB", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="such as 2GiB or 800MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tape", None, None), "offload must be one of auto, disk, host, off"),
        (("off", "2GiB", None), "Leave one of the two out"),
        (("disk", None, 0), "context must be an integer of at least 1"),
    ],
)
def test_requests_that_make_no_sense(arguments: tuple[str, str | None, int | None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OffloadRequest.of(*arguments)


def test_what_cannot_be_streamed_there() -> None:
    with pytest.raises(UsageError, match="not as int8"):
        OffloadRequest("disk").check(Numbers(torch.bfloat16, bits=8), torch.device("cpu"))
    with pytest.raises(UsageError, match='"host" streams to a CUDA device, not to cpu'):
        OffloadRequest("host").check(Numbers(torch.bfloat16), torch.device("cpu"))


def test_all_that_fits_stays() -> None:
    plan = plan_memory(NEEDS, 2**30)
    assert (plan.resident, plan.streamed, plan.ring) == (30, 0, 0)
    assert plan.resident_layers == frozenset(range(30))


@pytest.mark.parametrize("mebibytes", range(650, 900, 7))
def test_parts_make_up_no_more_than_the_budget(mebibytes: int) -> None:
    plan = plan_memory(NEEDS, mebibytes * MIB)
    assert plan.total == sum(getattr(plan, part) for part in PARTS) <= plan.budget
    assert len(plan.resident_layers) == plan.resident < 30
    assert plan.slots >= 2
    assert plan.read == plan.streamed * NEEDS.read
    # Not even one more layer would have fitted, or prompts take the rest.
    assert plan.budget * 63 // 64 - plan.total < NEEDS.layer


@pytest.mark.parametrize("context", [100, 1024])
def test_no_memory_is_kept_for_prompts_longer_than_the_context(context: int) -> None:
    for mebibytes in range(650, 1100, 7):
        assert plan_memory(replace(NEEDS, context=context), mebibytes * MIB).prompt_rows <= context


def test_more_memory_never_means_fewer_layers() -> None:
    found = [plan_memory(NEEDS, mebibytes * MIB).resident for mebibytes in range(700, 1000, 5)]
    assert found == sorted(found)


def test_resident_layers_are_spread() -> None:
    plan = plan_memory(NEEDS, 800 * MIB)
    numbers = sorted(plan.resident_layers)
    gaps = {later - earlier for earlier, later in pairwise(numbers)}
    assert max(gaps) - min(gaps) <= 1


def test_a_budget_too_small_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(UsageError, match=r"Give --memory-budget \d+MiB, the smallest that works") as refused:
        plan_memory(NEEDS, 600 * MIB)
    (smallest,) = re.findall(r"budget (\d+)MiB", str(refused.value))
    assert plan_memory(NEEDS, int(smallest) * MIB).slots == 2
    with pytest.raises(UsageError):
        plan_memory(NEEDS, (int(smallest) - 2) * MIB)


def test_load_streams_within_a_budget_and_says_how_it_is_spent(tmp_path: Path) -> None:
    folder = saved(tiny("llama", {"num_hidden_layers": 4}), tmp_path, torch.bfloat16)
    expected = sequoia.load(folder, dtype="fp32", offload="off")
    assert expected.memory is None
    assert expected.pair["offload"] == "off"
    engine = sequoia.load(folder, dtype="fp32", offload="disk", memory_budget=resident_bytes() + 200 * MIB, context=64)
    assert engine.memory is not None
    assert engine.target.context_length == 64
    assert engine.pair["offload"].startswith("disk within ")
    params = SamplingParams(max_tokens=20, temperature=0.0)
    assert engine.generate(ids(20), params).token_ids == expected.generate(ids(20), params).token_ids


def test_auto_is_off_where_the_weights_fit(tmp_path: Path) -> None:
    folder = saved(tiny("llama"), tmp_path, torch.bfloat16)
    assert sequoia.load(folder).memory is None
    assert sequoia.load(folder, memory_budget="64GiB", context=50).memory is None
    assert sequoia.load(folder, context=50).target.context_length == 50


def test_objects_are_not_streamed() -> None:
    with pytest.raises(UsageError, match="Save it and give the folder"):
        sequoia.load(tiny("llama"), offload="disk")


_PEAK = """
import re, sys
import sequoia
from sequoia import SamplingParams
dtype, budget, draft, *trees = sys.argv[1:]
engine = sequoia.load(None, draft, trees[0], dtype=dtype, offload="disk", memory_budget=budget, context=1024)
prompt = [(7919 * place) % 40000 for place in range(990)]
for tree in trees:
    length = 30 if tree == trees[-1] else 6
    params = SamplingParams(max_tokens=length, temperature=1.0, seed=1, ignore_eos=True)
    engine.with_tree(tree).generate(prompt[-length * 33 :], params)
(peak,) = re.findall(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(int(peak) * 1024 / engine.memory.total, engine.memory.streamed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak that Linux tells")
@pytest.mark.parametrize(
    ("dtype", "budget", "draft", "trees"),
    [
        ("bf16", "700MiB", "ngram", ["optimal:32x6"]),
        ("fp32", "900MiB", "ngram", ["optimal:32x6"]),
        ("bf16", "800MiB", "auto", [f"optimal:{size}x8" for size in (256, 4, 64, 16, 128, 256)]),
    ],
)
def test_peak_memory_is_what_was_said(dtype: str, budget: str, draft: str, trees: list[str], smollm2: object) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, dtype, budget, draft, *trees],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    share, streamed = run.stdout.split()
    assert int(streamed) > 0
    assert 0.85 < float(share) < 1.05


def test_needs_are_told_part_by_part() -> None:
    with pytest.raises(UsageError, match=r"the libraries 400 MiB, embedding and head 100 MiB, the draft 7 MiB"):
        plan_memory(replace(NEEDS, draft=7 * MIB), 600 * MIB)
