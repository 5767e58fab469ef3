"""TreeShape: topology, standard shapes, its file and its drawing."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequoia.errors import FileError, UsageError
from sequoia.tree.checks import MAX_NODES
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape


@st.composite
def shapes(draw, most=24):
    size = draw(st.integers(1, most))
    return TreeShape([-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)])


def test_topology_of_a_small_tree_in_depth_first_order():
    shape = TreeShape([-1, 0, 1, 1, 0, 4])
    assert (shape.size, shape.depth, shape.max_children) == (6, 2, 2)
    assert shape.depths == (0, 1, 2, 2, 1, 2)
    assert shape.ranks == (0, 0, 0, 1, 1, 0)
    assert shape.levels == ((0,), (1, 4), (2, 3, 5))
    assert shape.level_sizes == (1, 2, 3)
    assert shape.paths == ((), (1,), (1, 2), (1, 3), (4,), (4, 5))
    assert [shape.children(node) for node in range(6)] == [(1, 4), (2, 3), (), (), (5,), ()]


@given(shapes())
def test_properties_agree_with_each_other(shape):
    for node in range(shape.size):
        assert shape.depths[node] == len(shape.paths[node])
        assert set(np.flatnonzero(shape.ancestors[node])) == {0, *shape.paths[node]}
        assert [shape.ranks[child] for child in shape.children(node)] == list(range(len(shape.children(node))))
    assert sum(shape.level_sizes) == shape.size
    assert TreeShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


@given(shapes(), st.integers(0, 8))
def test_limit_drops_exactly_the_deeper_nodes(shape, depth):
    limited = shape.limit(depth)
    assert limited.depth == min(depth, shape.depth)
    assert limited.level_sizes == shape.level_sizes[: depth + 1]
    assert limited is shape or limited != shape


@given(shapes())
def test_level_order_is_one_numbering_per_tree(shape):
    ordered = shape.in_level_order()
    assert sorted(ordered.depths) == list(ordered.depths)
    assert ordered.level_sizes == shape.level_sizes
    assert ordered.in_level_order() == ordered


def test_depth_first_and_level_order_of_one_tree_become_equal():
    assert TreeShape([-1, 0, 1, 0]).in_level_order() == TreeShape([-1, 0, 0, 1]).in_level_order()


def test_immutable_hashable_and_copied():
    shape = TreeShape(np.array([-1, 0, 0]))
    assert shape.parents == (-1, 0, 0)
    assert all(type(parent) is int for parent in shape.parents)
    assert {shape: 1}[TreeShape((-1, 0, 0))] == 1
    assert shape != TreeShape([-1, 0, 1])
    assert pickle.loads(pickle.dumps(shape)) == copy.deepcopy(shape) == shape
    with pytest.raises(AttributeError):
        shape.parents = ()
    with pytest.raises(ValueError, match="read-only"):
        shape.ancestors[0, 0] = False


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "parents is empty"),
        ([0], r"parents\[0\] is 0"),
        ([-1, -1], r"parents\[1\] must be an integer of at least 0, not -1"),
        ([-1, 2, 0], r"parents\[1\] must be an earlier node, 0 to 0, not 2"),
        ([-1, 1], "earlier node"),
        ([-1, 0.0], "integer"),
        ([-1, True], "integer"),
        ([-1, None], "integer"),
        ("-1", "list of node indices"),
        (7, "list of node indices"),
        ([-1] + [0] * MAX_NODES, "65,536"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(UsageError, match=message):
        TreeShape(parents)


def test_node_and_depth_arguments_are_checked():
    with pytest.raises(UsageError, match="node must be 0 to 0"):
        TreeShape.root_only().children(-1)
    with pytest.raises(UsageError, match="depth must be"):
        TreeShape.root_only().limit(-1)


def test_standard_shapes():
    assert TreeShape.root_only().parents == (-1,)
    assert TreeShape.chain(3).parents == (-1, 0, 1, 2)
    assert TreeShape.chains(2, 3).parents == (-1, 0, 0, 1, 2, 3, 4)
    assert TreeShape.kary(2, 2).parents == (-1, 0, 0, 1, 1, 2, 2)
    assert TreeShape.kary(1, 3) == TreeShape.chain(3)
    assert TreeShape.beam(1, 3) == TreeShape.chain(3)
    assert TreeShape.kary(3, 3).level_sizes == (1, 3, 9, 27)


@given(st.integers(1, 12), st.integers(1, 8))
def test_a_beam_keeps_the_lowest_rank_sums_of_each_level(width, depth):
    shape = TreeShape.beam(width, depth)
    assert shape.level_sizes == (1,) + (width,) * depth
    assert shape == shape.in_level_order()
    cost = [sum(shape.ranks[node] for node in path) for path in shape.paths]
    for above, level in zip(shape.levels, shape.levels[1:], strict=False):
        next_best = min(cost[node] + len(shape.children(node)) for node in above)
        assert max(cost[node] for node in level) <= next_best


@pytest.mark.parametrize("form", [TreeShape.chains, TreeShape.kary, TreeShape.beam])
def test_sizes_of_standard_shapes_are_guarded(form):
    for first, second in [(0, 3), (3, 0), (-1, 3), (3, -2), (2.5, 3), (True, 3)]:
        with pytest.raises(UsageError, match="must be an integer of at least 1"):
            form(first, second)
    with pytest.raises(UsageError, match="65,536"):
        form(10**9, 10**9)
    with pytest.raises(UsageError, match="65,536"):
        form(10, 10**9)


def test_a_deep_chain_needs_no_recursion():
    shape = TreeShape.chain(5000)
    assert shape.depth == 5000
    assert shape.paths[-1][-1] == 5000
    assert shape.ancestors[5000].all()
    assert shape.limit(4000) == TreeShape.chain(4000)
    assert "4801 more" in str(shape)
    assert len(TreeShape.chain(MAX_NODES - 1).draw()) < 5000


def test_file_round_trip_leaves_only_the_file(tmp_path):
    path = tmp_path / "shape.json"
    TreeShape.kary(2, 3).save(path)
    TreeShape.beam(4, 3).save(path)
    assert TreeShape.load(path) == TreeShape.beam(4, 3)
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["version"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "JSON object"),
        ('{"format": "other"}', "format must be"),
        ('{"format": "sequoia-tree", "version": 2, "parents": [-1]}', "version must be 1, not 2"),
        ('{"format": "sequoia-tree", "version": 1}', "'parents' is missing"),
        ('{"format": "sequoia-tree", "version": 1, "parents": [-1], "x": 0}', "unknown key 'x'"),
        ('{"format": "sequoia-tree", "version": 1, "parents": [-1, 4]}', "earlier node"),
        ('{"format": "sequoia-tree", "version": 1, "parents": {"0": -1}}', "list of node indices"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message) as caught:
        TreeShape.load(path)
    assert "bad.json" in str(caught.value)


def test_unreadable_and_unwritable_files(tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.json", tmp_path, binary):
        with pytest.raises(FileError, match=str(path)):
            TreeShape.load(path)
    with pytest.raises(FileError, match="cannot write"):
        TreeShape.chain(1).save(tmp_path)
    with pytest.raises(FileError, match="cannot write"):
        TreeShape.chain(1).save(tmp_path / "no" / "folder.json")
    assert list(tmp_path.iterdir()) == [binary]


def test_drawing():
    shape = TreeShape([-1, 0, 0, 1, 1, 3])
    assert repr(shape) == "TreeShape(size=6, depth=3)"
    assert str(shape).splitlines() == [
        "6 nodes · depth 3 · levels 1 2 2 1",
        "0",
        "├─ 1",
        "│  ├─ 3 ─ 5",
        "│  └─ 4",
        "└─ 2",
    ]
    assert str(TreeShape.root_only()).splitlines() == ["1 node · depth 0", "0"]


def test_drawing_with_a_profile():
    drawn = TreeShape([-1, 0, 0, 1]).draw(AcceptanceProfile([[0.5, 0.25], [0.4]]))
    assert drawn.splitlines() == [
        "4 nodes · depth 2 · levels 1 2 1 · 1.950 expected tokens per round",
        "0 (1.000)",
        "├─0.500─ 1 (0.500) ─0.400─ 3 (0.200)",
        "└─0.250─ 2 (0.250)",
    ]


def test_branches_after_a_run_start_under_its_last_node():
    assert TreeShape([-1, 0, 1, 1]).draw().splitlines()[1:] == ["0 ─ 1", "    ├─ 2", "    └─ 3"]


def test_a_long_run_wraps_and_narrow_or_large_drawings_count_what_they_leave_out():
    lines = TreeShape.chain(30).draw(width=50).splitlines()
    assert len(lines) > 2
    assert all(len(line) <= 50 for line in lines)
    assert "30" in lines[-1]
    assert "… 120 more" in TreeShape.kary(3, 4).draw(width=10)
    large = TreeShape.kary(2, 11).draw(max_nodes=7).splitlines()
    assert len(large) == 8
    assert sum("… 510 more" not in line and "… 1022 more" in line for line in large) == 4


@given(shapes(), st.integers(1, 120), st.integers(1, 30))
def test_each_node_is_drawn_or_counted(shape, width, max_nodes):
    lines = shape.draw(width=width, max_nodes=max_nodes).splitlines()[1:]
    counted = [int(line.split("… ")[1].split()[0]) for line in lines if "…" in line]
    drawn = [word for line in lines for word in line.split("…")[0].split() if word.isdigit()]
    assert len(drawn) == len(set(drawn))
    assert len(drawn) + sum(counted) == shape.size


def test_notebooks_draw_the_tree():
    class Printer:
        def text(self, text):
            self.printed = text

    printer = Printer()
    TreeShape.chain(2)._repr_pretty_(printer, cycle=False)
    assert printer.printed.endswith("0 ─ 1 ─ 2")
