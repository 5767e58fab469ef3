"""The tune report: well-formed, self-contained, and true to the plan file."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_plans as synthetic
from html_document import Document

from sequoia.errors import FileError, UsageError
from sequoia.measure import tune_picture
from sequoia.measure.tune_page import page, write_report
from sequoia.measure.tune_picture import picture
from sequoia.measure.tune_wording import command, shortened, subject, verdict, workload
from sequoia.tree import records as records_module
from sequoia.tree.option import Prediction
from sequoia.tree.plan import PlanFile

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def full() -> Document:
    return Document(page(synthetic.plan_file()))


@pytest.fixture(scope="module")
def small() -> PlanFile:
    return synthetic.without_draft()


def test_everything_is_on_it(full):
    full.require_whole()
    assert full.tags.count("svg") == 3 + 3 + 2 + 3  # speeds, acceptances, times, trees
    for words in (
        "SmolLM2-135M-Instruct · draft ngram · bf16 · cpu · 2 threads",
        "Intel(R) Xeon(R) Processor @ 2.70GHz",
        "commit c500a1b",
        "200 samples of up to 64 tokens · 98 prompts from built-in · 2026-11-30",
        "temperature 0.6, top_p 0.9",
        "power law, η 0.50, r² 1.000",
        "Several requests at once",
        "* more rows at once than were measured",
        "sequoia tune --draft ngram --dtype bf16",
        "for requests at temperature 0 that share",
    ):
        assert words in full.text


def test_every_option_has_its_prediction_and_the_chosen_one_is_marked():
    file = synthetic.plan_file()
    text = page(replace(file, plans=file.plans[:1], batch=()))
    plan = file.plans[0]
    assert [option.name for option in plan.options] == ["off", "chain 4", "tree 16/5"]
    rows = [row for row in text.split("<tr")[1:] if "mark" in row]
    assert ["chosen" in row for row in rows] == [False, False, True]
    for option, row in zip(plan.options, rows, strict=True):
        found, plain = option.prediction, plan.plain.prediction
        assert option.name in row
        assert f"<td>{found.tokens_per_round:.2f}" in row
        assert f"<td>{1e3 * found.seconds_per_round:.1f}<small>± {1e3 * found.seconds_error:.1f}</small>" in row
        assert f"<td>{found.tokens_per_second:.1f}<small>± {found.tokens_per_second_error:.1f}</small>" in row
        assert f"<td>{plain.seconds_per_token / found.seconds_per_token:.2f}×</td>" in row
    assert "<small>" not in rows[0].split("<td>")[1]  # plain decoding's 1 token is no estimate
    assert "Several requests" not in text


@pytest.mark.parametrize("make", [synthetic.without_draft, synthetic.useless_draft, synthetic.hard])
def test_pages_of_any_plan_are_whole(make):
    made = Document(page(make()))
    made.require_whole()
    assert not {"i", "b"} & set(made.tags)
    assert ("Acceptance by rank" in made.text) == (make is not synthetic.without_draft)
    assert ("not chosen" in made.text) == (make is synthetic.useless_draft)
    if make is synthetic.hard:
        assert made.text.count(synthetic.hard().pair["target"]) >= 3


def test_equal_plans_make_equal_reports(small):
    assert page(small) == page(synthetic.without_draft())
    assert picture(small) == picture(synthetic.without_draft())


def test_the_picture_has_a_block_for_each_plan(small, monkeypatch):
    monkeypatch.setattr(tune_picture, "png", lambda width, height, draw: (width, height))
    file = synthetic.plan_file()
    one, two, off = (
        picture(each) for each in (replace(file, plans=file.plans[:1]), replace(file, plans=file.plans[:2]), small)
    )
    assert one[0] == two[0] == off[0]
    assert two[1] - one[1] == pytest.approx(2 * (one[1] - off[1]))  # without a draft there is one row of plots


def test_page_and_picture_lie_side_by_side_whole_or_not_at_all(tmp_path: Path, small, monkeypatch):
    path = tmp_path / "tune.v1.html"
    write_report(path, small)
    picture_path = tmp_path / "tune.v1.png"
    before = path.read_bytes(), picture_path.read_bytes()
    assert before[0].endswith(b"</html>\n")
    assert before[1].startswith(PNG)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(records_module.os, "replace", full_disk)
        with pytest.raises(FileError, match="No space left"):
            write_report(path, small)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tune.v1.html", "tune.v1.png"]
    assert (path.read_bytes(), picture_path.read_bytes()) == before
    with pytest.raises(FileError, match="cannot write"):
        write_report(tmp_path / "none" / "tune.html", small)
    with pytest.raises(UsageError, match=r"names a picture. Use .html"):
        write_report(tmp_path / "tune.png", small)


def test_lone_surrogates_in_names_do_not_keep_it_from_being_written(tmp_path: Path, small):
    file = replace(
        small, pair=small.pair | {"target": "m\udc80"}, machine={"cpu": "c\udc80"}, data={"prompts": ["p\udc80"]}
    )
    write_report(tmp_path / "tune.html", file)
    assert "m?" in (tmp_path / "tune.html").read_text(encoding="utf-8")


# Words


def test_the_verdict_says_what_was_chosen_and_what_is_as_fast():
    plan = synthetic.plan_file().plans[0]
    assert verdict(plan) == "Fastest by prediction: tree 16/5, 2.44× plain decoding."
    off, chain, tree = plan.options
    close = replace(
        chain, prediction=replace(tree.prediction, seconds_per_round=1.01 * tree.prediction.seconds_per_round)
    )
    assert verdict(replace(plan, options=(off, close, tree))).endswith("As fast within the error: chain 4.")
    slow = Prediction(1.0, 0.0, 1.0, 0.0)
    useless = replace(plan, options=(off, replace(chain, prediction=slow), replace(tree, prediction=slow)))
    assert verdict(useless) == "Fastest by prediction: plain decoding."


def test_the_command_is_one_that_a_shell_reads_back():
    file = synthetic.hard("it's a $name")
    assert shlex.split(command(file))[:4] == ["sequoia", "tune", "--target", "it's a $name"]
    words = shlex.split(command(synthetic.plan_file()))
    assert "--target" not in words  # the default's name is no place to load it from
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert given == {
        "--draft": "ngram",
        "--dtype": "bf16",
        "--device": "cpu",
        "--threads": "2",
        "--temperature": "0,0.6,1",
        "--top-p": "0.9",
        "--count": "98",
        "--samples": "200",
        "--tokens": "64",
        "--prompt-tokens": "128",
        "--seed": "0",
        "--batch": "1,4,16",
        "--prompts": "built-in",
    }


def test_pair_and_data_in_words():
    assert subject({"target": "a", "draft": None, "target_dtype": "bf16", "device": "cuda", "threads": 8}) == (
        "a · no draft · bf16 · cuda"
    )
    assert workload({}) == ""
    assert workload({"samples": 1, "prompts": ["x.jsonl", "y"]}) == "1 sample · prompts from x.jsonl, y"
    assert shortened("a" * 20, 9) == "aaaa…aaaa"
    assert shortened("short", 9) == "short"
