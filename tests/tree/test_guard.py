"""The guard, with scripted drafts and scripted clocks."""

import random
from itertools import chain, pairwise, repeat

import pytest

from sequoia.errors import UsageError
from sequoia.tree.guard import Guard, GuardSettings
from sequoia.tree.option import Option, Prediction
from sequoia.tree.shape import TreeShape

OFF = Option("off", TreeShape.root_only(), Prediction(1.0, 0.0, 1.0, 0.0))
CHAIN = Option("chain", TreeShape.chain(3), Prediction(2.0, 0.0, 1.4, 0.0))
TREE = Option("tree", TreeShape.kary(2, 3), Prediction(2.6, 0.0, 1.7, 0.0))
SECONDS = {"off": 1.0, "chain": 1.4, "tree": 1.7}
GOOD = {"off": [1], "chain": [2, 3, 1, 2], "tree": [2, 4, 1, 3, 3]}
USELESS = {"off": [1], "chain": [1], "tree": [1]}


def new_guard(*options, plain=1.0, **settings):
    return Guard(options or (TREE, CHAIN, OFF), plain, GuardSettings(**settings))


class Script:
    """Rounds whose tokens and seconds are scripted by kind."""

    def __init__(self, guard):
        self.guard = guard
        self.tokens = 0
        self.seconds = 0.0
        self.rounds = 0

    def run(self, tokens, draft=GOOD, slowness=(), until=None, seconds=SECONDS):
        """Rounds for some tokens, or until this kind comes; the tokens that took."""
        start, slowness = self.tokens, chain(slowness, repeat(1.0))
        while self.tokens < start + tokens and self.guard.kind != until:
            kind = self.guard.kind
            emitted = draft[kind][self.rounds % len(draft[kind])]
            took = seconds[kind] * next(slowness)
            self.guard.observe(emitted, took)
            self.tokens, self.seconds, self.rounds = self.tokens + emitted, self.seconds + took, self.rounds + 1
        return self.tokens - start

    @property
    def steps(self):
        return [(event.from_kind, event.to_kind) for event in self.guard.events]


def test_a_good_tree_runs_undisturbed():
    script = Script(new_guard())
    script.run(3000)
    assert (script.guard.kind, script.guard.shape, script.guard.events) == ("tree", TREE.shape, [])


@pytest.mark.parametrize("before", [0, 40, 400])
@pytest.mark.parametrize("tree", [1.1, 1.3, 1.7, 3.0])
@pytest.mark.parametrize("line", [1.08, 1.4])
def test_a_draft_that_turns_useless_is_caught_within_64_tokens(before, tree, line):
    seconds = {"off": 1.0, "chain": line, "tree": tree}
    options = [
        Option(o.kind, o.shape, Prediction(tokens, 0.0, seconds[o.kind], 0.0))
        for o, tokens in ((TREE, 5.0), (CHAIN, 2.0), (OFF, 1.0))
    ]
    script = Script(new_guard(*options))
    draft = GOOD | {"tree": [5, 9, 1, 6, 4]}
    script.run(before, draft, seconds=seconds)
    assert script.guard.kind == "tree"
    assert script.run(1000, USELESS, until="off", seconds=seconds) <= 64
    assert script.guard.events[-1].at_token == script.tokens
    assert script.guard.events[-1].reason == "slower than plain decoding"


def test_it_also_catches_a_draft_whose_levels_became_slow():
    script = Script(new_guard())
    script.run(200)
    assert script.run(1000, seconds=SECONDS | {"tree": 4.0, "chain": 3.0}, until="off") <= 200
    assert script.steps == [("tree", "chain"), ("chain", "off")]


def test_the_chain_goes_on_where_only_the_tree_is_slow():
    script = Script(new_guard())
    script.run(200)
    script.run(400, seconds=SECONDS | {"tree": 4.0})
    assert script.guard.kind == "chain"
    assert ("chain", "off") not in script.steps


def test_the_chain_is_passed_over_where_it_cannot_pay_either():
    script = Script(new_guard())
    script.run(200)
    script.run(64, USELESS, until="off")
    assert script.steps == [("tree", "off")]


@pytest.mark.parametrize("gain", [1.06, 1.2, 2.0])
@pytest.mark.parametrize("pause", [3.0, 50.0, 1000.0])
@pytest.mark.parametrize("when", [0, 1, 5, 100])
def test_one_slow_round_never_drops_a_good_draft(gain, pause, when):
    script = Script(new_guard(TREE, OFF))
    seconds = SECONDS | {"tree": 2.6 / gain}
    script.run(1000, slowness=[*repeat(1.0, when), pause], seconds=seconds)
    assert script.guard.events == []


def test_a_pause_now_and_then_does_not_either():
    script = Script(new_guard())
    script.run(2000, slowness=([1.0] * 11 + [20.0]) * 100)
    assert script.guard.events == []


def test_noise_does_not_drop_a_good_draft():
    generator = random.Random(0)
    draft = {"off": [1], "chain": [1, 2, 3], "tree": [generator.choice([1, 1, 2, 3, 4, 5]) for _ in range(4001)]}
    script = Script(new_guard())
    script.run(10_000, draft, slowness=(generator.choice([0.9, 1.0, 1.1, 1.5]) for _ in repeat(None)))
    assert script.guard.kind == "tree"
    assert len(script.guard.events) <= 2


def test_a_slower_machine_is_not_the_drafts_fault():
    script = Script(new_guard())
    script.run(200)
    script.run(600, slowness=repeat(2.0))
    assert script.guard.kind == "tree"
    assert script.guard.events[-1].reason == "plain decoding is no faster"
    events = len(script.guard.events)
    script.run(2000, slowness=repeat(2.0))
    assert len(script.guard.events) == events


def test_a_slower_machine_does_not_excuse_a_useless_draft():
    script = Script(new_guard())
    script.run(200)
    assert script.run(1000, USELESS, slowness=repeat(2.0), until="off") <= 64
    script.run(60, USELESS, slowness=repeat(2.0))
    assert script.guard.kind == "off"


def test_and_a_draft_that_turns_useless_is_caught_when_the_machine_is_fast_again():
    script = Script(new_guard())
    script.run(600, slowness=repeat(2.0))
    script.run(200)
    assert script.guard.kind == "tree"
    assert script.run(1000, USELESS, until="off") <= 64


def test_probes_climb_back_when_the_draft_is_good_again():
    script = Script(new_guard())
    script.run(200)
    script.run(64, USELESS, until="off")
    script.run(400)
    assert script.guard.kind == "tree"
    assert script.steps == [("tree", "off"), ("off", "chain"), ("chain", "tree")]
    assert [event.reason for event in script.guard.events[1:]] == ["probe", "probe"]
    assert script.guard.events[2].at_token - script.guard.events[1].at_token < 30  # up to the best without a wait
    script.run(1000)
    assert len(script.guard.events) == 3


def test_probes_of_a_useless_draft_double_their_distance_and_cost_little():
    script = Script(new_guard())
    script.run(64, USELESS, until="off")
    tokens, seconds = script.tokens, script.seconds
    script.run(5000, USELESS)
    probes = [event.at_token for event in script.guard.events if event.reason == "probe"]
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert len(gaps) >= 4
    assert all(1.7 * gap < later < 2.3 * gap for gap, later in pairwise(gaps))
    assert {event.to_kind for event in script.guard.events} == {"off", "chain"}
    assert (script.seconds - seconds) / (script.tokens - tokens) < 1.01


def test_a_draft_that_is_good_by_turns_does_not_make_it_flap():
    script = Script(new_guard())
    changes = []
    for _ in range(4):
        before = len(script.guard.events)
        for _ in range(30):
            script.run(60, USELESS)
            script.run(60)
        changes.append(len(script.guard.events) - before)
    assert changes[-1] <= 2


def test_after_a_while_of_good_rounds_probes_come_early_again():
    script = Script(new_guard())
    script.run(64, USELESS, until="off")
    script.run(600, USELESS)
    script.run(3000)
    assert script.guard.kind == "tree"
    before = script.tokens
    script.run(64, USELESS, until="off")
    script.run(100, USELESS)
    first = next(event.at_token for event in script.guard.events if event.at_token > before and event.reason == "probe")
    assert first - before <= 64 + 64 + 8


def test_what_is_nearly_as_fast_as_plain_stays_where_it_is():
    """A draft within the margin is neither dropped nor, once dropped, taken back."""
    near = SECONDS | {"tree": 1.03}
    script = Script(new_guard(Option("tree", TREE.shape, Prediction(2.6, 0.0, 1.03, 0.0)), OFF))
    script.run(1000, USELESS, seconds=near)
    assert script.guard.events == []
    script.run(100, USELESS, until="off")
    script.run(1000, USELESS, seconds=near)
    assert script.guard.kind == "off"


def test_the_first_round_after_a_change_is_not_judged():
    """The draft catches up on all that was decided without it."""
    script = Script(new_guard(TREE, OFF))
    script.run(64, USELESS, until="off")
    script.run(200, until="tree")
    script.run(200, slowness=[50.0, 1.0, 1.0, 50.0])  # to catch up, and one pause
    assert script.steps == [("tree", "off"), ("off", "tree")]


def test_a_plan_of_a_faster_machine_is_corrected_once():
    """All is three times as slow as the plan says, the draft as good."""
    script = Script(new_guard())
    script.run(2000, slowness=repeat(3.0))
    assert script.guard.kind == "tree"
    assert len(script.guard.events) <= 3
    script.guard.restart()
    assert script.guard.events == []
    script.run(2000, slowness=repeat(3.0))
    assert script.guard.events == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_plan_that_overrates_what_a_tree_takes_is_corrected(restarts):
    """By the plan its rounds would not pay for these tokens; by the clock they do."""
    script = Script(new_guard(TREE, OFF))
    poor, cheap = GOOD | {"tree": [1, 2, 1, 2]}, SECONDS | {"tree": 1.2}
    assert script.run(400, poor, seconds=cheap, until="off") < 400
    script.run(20, poor, seconds=cheap)
    assert script.guard.events[-1].reason == "plain decoding is no faster"
    if restarts:
        script.guard.restart()
    script.run(1000, poor, seconds=cheap)
    assert script.steps == ([] if restarts else [("tree", "off"), ("off", "tree")])


def test_restart_begins_with_the_best_and_counts_anew():
    script = Script(new_guard())
    script.run(64, USELESS, until="off")
    script.guard.restart()
    assert (script.guard.kind, script.guard.events) == ("tree", [])
    taken = script.run(1000, USELESS, until="off")
    assert script.guard.events[-1].at_token == taken


def test_off_alone_stays_off():
    script = Script(new_guard(OFF))
    script.run(500)
    assert (script.guard.kind, script.guard.events) == ("off", [])


def test_a_chain_may_be_the_best():
    script = Script(new_guard(CHAIN, TREE, OFF))
    assert script.guard.kind == "chain"
    script.run(1000, USELESS, until="off")
    assert script.guard.kind == "off"


@pytest.mark.parametrize("options", [(), (TREE,), (OFF, TREE), (TREE, TREE, OFF), (OFF, OFF)])
def test_options_end_with_the_only_off(options):
    with pytest.raises(UsageError, match="off the last"):
        Guard(options, 1.0)


def test_what_is_no_setting_is_refused():
    with pytest.raises(UsageError, match="plain_seconds_per_token must be above 0"):
        Guard([OFF], 0.0)
    with pytest.raises(UsageError, match="plain_seconds_per_token must be above 0"):
        Guard([OFF], float("nan"))
    for name in ("window_rounds", "patience", "probe_after_tokens", "probe_rounds"):
        with pytest.raises(UsageError, match=name):
            GuardSettings(**{name: 0})
    for margin in (-0.1, float("nan"), 10.0):
        with pytest.raises(UsageError, match="margin"):
            GuardSettings(margin=margin)
