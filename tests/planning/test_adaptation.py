"""A plan that follows what is accepted: when it changes, and when not."""

from __future__ import annotations

import pytest
from scripted import LATENCY, OFF

from sequoia.planning.adapt import Adaptation
from sequoia.tree.choice import plan as planned
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

PROFILE = AcceptanceProfile([[0.7, 0.1]])


@pytest.fixture
def adaptation() -> Adaptation:
    return Adaptation(planned(PROFILE, LATENCY, params={"temperature": 0.0}), LATENCY)


def test_acceptance_as_planned_changes_nothing(adaptation: Adaptation) -> None:
    before = adaptation.plan
    shape = TreeShape.chain(1)
    adaptation.add([(shape, (1,))] * 7 + [(shape, ())] * 3)
    assert adaptation.plan is before


def test_better_acceptance_makes_deeper_trees_and_worse_shallower_ones(adaptation: Adaptation) -> None:
    depth = adaptation.plan.chosen.shape.depth
    chain = TreeShape.chain(8)
    adaptation.add([(chain, tuple(range(1, 9)))] * 300)
    deeper = adaptation.plan.chosen.shape.depth
    assert deeper > depth
    adaptation.add([(TreeShape.kary(2, 1), (1,)), (TreeShape.kary(2, 1), ())] * 3000)
    assert adaptation.plan.chosen.shape.depth < depth


def test_what_is_predicted_follows(adaptation: Adaptation) -> None:
    adaptation.add([(TreeShape.chain(8), tuple(range(1, 9)))] * 300)
    rate = adaptation.plan.profile.rates[0][0]
    assert 0.9 < rate < 1


def test_plain_rounds_teach_nothing(adaptation: Adaptation) -> None:
    before = adaptation.plan
    adaptation.add([(OFF, ())] * 1000)
    assert adaptation.plan is before


def test_it_never_adapts_to_off(adaptation: Adaptation) -> None:
    """Plain decoding would teach nothing more; falling back is the guard's business."""
    adaptation.add([(TreeShape.chain(8), ())] * 3000)
    assert adaptation.plan.chosen.kind != "off"


def test_it_plans_once_for_each_change(adaptation: Adaptation, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("sequoia.planning.adapt.planned", lambda *a, **k: calls.append(a) or planned(*a, **k))
    adaptation.add([(TreeShape.chain(1), (1,))])
    for _ in range(3):
        _ = adaptation.plan
    assert len(calls) == 1
