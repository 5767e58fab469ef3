"""Plans: predictions, options, the plan for some parameters, the table and the file."""

import copy
import json
import re

import pytest

from sequoia.errors import FileError, UsageError
from sequoia.params import SamplingParams
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option, Prediction, kind_of
from sequoia.tree.plan import PAIR_KEYS, BatchOption, Plan, PlanFile, describe_law, law_of
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

PROFILE = AcceptanceProfile([[0.5, 0.2]], {"errors": [[0.01, 0.02]]})
OFF = Option("off", TreeShape.root_only(), Prediction(1.0, 0.0, 0.0284, 0.0))
CHAIN = Option("chain", TreeShape.chain(3), Prediction(2.05, 0.04, 0.041, 0.0004))
TREE = Option("tree", TreeShape.kary(2, 3), Prediction(2.61, 0.05, 0.0479, 0.0004))
LATENCY = LatencyProfile({128: {1: Timing(0.028, 0.001)}}, {1: Timing(0.002, 0.0)}, {1: Timing(0.0004, 0.0)})


def plan(temperature=0.0, options=(OFF, CHAIN, TREE), **others):
    return Plan({"temperature": temperature, **others}, PROFILE, options, (TREE, CHAIN))


def plan_file(*plans):
    pair = dict.fromkeys(PAIR_KEYS, "x")
    batch = (BatchOption(1, (OFF, CHAIN, TREE), False), BatchOption(16, (OFF,), True))
    return PlanFile(pair, {"cpu": "one"}, {"prompts": "built-in"}, LATENCY, plans or (plan(),), batch)


def test_prediction():
    prediction = Prediction(2.0, 0.2, 0.05, 0.0)
    assert prediction.seconds_per_token == 0.025
    assert prediction.tokens_per_second == 40.0
    assert prediction.tokens_per_second_error == pytest.approx(4.0)
    both = Prediction(2.0, 0.06, 0.05, 0.002)
    assert both.tokens_per_second_error == pytest.approx(40 * 0.05)


@pytest.mark.parametrize(
    "values",
    [(0.0, 0, 1, 0), (1, -1, 1, 0), (1, 0, 0, 0), (1, 0, 1, float("inf")), (float("nan"), 0, 1, 0), ("1",) * 4],
)
def test_what_is_no_prediction_is_refused(values):
    with pytest.raises(UsageError, match="must be a number of at least"):
        Prediction(*values)


def test_kinds_and_names():
    assert [kind_of(option.shape) for option in (OFF, CHAIN, TREE)] == ["off", "chain", "tree"]
    assert [option.name for option in (OFF, CHAIN, TREE)] == ["off", "chain 3", "tree 15/3"]
    with pytest.raises(UsageError, match="an option of kind 'tree' has a shape of kind 'chain'"):
        Option("tree", CHAIN.shape, CHAIN.prediction)
    with pytest.raises(UsageError, match="kind must be off, chain or tree, not 'beam'"):
        Option("beam", CHAIN.shape, CHAIN.prediction)


def test_the_chosen_option_takes_the_least_time_per_token_and_the_simpler_one_wins_a_tie():
    assert plan().chosen is TREE
    assert plan().plain is OFF
    assert plan().option("chain") is CHAIN
    assert plan(options=[OFF]).option("tree") is None
    slow = Option("chain", CHAIN.shape, Prediction(2.0, 0.0, 0.0568, 0.0))
    assert slow.prediction.seconds_per_token == OFF.prediction.seconds_per_token
    assert plan(options=[slow, OFF]).chosen is OFF


@pytest.mark.parametrize("options", [(), (CHAIN,), (OFF, OFF), (OFF, CHAIN, CHAIN)])
def test_a_plan_holds_off_once_and_no_kind_twice(options):
    with pytest.raises(UsageError, match="options must hold off once and no kind twice"):
        plan(options=options)


def test_the_law_is_the_temperature_and_what_else_changes_something():
    params = SamplingParams(
        temperature=0.6, top_p=0.9, top_k=0, min_p=0.0, repetition_penalty=1.1, max_tokens=3, seed=1
    )
    assert law_of(params) == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert law_of(SamplingParams(temperature=0, top_p=0.9, presence_penalty=1)) == {
        "temperature": 0.0,
        "presence_penalty": 1,
    }
    assert law_of(SamplingParams()) == {"temperature": 1.0}
    assert describe_law(law_of(params)) == "temperature 0.6, top_p 0.9, repetition_penalty 1.1"


def test_the_plan_for_parameters_is_that_of_the_nearest_temperature():
    file = plan_file(plan(0.0), plan(0.6), plan(1.0))
    for asked, found in [(0.0, 0.0), (0.2, 0.0), (0.5, 0.6), (0.9, 1.0), (2.0, 1.0)]:
        assert file.plan_for(SamplingParams(temperature=asked)).params == {"temperature": found}
    assert file.fits(SamplingParams(temperature=0.6, seed=3))
    assert not file.fits(SamplingParams(temperature=0.61))
    assert file.fits(SamplingParams(temperature=0, top_k=5))


def test_other_parameters_come_before_the_temperature():
    file = plan_file(plan(0.6), plan(1.0, top_p=0.9))
    asked = SamplingParams(temperature=0.6, top_p=0.9)
    assert file.plan_for(asked).params == {"temperature": 1.0, "top_p": 0.9}
    assert not file.plan_for(asked).fits(asked)
    assert file.plan_for(SamplingParams(temperature=0.7, top_p=0.5)).params["temperature"] == 0.6


def test_tables():
    assert repr(plan(0.6)).split("\n") == [
        "temperature 0.6",
        "              tokens/round   ms/round     tokens/s",
        "  off                 1.00       28.4         35.2",
        "  chain 3             2.05       41.0   50.0 ± 1.1   1.42× plain",
        "▸ tree 15/3           2.61       47.9   54.5 ± 1.1   1.55× plain",
    ]
    page = plan(0.6)._repr_html_()
    assert page.count("<tr>") == 4
    assert re.findall(r'bold">(\S+)', page)[0] == "tree"
    file = plan_file(plan(), plan(0.6))
    assert repr(file) == f"{plan()!r}\n\n{plan(0.6)!r}"
    assert file._repr_html_().count("<table>") == 2


def test_batch_options():
    batch = BatchOption(4, (TREE, OFF), False)
    assert batch.options == (OFF, TREE)
    assert (batch.chosen, batch.option("tree"), batch.option("chain")) == (TREE, TREE, None)
    assert batch.speedup == pytest.approx(2.61 / 0.0479 * 0.0284)
    with pytest.raises(UsageError, match="batch must be"):
        BatchOption(0, (OFF,), False)


def test_files_round_trip(tmp_path):
    file = plan_file(plan(), plan(0.6, top_p=0.9))
    file.save(tmp_path / "plan.json")
    again = PlanFile.load(tmp_path / "plan.json")
    assert again == file
    assert again.plans[0].profile.provenance == PROFILE.provenance
    assert again.plans[1].chosen.shape == TREE.shape


def test_a_file_needs_a_plan_and_not_two_for_the_same_parameters():
    with pytest.raises(UsageError, match="plans is empty"):
        PlanFile({}, {}, {}, LATENCY, ())
    with pytest.raises(UsageError, match=r"two for the same parameters: temperature 0\.6"):
        plan_file(plan(0.6), plan(0.6))


def broken(path, value):
    """What sets the place at `path` of a record to `value`, or removes it."""

    def damage(record):
        *way, last = path
        for key in way:
            record = record[key]
        if value is None:
            del record[last]
        else:
            record[last] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken(["latency"], None), "key 'latency' is missing"),
        (broken(["surplus"], 1), "unknown key 'surplus'"),
        (broken(["version"], 9), "version must be 1, not 9"),
        (broken(["format"], "sequoia-tree"), "format must be 'sequoia-plan'"),
        (broken(["pair"], []), "pair must be an object, not list"),
        (broken(["pair", "draft"], None), "pair lacks its 'draft'"),
        (broken(["machine"], 3), "machine must be an object, not int"),
        (broken(["plans"], {}), "plans must be a list, not dict"),
        (broken(["plans"], []), "plans is empty"),
        (broken(["plans", 0], 1), "a plan must be an object, not int"),
        (broken(["plans", 0, "params"], "hot"), "params must be an object, not str"),
        (broken(["plans", 0, "params", "temperature"], -1), "temperature must be a number"),
        (broken(["plans", 0, "params", "mirostat"], 1), "params has an unknown key 'mirostat'"),
        (broken(["plans", 0, "profile", "rates"], [[2.0]]), r"rates\[0\]\[0\] must be"),
        (broken(["plans", 0, "options"], []), "options must hold off once"),
        (broken(["plans", 0, "options", 1, "parents"], [-1, 5]), r"parents\[1\] must be"),
        (broken(["plans", 0, "options", 1, "parents"], 7), "parents must be a list"),
        (broken(["plans", 0, "options", 1, "kind"], "tree"), "of kind 'tree' has a shape of kind 'chain'"),
        (broken(["plans", 0, "options", 1, "kind"], ["chain"]), "kind must be off, chain or tree"),
        (broken(["plans", 0, "options", 1, "prediction", "seconds_per_round"], 0), "seconds_per_round must be"),
        (
            broken(["plans", 0, "options", 1, "prediction", "tokens_error"], None),
            "a prediction lacks its 'tokens_error'",
        ),
        (broken(["latency", "target", "128", "1", "seconds"], "fast"), r"target\[128\]\[1\].seconds must be"),
        (broken(["batch", 0, "batch"], 1.5), "batch must be an integer"),
        (broken(["batch", 0, "extrapolated"], "no"), "extrapolated must be true or false"),
    ],
)
def test_a_damaged_file_gives_one_clear_line(tmp_path, damage, message):
    record = json.loads(json.dumps(plan_file().to_dict()))
    damage(record)
    (tmp_path / "plan.json").write_text(json.dumps(record))
    with pytest.raises(FileError, match=message) as caught:
        PlanFile.load(tmp_path / "plan.json")
    assert str(tmp_path / "plan.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def everywhere(record, path=()):
    """All places of a record."""
    pairs = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in pairs:
        yield [*path, key]
        yield from everywhere(value, (*path, key))


def test_no_damage_gives_anything_but_a_clear_line_or_a_plan():
    whole = json.loads(json.dumps(plan_file().to_dict()))
    messages = []
    for path in everywhere(whole):
        for value in (None, [], {}, "x", -1, 1e300, True, [None], {"x": None}):
            record = copy.deepcopy(whole)
            broken(path, value)(record)
            try:
                PlanFile.from_dict(record)
            except UsageError as error:
                messages.append(str(error))
    assert len(messages) > 1000
    assert not [message for message in messages if "\n" in message]


def test_a_truncated_file_gives_one_clear_line(tmp_path):
    plan_file().save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text[: len(text) // 2])
    with pytest.raises(FileError, match="is not valid JSON"):
        PlanFile.load(tmp_path / "plan.json")
    with pytest.raises(FileError, match="cannot read"):
        PlanFile.load(tmp_path / "other.json")
