"""The page: well-formed, self-contained, and true to whatever words and names come."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import synthetic
from html_document import Document
from synthetic import GREEDY

from sequoia.errors import FileError
from sequoia.measure.bench.page import page, write_page
from sequoia.measure.bench.picture import draw_round, visible
from sequoia.measure.bench.records import Results, RoundEntry
from sequoia.measure.bench.summary import summarize
from sequoia.tree import records as records_module

HARD_NAME = "a$b$<i>&\"'漢.py"


def document(results: Results) -> Document:
    return Document(page(results, summarize(results)))


@pytest.fixture(scope="module")
def full() -> Document:
    results = synthetic.results()
    results.findings += [synthetic.near_tie("chain:4"), synthetic.fault("dynamic:16x4")]
    return document(results)


def one_prompt() -> Results:
    results = synthetic.results(1, (GREEDY,), synthetic.METHODS[:1])
    run = replace(results.run, prompts=results.run.prompts[:1])
    return Results(run, results.results[:1])


def nothing() -> Results:
    return Results(synthetic.results().run)


def hard() -> Results:
    """Names and words that mean something to HTML, to CSS and to Matplotlib."""
    results = synthetic.results(1, (GREEDY,), [*synthetic.METHODS[:1], (HARD_NAME, 16, "file", 1.2)])
    results.findings.append(synthetic.fault(HARD_NAME))
    results.rounds = [RoundEntry(HARD_NAME, "<p>", (-1, 0, 0), ("<b>", "&", "\ud800"), (1,), "</svg>")]
    return results


@pytest.mark.parametrize("make", [synthetic.results, one_prompt, nothing, hard], ids=lambda make: make.__name__)
def test_every_page_is_well_formed_and_loads_nothing(make):
    made = document(make())
    made.require_whole()
    assert not {"i", "b", "p>"} & set(made.tags)


def test_plots_of_one_page_do_not_share_ids(full):
    assert full.tags.count("svg") >= 5
    assert len({name.split("-")[0] for name in full.ids}) >= 4


def test_everything_is_on_it(full):
    for name, *_ in synthetic.METHODS:
        assert full.text.count(name) > 4
    for words in (*synthetic.CATEGORIES, "temperature 0.6, top-p 0.9", "1 fault", "1 near tie", "✗ 1 fault", "commit"):
        assert words in full.text
    for title in ("Results", "Speedup by category", "Speed", "Tokens per round", "Accepted by depth", "A real round"):
        assert title in full.text
    assert "sequoia bench --methods plain,transformers" in full.text
    assert "token 7 is 'blue' <b>& not 'green'" in full.text


def test_one_prompt_leaves_out_what_it_has_not():
    made = document(one_prompt())
    for title in ("by category", "Tokens per round", "Accepted by depth", "A real round"):
        assert title not in made.text
    assert "No faults and no near ties." in made.text
    assert "–" in made.text


def test_an_unfinished_run_says_so():
    results = synthetic.results()
    results.results = results.results[:8]
    assert "0 of 14 prompts are done" in document(results).text


def test_names_and_words_come_as_they_are(tmp_path):
    results = hard()
    made = document(results)
    assert made.text.count(HARD_NAME) >= 4  # tables and plots, no $ taken for mathematics
    assert "</svg>" in made.text
    assert r"\ud800" in made.text


def test_plots_do_not_touch_the_user_s_style():
    import matplotlib

    matplotlib.rcParams["font.size"] = 31.0
    try:
        assert "31px" not in page(synthetic.results(), summarize(synthetic.results()))
        assert matplotlib.rcParams["font.size"] == 31.0
    finally:
        matplotlib.rcdefaults()


def test_pages_are_equal_for_equal_results():
    first, second = synthetic.results(), synthetic.results()
    assert page(first, summarize(first)) == page(second, summarize(second))


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    results = synthetic.results(1, (GREEDY,))
    summary = summarize(results)
    path = tmp_path / "report.html"
    write_page(path, results, summary)
    before = path.read_text(encoding="utf-8")
    assert before.endswith("</html>\n")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records_module.os, "replace", full_disk)
    with pytest.raises(FileError, match="No space left"):
        write_page(path, results, summary)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8") == before
    with pytest.raises(FileError, match="cannot write"):
        write_page(tmp_path / "none" / "report.html", results, summary)


def test_lone_surrogates_in_names_do_not_keep_the_page_from_being_written(tmp_path):
    results = synthetic.results(1, (GREEDY,), [("m\udc80.py", None, None, 1.0)])
    write_page(tmp_path / "report.html", results, summarize(results))
    assert "m?.py" in (tmp_path / "report.html").read_text(encoding="utf-8")


# The picture


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (" the", "␣the"),
        ("", "∅"),
        (" ", "␣"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("a\u3000b", "a␣b"),
        ("\x00", r"\u0000"),
        ("\u202eabc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
        ("漢字", "漢字"),
    ],
)
def test_every_word_can_be_seen(word, shown):
    assert visible(word) == shown


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of each node."""
    root = ElementTree.fromstring(svg)
    found = []
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("x") is not None:
            x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("size", [1, 2, 16, 64, 160])
@pytest.mark.parametrize("seed", range(3))
def test_nodes_lie_apart_and_inside_the_picture(size, seed):
    svg = draw_round(synthetic.round_entry(size, seed))
    root = ElementTree.fromstring(svg)
    found = boxes(svg)
    assert len(found) == size + 1  # the next token
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(0 <= left < right <= width and 0 <= top < bottom <= height for left, top, right, bottom in found)
    for index, (left, top, right, bottom) in enumerate(found):
        for other in found[:index]:
            assert right < other[0] or other[2] < left or bottom <= other[1] or other[3] <= top


def test_a_large_tree_keeps_its_path_and_counts_the_rest():
    parents = (-1, *([0] * 400), 400, 401)
    words = tuple(f"w{node}" for node in range(len(parents)))
    entry = RoundEntry("wide", "p", parents, words, (400, 401, 402), "end")
    svg = draw_round(entry)
    assert "checked 403 nodes (243 not drawn) and emitted 4 tokens" in svg
    assert all(f"<title>{word}</title>" in svg for word in ("w0", "w400", "w401", "w402", "end"))


def test_a_deep_chain_and_long_words_get_the_room_they_need():
    words = ("x" * 5000, *["漢" * 30] * 40)
    entry = RoundEntry("deep", "p", tuple(range(-1, 40)), words, (), "y")
    svg = draw_round(entry)
    assert max(right - left for left, _, right, _ in boxes(svg)) <= 170
    assert len(svg) < 40_000


def test_the_accepted_path_and_the_next_token_are_marked():
    svg = draw_round(RoundEntry("m", "p", (-1, 0, 0, 2), ("a", "b", "c", "d"), (2,), "e"))
    assert svg.count('stroke-width="3"') == 2  # to c, and on to e
    assert re.findall(r'font-weight="bold">(\w)<', svg) == ["a", "c", "e"]
    assert 'aria-label="one pass of the target checked 4 nodes and emitted 2 tokens: a c and then e"' in svg
