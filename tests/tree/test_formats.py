"""Other tools' trees: what they hold, round trips, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequoia.errors import UsageError
from sequoia.tree.formats import WRITERS, choices, from_vector, growmap, read, read_shape, umbrella
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    """Any topology in any legal order."""
    size = draw(st.integers(1, 40))
    return TreeShape([-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))])


# The root's children are 1 and 2; 1 has 3 and 4; 3 has 5.
SHAPE = TreeShape([-1, 0, 0, 1, 1, 3])
GROWMAP: dict[str, Any] = {
    "roots": [[0], [1, 2], [3, 4], [5]],
    "branches": [[2], [2, 0], [1, 0], [0]],
    "Successors": [[1, 2], [3, 4], [], [5], [], []],
    "mask": [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ],
    "depth": [0, 1, 1, 2, 2, 3],
    "size": 6,
}
CHOICES = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """GROWMAP with another value at `path`."""
    record = json.loads(json.dumps(GROWMAP))
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


def test_what_the_formats_hold():
    assert umbrella(SHAPE) == GROWMAP
    assert choices(SHAPE) == CHOICES
    made = growmap(SHAPE)
    assert made["mask"].dtype == made["depth"].dtype == np.int64
    assert made["mask"].tolist() == GROWMAP["mask"]
    assert choices(TreeShape.root_only()) == []
    assert umbrella(TreeShape.root_only()) == {
        "roots": [[0]],
        "branches": [[0]],
        "Successors": [[]],
        "mask": [[1]],
        "depth": [0],
        "size": 1,
    }


@given(shapes())
def test_every_format_gives_the_tree_back(shape):
    for name, write in WRITERS.items():
        record = write(shape)
        assert read_shape(record).in_level_order() == shape.in_level_order()
        if name != "growmap":
            assert read_shape(json.loads(json.dumps(record))).in_level_order() == shape.in_level_order()


@given(st.data())
def test_a_choice_list_may_come_in_any_order(data):
    shape = data.draw(shapes())
    assert read_shape(data.draw(st.permutations(choices(shape)))) == shape.in_level_order()


@given(st.data())
def test_a_mask_that_is_wrong_in_one_entry_is_refused_by_name(data):
    made = growmap(data.draw(shapes()))
    row, column = (data.draw(st.integers(0, made["size"] - 1)) for _ in range(2))
    right = made["mask"][row, column]
    made["mask"][row, column] = 1 - right
    message = rf"^mask\[{row}\]\[{column}\] must be {right}, as Successors imply, not {1 - right}\.$"
    with pytest.raises(UsageError, match=message):
        read(made)


@pytest.mark.parametrize("dtype", [bool, np.float32, np.uint8])
def test_masks_of_any_number_are_read(dtype):
    assert read(growmap(SHAPE) | {"mask": np.array(GROWMAP["mask"], dtype=dtype)}) == SHAPE
    assert read(changed(["mask", 0], [True, False, 0.0, 0, 0, 0])) == SHAPE


def test_nodes_are_renumbered_where_siblings_are_out_of_order():
    record = changed(["Successors", 0], [2, 1])  # node 2 has rank 0
    assert read(record) == TreeShape([-1, 0, 0, 2, 2, 3])


def test_siblings_need_not_lie_side_by_side():
    # UMbreLLa's tool numbers a level by score. Node 1 has 4; node 2 has 3 and 5.
    mask = np.eye(6, dtype=np.int64)
    mask[:, 0] = mask[4, 1] = mask[3, 2] = mask[5, 2] = 1
    record = {
        "roots": [[0], [1, 2], [3, 4, 5]],
        "branches": [[2], [1, 2], [0, 0, 0]],
        "Successors": [[1, 2], [4], [3, 5], [], [], []],
        "mask": mask.tolist(),
        "depth": [0, 1, 1, 2, 2, 2],
        "size": 6,
    }
    assert read(record) == TreeShape([-1, 0, 0, 1, 2, 2])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["size"], 5, "Successors must have 5 entries, not 6"),
        (["size"], 0, "size must be an integer of at least 1, not 0"),
        (["size"], "6", "size must be an integer of at least 1, not '6'"),
        (["size"], 70_000, "more than 65,536 nodes"),
        (["Successors"], {}, "Successors must be a list, not {}"),
        (["Successors", 2], 4, r"Successors\[2\] must be a list, not 4"),
        (["Successors", 2], [6], r"Successors\[2\]\[0\] must be at most 5, the last node, not 6"),
        (["Successors", 2], [0], r"Successors\[2\]\[0\] must be an integer of at least 1, not 0"),
        (["Successors", 2], [1.5], r"Successors\[2\]\[0\] must be an integer"),
        (["Successors", 2], [True], r"Successors\[2\]\[0\] must be an integer"),
        (["Successors", 2], [5], r"Successors\[3\]\[0\] is 5, which is a child of node 2 already"),
        (["Successors", 1], [3, 3], r"Successors\[1\]\[1\] is 3, which is a child of node 1 already"),
        (["Successors", 3], [], "node 5 cannot be reached from the root"),
        (["Successors"], [[1, 2], [3], [], [5], [], [4]], "roots must have 5 entries, not 4"),
        (["Successors"], [[1, 2], [3, 4, 5], [], [], [], []], "roots must have 3 entries, not 4"),
        (["roots", 2], [3, 4, 5], r"roots\[2\] must have 2 entries, not 3"),
        (["Successors"], [[1, 2], [], [], [4], [5], [3]], "node 3 cannot be reached from the root"),
        (["roots"], [[0]], "roots must have 4 entries, not 1"),
        (["roots", 1], [2, 1], r"roots\[1\]\[0\] must be 1, as Successors imply, not 2"),
        (["roots", 3], 5, r"roots\[3\] must be a list, not 5"),
        (["branches", 2, 1], 1, r"branches\[2\]\[1\] must be 0, as Successors imply, not 1"),
        (["depth", 4], 3, r"depth\[4\] must be 2, as Successors imply, not 3"),
        (["depth", 4], None, r"depth\[4\] must be 2, as Successors imply, not None"),
        (["depth"], 3, "depth must be a list, not 3"),
        (["mask"], 1, "mask must be a list, not 1"),
        (["mask"], [[1]], "mask must have 6 entries, not 1"),
        (["mask", 2], [1, 0, 1], r"mask\[2\] must have 6 entries, not 3"),
        (["mask", 5, 2], 1, r"mask\[5\]\[2\] must be 0, as Successors imply, not 1"),
        (["mask", 5, 5], 0, r"mask\[5\]\[5\] must be 1, as Successors imply, not 0"),
        (["mask", 1, 0], "1", r"mask\[1\]\[0\] must be 1, as Successors imply, not '1'"),
        (["mask", 1, 0], float("nan"), r"mask\[1\]\[0\] must be 1, as Successors imply, not nan"),
        (["mask", 1, 0], [1], r"mask\[1\]\[0\] must be 1, as Successors imply, not \[1\]"),
        (["colour"], "red", "unknown key 'colour'"),
    ],
)
def test_growmaps_that_disagree_with_themselves_are_refused(path, value, message):
    with pytest.raises(UsageError, match=message):
        read(changed(path, value))


@pytest.mark.parametrize("key", sorted(GROWMAP))
def test_growmaps_need_every_key(key):
    with pytest.raises(UsageError, match=f"key '{key}' is missing"):
        read({name: value for name, value in GROWMAP.items() if name != key})


@pytest.mark.parametrize("shape", [(6,), (5, 6), (6, 5), (6, 6, 1), ()])
def test_masks_of_another_shape_are_refused(shape):
    with pytest.raises(UsageError, match="mask"):
        read(growmap(SHAPE) | {"mask": np.ones(shape, dtype=np.int64)})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([[0], [2]], r"choices\[1\] is \[2\], but its sibling \[1\] is missing: ranks have no gaps"),
        ([[1]], r"choices\[0\] is \[1\], but its sibling \[0\] is missing"),
        ([[0], [0, 0], [0, 2]], r"choices\[2\] is \[0, 2\], but its sibling \[0, 1\] is missing"),
        ([[0], [1, 0]], r"choices\[1\] is \[1, 0\], but its parent \[1\] is missing"),
        ([[0, 0]], r"choices\[0\] is \[0, 0\], but its parent \[0\] is missing"),
        ([[0], [1], [0]], r"choices\[2\] is \[0\], which is choices\[0\] already"),
        ([[0], []], r"choices\[1\] is empty. It stands for the root"),
        ([[0], 1], r"choices\[1\] must be a list, not 1"),
        ([[0], "0"], r"choices\[1\] must be a list, not '0'"),
        ([[0], [0.0]], r"choices\[1\]\[0\] must be an integer of at least 0, not 0.0"),
        ([[0], [True]], r"choices\[1\]\[0\] must be an integer of at least 0, not True"),
        ([[0], ["1"]], r"choices\[1\]\[0\] must be an integer"),
        ([[0], [-1]], r"choices\[1\]\[0\] must be an integer of at least 0, not -1"),
        ([[0], [[1]]], r"choices\[1\]\[0\] must be an integer"),
        ([[rank] for rank in range(65_536)], "more than 65,536 nodes"),
    ],
)
def test_choice_lists_that_are_no_tree_are_refused(record, message):
    with pytest.raises(UsageError, match=message):
        read(record)


def test_vectors_with_and_without_the_rejected_share():
    profile = from_vector([0, 0.5, 0.25, 0.25])
    assert profile.rates == ((0.5, 0.25),)
    assert profile.provenance["rejected"] == 0.25
    profile = from_vector([0.0, 0.5, 0.25])
    assert profile.rates == ((0.5, 0.25),)
    assert "rejected" not in profile.provenance
    assert from_vector([0, 1]).rates == ((1.0,),)
    assert from_vector([0, 1, 0]).rates == ((1.0,),)
    assert from_vector([0, 0]).rates == ((0.0,),)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=64).filter(any))
def test_vectors_counted_in_32_bit_are_read(counts):
    shares = np.array([0, *counts], dtype=np.float32) / np.float32(sum(counts))
    row = from_vector(shares).rates[0]
    assert row == pytest.approx(np.array(counts[:-1]) / sum(counts), abs=1e-6)


def test_vectors_rounded_by_hand_keep_their_rejected_share_out():
    assert from_vector([0, 0.333, 0.333, 0.333]).rates == ((0.333, 0.333),)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([0], "a 0 and then a rate for each rank"),
        ([0.5, 0.25], "a 0 and then a rate for each rank"),
        ([0, 0.5, float("nan")], "entry 2 of an acceptance vector must be a number from 0 to 1, not nan"),
        ([0, 0.5, float("inf")], "entry 2"),
        ([0, 10**400], "entry 1"),
        ([0, -0.5], "entry 1 of an acceptance vector must be a number from 0 to 1, not -0.5"),
        ([0, True], "entry 1 of an acceptance vector must be a number from 0 to 1, not True"),
        ([0, [0.5]], "entry 1"),
        ([0, 0.75, 0.75], "sums to 1.5"),
        (np.zeros((2, 2)), "entry 0"),
        (np.array(0.5), "must be a list, not 0.5"),
    ],
)
def test_what_is_no_vector_is_refused(vector, message):
    with pytest.raises(UsageError, match=message):
        read(vector)


def test_our_own_records_are_read():
    profile = AcceptanceProfile([[0.5]])
    assert read(SHAPE.to_dict()) == SHAPE
    assert read(profile.to_dict()) == profile
    with pytest.raises(UsageError, match="these are acceptance rates"):
        read_shape(profile.to_dict())
    with pytest.raises(UsageError, match="these are acceptance rates"):
        read_shape([0, 0.5])
    with pytest.raises(UsageError, match="another kind of record"):
        read({"format": "sequoia-plan", "version": 1})


@pytest.mark.parametrize("record", [None, 3, "tree", True, {}])
def test_what_is_nothing_of_these_is_refused(record):
    with pytest.raises(UsageError):
        read(record)
