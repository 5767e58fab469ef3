"""LatencyProfile: times between and beyond the measured points, what a round is charged, and its file."""

import json
import math

import pytest

from sequoia.errors import FileError, UsageError
from sequoia.tree.latency import LatencyProfile, Timing, level_widths
from sequoia.tree.shape import TreeShape


def times(points, spread=0.0):
    return {place: Timing(seconds, spread) for place, seconds in points.items()}


def latency(target=None, draft=None, overhead=None, spread=0.0):
    return LatencyProfile(
        {128: times(target or {1: 1.0, 2: 1.1, 4: 1.3, 8: 3.0}, spread)},
        times(draft if draft is not None else {1: 0.1, 4: 0.4}, spread),
        times(overhead if overhead is not None else {1: 0.01, 8: 0.08}, spread),
    )


def test_times_are_linear_between_measured_points():
    profile = latency()
    assert profile.target_seconds(1) == 1.0
    assert profile.target_seconds(3) == pytest.approx(1.2)
    assert profile.target_seconds(5) == pytest.approx(1.725)
    assert profile.draft_seconds(3) == pytest.approx(0.3)
    assert profile.overhead_seconds(4) == pytest.approx(0.04)


def test_beyond_the_last_point_times_go_on_with_the_slope_of_the_upper_half():
    profile = latency({1: 1.0, 8: 1.0, 15: 1.9, 16: 1.8})
    assert profile.target_seconds(32) == pytest.approx(1.8 + 16 * (1.8 - 1.0) / 8)
    assert profile.draft_seconds(8) == pytest.approx(0.8)


def test_times_never_fall_beyond_the_last_point_nor_change_below_the_first():
    profile = latency({1: 1.0, 8: 0.9}, draft={2: 0.5}, overhead={4: 0.1})
    assert profile.target_seconds(100) == 0.9
    assert profile.draft_seconds(1) == profile.draft_seconds(50) == 0.5
    assert profile.overhead_seconds(1) == profile.overhead_seconds(9) == 0.1


def test_contexts_are_interpolated_too_and_rows_are_those_measured_at_all():
    profile = LatencyProfile(
        {1000: times({1: 2.0, 8: 4.0, 9: 5.0}), 0: times({1: 1.0, 4: 1.5, 8: 2.0})}, times({1: 0.1}), {}
    )
    assert profile.contexts == (0, 1000)
    assert profile.rows == (1, 8)
    assert profile.target_seconds(1) == profile.target_seconds(1, 0) == 1.0
    assert profile.target_seconds(8, 500) == pytest.approx(3.0)
    assert profile.target_seconds(1, 2000) == pytest.approx(3.0)
    assert profile.overhead_seconds(7) == 0.0
    assert repr(profile) == "LatencyProfile(contexts=[0, 1000], rows=[1, 8], widths=[1])"


def test_a_round_is_charged_its_pass_each_level_by_its_inner_nodes_and_the_overhead():
    #      0
    #    1   2
    #   3 4  5
    #   6
    shape = TreeShape([-1, 0, 0, 1, 1, 2, 3])
    assert level_widths(shape) == [1, 2, 1]
    profile = latency()
    expected = profile.target_seconds(7) + 0.1 + 0.2 + 0.1 + profile.overhead_seconds(7)
    assert profile.round_seconds(shape) == pytest.approx(expected)
    assert profile.round_seconds(TreeShape.root_only()) == pytest.approx(1.01)


def test_a_batch_multiplies_rows_widths_and_sizes():
    profile = latency()
    expected = profile.target_seconds(6) + 2 * profile.draft_seconds(2) + profile.overhead_seconds(6)
    assert profile.round_seconds(TreeShape.chain(2), batch=2) == pytest.approx(expected)


def test_overhead_may_be_negative_but_a_round_takes_at_least_its_pass():
    profile = latency(overhead={1: -0.05, 2: -0.5})
    assert profile.overhead_seconds(1) == -0.05
    assert profile.round_seconds(TreeShape.chain(1)) == profile.target_seconds(2)


def test_spreads_of_levels_add_up_and_kinds_are_independent():
    profile = latency(spread=0.1)
    assert profile.round_spread(TreeShape.root_only()) == pytest.approx(math.hypot(0.1, 0.1))
    assert profile.round_spread(TreeShape.chain(3)) == pytest.approx(math.hypot(0.1, 0.3, 0.1))


def test_without_a_draft_only_plain_decoding_can_be_charged():
    profile = latency(draft={})
    assert profile.round_seconds(TreeShape.root_only()) == pytest.approx(1.01)
    with pytest.raises(UsageError, match="no draft was timed"):
        profile.round_seconds(TreeShape.chain(1))


GOOD = times({1: 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, {}, {}), "target has no times"),
        (({128: {}}, {}, {}), r"target\[128\] has no time of 1 row"),
        (({128: times({2: 1.0})}, {}, {}), r"target\[128\] has no time of 1 row"),
        (({128: times({1: 0.0})}, {}, {}), r"target\[128\]\[1\].seconds must be above 0"),
        (({128: times({1: -1.0})}, {}, {}), r"target\[128\]\[1\].seconds must be"),
        (({128: times({1: float("nan")})}, {}, {}), "not nan"),
        (({128: times({1: 1.0}, -1.0)}, {}, {}), r"\[1\].spread must be"),
        (({128: {1: 1.0}}, {}, {}), r"must be a Timing, not 1.0"),
        (({"128": GOOD}, {}, {}), "a key of target must be an integer"),
        (({128: GOOD}, {0: Timing(1.0, 0.0)}, {}), "a key of draft must be an integer of at least 1"),
        (({128: GOOD}, times({1: float("inf")}), {}), r"draft\[1\].seconds"),
        (({128: GOOD}, [], {}), "draft must map"),
        (({128: GOOD}, {}, None), "overhead must map"),
        (({128: GOOD}, {}, {}, "mine"), "provenance must be a mapping"),
    ],
)
def test_what_is_no_profile_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        LatencyProfile(*arguments)


def test_places_below_zero_are_refused():
    with pytest.raises(UsageError, match="at least 0, not -1"):
        latency().target_seconds(-1)


def test_files_round_trip(tmp_path):
    profile = LatencyProfile({1024: GOOD, 128: GOOD}, times({2: 0.5, 1: 0.25}, 0.01), {}, {"threads": 2})
    profile.save(tmp_path / "latency.json")
    assert LatencyProfile.load(tmp_path / "latency.json") == profile
    assert list(profile.draft) == [1, 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r.pop("draft"), "key 'draft' is missing"),
        (lambda r: r.update(version=2), "version must be 1, not 2"),
        (lambda r: r.update(target=[]), "target must be an object of times, not list"),
        (lambda r: r["target"].update(soon={}), "a key of target must be an integer, not 'soon'"),
        (lambda r: r["target"]["128"].update({"-1": {}}), r"a key of target\[128\] must be an integer, not '-1'"),
        (lambda r: r["draft"].update({"1": 3}), r"draft\[1\] must be an object, not int"),
        (lambda r: r["draft"]["1"].pop("spread"), r"draft\[1\] lacks its 'spread'"),
        (lambda r: r["draft"]["1"].update(mean=1), r"draft\[1\] has an unknown key 'mean'"),
        (lambda r: r["draft"]["1"].update(seconds="1"), r"draft\[1\].seconds must be a number"),
    ],
)
def test_a_damaged_file_gives_one_clear_line(tmp_path, damage, message):
    record = latency().to_dict()
    damage(record)
    (tmp_path / "latency.json").write_text(json.dumps(record))
    with pytest.raises(FileError, match=message) as caught:
        LatencyProfile.load(tmp_path / "latency.json")
    assert str(tmp_path / "latency.json") in str(caught.value)
    assert "\n" not in str(caught.value)
