"""Tree shapes by name."""

import pytest

from sequoia.errors import FileError, UsageError
from sequoia.tree.dynamic import DynamicTree
from sequoia.tree.formats import choices, umbrella
from sequoia.tree.planner import optimal_shape
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.records import save_record
from sequoia.tree.shape import TreeShape
from sequoia.tree.specs import TREE_FORMS, parse_tree

PROFILE = AcceptanceProfile([[0.6, 0.2]])


@pytest.mark.parametrize(
    ("spec", "tree"),
    [
        ("off", TreeShape.root_only()),
        ("chain:4", TreeShape.chain(4)),
        ("chains:16x8", TreeShape.chains(16, 8)),
        ("beam:4x6", TreeShape.beam(4, 6)),
        ("kary:2x4", TreeShape.kary(2, 4)),
        ("optimal:9x4", optimal_shape(PROFILE, 9, 4)),
        ("dynamic:64x8", DynamicTree(64, 8)),
        ("dynamic:64x8x3", DynamicTree(64, 8, width=3)),
    ],
)
def test_forms(spec, tree):
    assert parse_tree(spec, PROFILE) == tree


def test_an_optimal_tree_needs_a_profile():
    with pytest.raises(UsageError, match="--profile FILE"):
        parse_tree("optimal:64x8")
    with pytest.raises(UsageError, match="at most 7 nodes"):
        parse_tree("optimal:64x2", PROFILE)


@pytest.mark.parametrize(
    "spec",
    ["", "on", "chian:4", "chain", "chain:", "chain:4x2", "beam:4", "kary:axb", "optimal:8", "dynamic:8", "dynamic:8x"],
)
def test_a_misspelling_lists_the_forms(spec):
    with pytest.raises(UsageError) as caught:
        parse_tree(spec)
    assert TREE_FORMS in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["chain:0", "chain:-4", "beam:0x3", "kary:2x-1", "chains:-1x2", "dynamic:8x0", "dynamic:8x2x0"]
)
def test_numbers_below_one_are_named(spec):
    with pytest.raises(UsageError, match="must be an integer of at least 1"):
        parse_tree(spec)


@pytest.mark.parametrize("spec", ["kary:10x20", "chain:65536", "beam:999999999x999999999", "dynamic:99999999x2"])
def test_too_large_is_refused_before_it_is_built(spec):
    with pytest.raises(UsageError, match="65,536"):
        parse_tree(spec)


def test_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TreeShape.chain(3).save("mine")
    assert parse_tree("mine") == parse_tree(str(tmp_path / "mine")) == TreeShape.chain(3)
    for missing in ["none.json", "folder/none"]:
        with pytest.raises(FileError, match=missing):
            parse_tree(missing)


def test_other_tools_files(tmp_path):
    shape = TreeShape([-1, 0, 0, 1, 1, 3])
    for write in (umbrella, choices):
        save_record(tmp_path / "shape.json", write(shape))
        assert parse_tree(str(tmp_path / "shape.json")) == shape
    with pytest.raises(UsageError, match="sequoia tree convert"):
        parse_tree(str(tmp_path / "growmap.pt"))
    AcceptanceProfile([[0.5]]).save(tmp_path / "profile.json")
    with pytest.raises(FileError, match=r"profile\.json: a tree is needed, but these are acceptance rates"):
        parse_tree(str(tmp_path / "profile.json"))
