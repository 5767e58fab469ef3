"""The figures of a comparison, against values computed by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import synthetic
from synthetic import GREEDY, SAMPLED, result

from sequoia.measure.bench import wording
from sequoia.measure.bench.bootstrap import Estimate, estimate, median
from sequoia.measure.bench.records import Finding, MethodEntry, Result, Results
from sequoia.measure.bench.summary import Acceptance, Agreement, MethodSummary, summarize

PLAIN, FAST = synthetic.entry("plain"), synthetic.entry("fast", 4, "chain")


def run(*made: Result, findings: tuple[Finding, ...] = (), methods: tuple[MethodEntry, ...] = (PLAIN, FAST)) -> Results:
    settings = tuple(dict.fromkeys(entry.setting for entry in made)) or (GREEDY,)
    prompts = tuple(dict.fromkeys(entry.prompt for entry in made))
    return Results(synthetic.run_entry(methods, settings, prompts), list(made), list(findings))


def summary_of(results: Results, method: str = "fast") -> MethodSummary:
    return next(entry for entry in summarize(results).settings[0].methods if entry.method.name == method)


def pair(prompt: str, plain: float | None, fast: float | None, **options: object) -> list[Result]:
    """Both methods' seconds for the same ten tokens after the first."""
    return [result(name, prompt, seconds, **options) for name, seconds in (("plain", plain), ("fast", fast))]


def test_speedup_is_the_ratio_of_medians_over_the_same_requests():
    made = [*pair("a", 1.0, 0.5), *pair("b", 2.0, 0.8), *pair("c", 6.0, 4.0), result("plain", "d", 100.0)]
    figures = summary_of(run(*made)).overall
    assert figures.requests == 3
    assert figures.speedup.value == pytest.approx(2.0 / 0.8)  # neither of a ratio's mean, nor with d
    assert figures.tokens_per_second.value == pytest.approx(10 / 0.8)
    assert summary_of(run(*made), "plain").overall.speedup == Estimate(1.0, 1.0, 1.0)


def test_an_even_number_of_requests_has_the_middle_two_s_mean():
    figures = summary_of(run(*pair("a", 1.0, 1.0), *pair("b", 3.0, 1.0))).overall
    assert figures.speedup.value == pytest.approx(2.0)
    found = summary_of(run(*pair("a", 1.0, 0.5), *pair("b", 1.0, 0.25))).overall
    assert found.tokens_per_second.value == pytest.approx(30.0)


def test_repeats_are_paired_and_drawn_with_their_prompt():
    made = [*pair("a", 1.0, 0.5), *pair("a", 2.0, 1.0, repeat=1), *pair("b", 8.0, 4.0), result("plain", "b", repeat=1)]
    figures = summary_of(run(*made)).overall
    assert figures.requests == 3
    # Resampled apart from plain, these would have a wide interval.
    assert asdict(figures.speedup) == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})


def test_identical_methods_give_exactly_one():
    rng = np.random.default_rng(0)
    made = [entry for name in "abcdefgh" for entry in pair(name, *[float(rng.uniform(1, 9))] * 2)]
    found = summary_of(run(*made))
    assert found.overall.speedup == Estimate(1.0, 1.0, 1.0)
    assert wording.speedup(found) == "1.00× (1.00–1.00)"


def test_intervals_hold_their_value_and_narrow_with_more_prompts():
    widths = []
    for count in (4, 16, 64, 256):
        rng = np.random.default_rng(1)
        times = rng.uniform(1, 2, size=(count, 2))
        found = summary_of(run(*(entry for row in range(count) for entry in pair(f"p{row}", *times[row].tolist()))))
        speedup = found.overall.speedup
        assert speedup.low <= speedup.value <= speedup.high
        widths.append(speedup.high - speedup.low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[0] / 3


def test_the_same_seed_gives_the_same_figures():
    results = synthetic.results()
    assert summarize(results).to_dict() == summarize(results).to_dict()


def test_a_single_prompt_has_no_interval():
    found = summary_of(run(*pair("a", 1.0, 0.5), *pair("a", 1.2, 0.7, repeat=1)))
    assert found.overall.speedup == Estimate(1.1 / 0.6)
    assert wording.speedup(found) == "1.83× (–)"


def test_the_bootstrap_covers_what_it_says():
    """Of 95% intervals about 95% hold the median they estimate."""
    rng = np.random.default_rng(2)
    samples = [estimate(median, rng.normal(size=(25, 1))) for _ in range(300)]
    covered = np.mean([found.low <= 0 <= found.high for found in samples])
    assert 0.9 <= covered <= 0.99


def test_medians_pass_over_what_is_missing():
    grid = np.array([[[3.0, np.nan], [1.0, 2.0]], [[np.nan, np.nan], [5.0, np.nan]]])
    assert median(grid).tolist() == [2.0, 5.0]


def test_accepted_length_is_tokens_over_passes_of_all_requests():
    made = [result("fast", "a", passes=11), result("fast", "b", tokens=range(100, 130), passes=10)]
    assert summary_of(run(*made)).overall.accepted_length.value == pytest.approx(41 / 21)
    unseen = [replace(entry, passes=None, rows=None) for entry in made]
    assert summary_of(run(*unseen)).overall.accepted_length is None


def test_what_came_at_once_has_no_speed_but_a_first_token():
    figures = summary_of(run(*pair("a", 1.0, None))).overall
    assert (figures.tokens_per_second, figures.speedup) == (None, None)
    assert figures.first_token_seconds.value == pytest.approx(0.1)
    mixed = summary_of(run(*pair("a", 1.0, None), *pair("b", 1.0, 0.5))).overall
    assert mixed.speedup == Estimate(2.0)
    assert mixed.requests == 2


def test_an_answer_without_tokens_has_no_figures():
    empty = replace(result("fast"), token_ids=(), counts=(), times=(), prefill_seconds=None, passes=0)
    figures = summary_of(run(result("plain"), empty)).overall
    assert figures == replace(figures, tokens_per_second=None, speedup=None, first_token_seconds=None)
    assert figures.accepted_length is None


def test_without_plain_there_is_no_speedup():
    summary = summarize(run(result("fast"), methods=(FAST,)))
    assert summary.settings[0].methods[0].overall.speedup is None
    assert not summary.settings[0].has_baseline


def test_categories_and_settings_are_kept_apart():
    made = [*pair("a", 1.0, 0.5), *pair("b", 3.0, 1.0, category="code"), *pair("a", 1.0, 0.1, setting=SAMPLED)]
    summary = summarize(run(*made))
    assert summary.categories == ("chat", "code")
    greedy, sampled = (setting.methods[1] for setting in summary.settings)
    assert [figures.speedup.value for figures in greedy.categories.values()] == pytest.approx([2.0, 3.0])
    assert sampled.overall.speedup.value == pytest.approx(10.0)
    assert list(sampled.categories) == ["chat"]


def test_a_killed_run_is_reported_as_far_as_it_came():
    results = synthetic.results(per_category=2)
    results.results = [entry for entry in results.results if entry.prompt in ("chat-0", "prose-0")][:-3]
    summary = summarize(results)
    assert (summary.prompts_done, len(summary.run.prompts)) == (1, 14)
    assert wording.progress(summary).startswith("1 of 14 prompts")
    assert wording.progress(summarize(synthetic.results())) is None
    nothing = summarize(Results(results.run))
    assert (nothing.settings, nothing.prompts_done) == ((), 0)


def greedy(method: str, prompt: str, last: int = 0) -> Result:
    return result(method, prompt, tokens=(*range(10), last))


def test_outputs_are_the_same_near_ties_or_wrong():
    made = [greedy("plain", prompt) for prompt in "abcd"] + [greedy("fast", "a"), greedy("fast", "b", 1)]
    made += [greedy("fast", "c", 2), greedy("fast", "d", 3)]
    findings = (synthetic.near_tie("fast", "b"), synthetic.fault("fast", "c"))
    found = summary_of(run(*made, findings=findings))
    assert found.agreement == Agreement("plain", same=1, near_ties=1, wrong=2)  # d is wrong although nobody said so
    assert wording.output(found) == "✗ 2 wrong"
    assert found.faults == 1
    assert summary_of(run(*made[:6], findings=findings[:1])).agreement == Agreement("plain", 1, 1, 0)


def test_a_fault_with_the_right_tokens_is_a_fault():
    made = [greedy("plain", "a"), greedy("fast", "a")]
    found = summary_of(run(*made, findings=(replace(synthetic.fault("fast", "a"), kind="reused answer"),)))
    assert found.agreement == Agreement("plain", 1, 0, 0)
    assert wording.output(found) == "✗ 1 fault"
    assert found.is_faulty


@pytest.mark.parametrize(
    "made",
    [
        [result("plain", setting=SAMPLED), result("fast", setting=SAMPLED)],
        [result("plain", "a"), result("fast", "b")],
        [result("fast")],
    ],
)
def test_nothing_is_claimed_where_nothing_can_be_compared(made):
    found = summary_of(run(*made))
    assert found.agreement is None
    assert wording.output(found) == "–"


def test_acceptance_is_summed_by_depth_and_rank():
    made = [
        replace(result("fast", "a"), visits=(5, 2), accepted=((2, 1), (1,))),
        replace(result("fast", "b"), visits=(7,), accepted=((4, 0, 1),)),
        result("fast", "c"),
    ]
    assert summary_of(run(*made)).acceptance == Acceptance(visits=(12, 2), accepted=((6, 1, 1), (1,)))
    assert summary_of(run(result("fast"))).acceptance is None


def test_the_record_is_plain_json():
    results = synthetic.results()
    results.findings += [synthetic.near_tie("chain:4"), synthetic.fault("dynamic:16x4")]
    record = summarize(results).to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))
    assert record["ok"] is False
    assert [entry["temperature"] for entry in record["sampling"]] == [0.0, 0.6]
    first = record["sampling"][0]["methods"][4]
    assert (first["method"], first["tree_size"]) == ("optimal:16x4", 16)
    assert set(first["overall"]["speedup"]) == {"value", "low", "high"}
    assert len(record["faults"]) == len(record["near_ties"]) == 1


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (Estimate(0.98765, 0.9, 1.2), "0.99× (0.90–1.20)"),
        (Estimate(12.34, 9.876, 100.0), "12.3× (9.9–100.0)"),
        (Estimate(1234.5, 999.0, 2000.0), "1,234× (999–2,000)"),
        (None, "–"),
    ],
)
def test_figures_show_three_digits(found, shown):
    assert wording.with_interval(found, "×") == shown


@pytest.mark.parametrize(
    ("name", "spec", "argument"),
    [
        ("chain", "chain:4", "chain"),
        ("specinfer", "specinfer:optimal:16x4", "specinfer"),
        ("transformers", "transformers", "transformers"),
        ("llama.cpp", "llama.cpp:model.gguf", "llama.cpp"),
        ("mine", "mine.py", "mine.py"),
        ("pine", "pine.json", "pine.json"),
        ("k", "kary:4x3", "kary:4x3"),
    ],
)
def test_the_command_names_methods_as_the_command_line_does(name, spec, argument):
    methods = [synthetic.entry("plain"), replace(synthetic.entry(name), spec=spec)]
    command = wording.command(synthetic.run_entry(methods, (GREEDY,), ["a"]))
    assert f"--methods plain,{argument} " in command


def test_the_command_makes_the_run_again():
    run_entry = synthetic.run_entry(
        [synthetic.entry("plain"), replace(synthetic.entry("mine"), spec="dir/mine.py"), synthetic.entry("chain:4")],
        (GREEDY, SAMPLED),
        ["a", "b"],
    )
    run_entry = replace(run_entry, settings={**run_entry.settings, "target": "Qwen3 8B"})
    assert wording.command(run_entry) == (
        "sequoia bench --methods plain,dir/mine.py,chain:4 --temperature 0,0.6 --top-p 0.9 --count 2 "
        "--target 'Qwen3 8B' --draft ngram --dtype fp32 --device cpu --max-tokens 48 --prompt-tokens 128 "
        "--repeats 1 --seed 0 --threads 2 --prompts built-in"
    )
