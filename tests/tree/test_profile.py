"""AcceptanceProfile: validation, counts and its file."""

import copy
import json

import numpy as np
import pytest

from sequoia.errors import FileError, UsageError
from sequoia.tree.profile import AcceptanceProfile


def test_rows_are_padded_and_the_last_serves_deeper_levels():
    profile = AcceptanceProfile([[0.5], [0.4, 0.2, 0.1], []])
    assert profile.ranks == 3
    assert profile.row(0).tolist() == [0.5, 0.0, 0.0]
    assert profile.row(1).tolist() == [0.4, 0.2, 0.1]
    assert profile.row(2).tolist() == profile.row(99).tolist() == [0.0, 0.0, 0.0]
    assert repr(profile) == "AcceptanceProfile(rows=3, ranks=3)"
    with pytest.raises(UsageError, match="depth must be"):
        profile.row(-1)
    with pytest.raises(ValueError, match="read-only"):
        profile.row(0)[0] = 1.0


def test_monotone_looks_at_padded_rows():
    assert AcceptanceProfile([[0.5, 0.5], [0.4]]).is_monotone
    assert not AcceptanceProfile([[0.5, 0.2], [0.1, 0.2]]).is_monotone


def test_arrays_are_accepted_and_values_are_compared():
    profile = AcceptanceProfile(np.array([[0.5, 0.25]], dtype=np.float32), {"samples": 3})
    assert profile == AcceptanceProfile([[0.5, 0.25]], {"samples": 3})
    assert profile != AcceptanceProfile([[0.5, 0.25]])
    assert hash(profile) == hash(AcceptanceProfile([[0.5, 0.25]]))
    assert copy.deepcopy(profile) == profile
    assert AcceptanceProfile([[1]]).rates == ((1.0,),)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([], "at least one row"),
        ([[], []], "at least one row"),
        ([[0.5, -0.1]], r"rates\[0\]\[1\] must be a number from 0 to 1, not -0.1"),
        ([[0.5], [1.5]], r"rates\[1\]\[0\]"),
        ([[float("nan")]], "not nan"),
        ([[float("inf")]], "not inf"),
        ([["0.5"]], "number"),
        ([[10**400]], "number"),
        ([[True]], "number"),
        ([[0.6, 0.5]], r"rates\[0\] sums to 1.1"),
        ([0.5], r"rates\[0\] must be a list"),
        ("0.5", "rates must be a list"),
        (None, "rates must be a list"),
    ],
)
def test_what_is_no_profile_is_refused(rates, message):
    with pytest.raises(UsageError, match=message):
        AcceptanceProfile(rates)


def test_a_row_may_exceed_one_by_rounding():
    assert AcceptanceProfile([[0.1] * 10 + [1e-10]]).ranks == 11


def test_from_counts():
    profile = AcceptanceProfile.from_counts([10, 4, 0], [[3, 1], [2], []], {"by": "test"})
    assert profile.rates == ((0.3, 0.1), (0.5,))
    assert profile.provenance == {"by": "test"}


@pytest.mark.parametrize(
    ("visits", "accepted", "message"),
    [
        ([0], [[0]], "nothing was measured"),
        ([], [], "nothing was measured"),
        ([2], [[1], [1]], "visits has 1 depths but accepted has 2"),
        ([2], [[2, 1]], r"accepted\[0\] sums to 3, more than its 2 visits"),
        ([2], [[-1]], r"accepted\[0\]\[0\] must be"),
        ([-2], [[1]], r"visits\[0\] must be"),
        ([2, 0, 1], [[1], [0], [1]], "deeper nodes were visited"),
    ],
)
def test_counts_that_cannot_be_are_refused(visits, accepted, message):
    with pytest.raises(UsageError, match=message):
        AcceptanceProfile.from_counts(visits, accepted)


def test_file_round_trip(tmp_path):
    path = tmp_path / "profile.json"
    profile = AcceptanceProfile([[0.1 + 0.2, 1 / 3], [0.5]], {"target": "é", "visits": [10, 3]})
    profile.save(path)
    assert AcceptanceProfile.load(path) == profile
    assert list(tmp_path.iterdir()) == [path]


def test_provenance_must_be_plain_data(tmp_path):
    with pytest.raises(UsageError, match="provenance must be a mapping"):
        AcceptanceProfile([[0.5]], ["list"])
    for value in (object(), float("nan")):
        with pytest.raises(UsageError, match="cannot be saved as JSON"):
            AcceptanceProfile([[0.5]], {"value": value}).save(tmp_path / "profile.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": [[-0.5]]}, "from 0 to 1, not -0.5"),
        ({"rates": [[float("nan")]]}, "not nan"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"version": "1"}, "version must be 1"),
        ({"format": "sequoia-tree"}, "another kind"),
        ({"provenance": 3}, "provenance must be a mapping"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(AcceptanceProfile([[0.5]]).to_dict() | change))
    with pytest.raises(FileError, match=message) as caught:
        AcceptanceProfile.load(path)
    assert str(path) in str(caught.value)
