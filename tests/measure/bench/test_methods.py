"""What a method can be given as, and what is said when it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_engine import PROMPTS, answer, tiny_engine, write_method

from sequoia.engine import Engine
from sequoia.errors import FileError, UsageError
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.method import Method
from sequoia.measure.bench.methods import NAMED, build_method, build_methods
from sequoia.params import SamplingParams
from sequoia.tree.latency import LatencyProfile, Timing
from sequoia.tree.option import Option, Prediction
from sequoia.tree.plan import Plan, PlanFile
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

GREEDY = SamplingParams(max_tokens=10, temperature=0)
COPY = "emit(prompt[: params.max_tokens])"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine("ngram")


def built(engine: Engine, *specs: str | Mapping[str, str]) -> tuple[Method, ...]:
    return build_methods(specs, engine, PassClock(engine.target))


@pytest.mark.parametrize(
    ("spec", "size", "kind", "origin"),
    [
        ("chain", 5, "chain", "chain:4"),
        ("chains", 17, "chains", "chains:4x4"),
        ("beam", 17, "beam", "beam:4x4"),
        ("optimal", 16, "optimal", "optimal:16x4"),
        ("dynamic", 16, "dynamic", "dynamic:16x4"),
        ("sequoia", 16, "optimal", "sequoia:optimal:16x4"),
        ("specinfer", 16, "optimal", "specinfer:optimal:16x4"),
        ("spectr", 16, "optimal", "spectr:optimal:16x4"),
        ("sampler-match", 16, "optimal", "sampler-match:optimal:16x4"),
        ("chain:2", 3, "chain", "chain:2"),
        ("dynamic:8x3x2", 8, "dynamic", "dynamic:8x3x2"),
        ("specinfer:chains:4x2", 9, "chains", "specinfer:chains:4x2"),
        ("spectr:kary:2x3", 15, "kary", "spectr:kary:2x3"),
        ("sampler_match:kary:2x3", 15, "kary", "sampler_match:kary:2x3"),
        ("sequoia:beam:4x6", 25, "beam", "sequoia:beam:4x6"),
    ],
)
def test_trees(engine: Engine, spec: str, size: int, kind: str, origin: str) -> None:
    plain, method = built(engine, spec)
    assert (plain.name, plain.same_as, plain.tree_size, plain.tree_kind) == ("plain", None, None, None)
    assert (method.name, method.same_as) == (spec, "plain")
    assert (method.tree_size, method.tree_kind, method.spec) == (size, kind, origin)
    assert not method.own_model


def test_every_short_name_runs(engine: Engine) -> None:
    prompt = PROMPTS[0].token_ids(engine.tokenizer)
    plain, *others = built(engine, *NAMED)
    assert [plain.name, *(method.name for method in others)] == list(NAMED)
    assert {tuple(answer(method, prompt, GREEDY)) for method in others} == {tuple(answer(plain, prompt, GREEDY))}


def test_the_verifier_is_the_named_one(engine: Engine) -> None:
    with pytest.raises(UsageError, match="a dynamic tree's children are chosen, and this verifier needs them drawn"):
        built(engine, "specinfer:dynamic:8x3")


def test_plain_keeps_its_place(engine: Engine) -> None:
    assert [method.name for method in built(engine, "chain", "plain")] == ["chain", "plain"]


def test_nothing_else_is_called_plain(engine: Engine, tmp_path: Path) -> None:
    """All speedups are over it."""
    TreeShape.kary(2, 2).save(tmp_path / "plain.json")
    named: list[str | Mapping[str, str]] = [{"name": "plain", "tree": "chain:2"}, str(tmp_path / "plain.json")]
    for spec in [*named, write_method(tmp_path, "plain", COPY)]:
        with pytest.raises(UsageError, match=r"plain is plain decoding, .* and .* has that name too"):
            built(engine, spec)
    assert [method.name for method in built(engine, {"name": "plain", "tree": "off"})] == ["plain"]


def test_a_shape_file_is_named_after_itself(engine: Engine, tmp_path: Path) -> None:
    TreeShape.kary(2, 2).save(tmp_path / "pine.json")
    path = str(tmp_path / "pine.json")
    _, pine, other = built(engine, path, f"specinfer:{path}")
    assert (pine.name, pine.tree_size, pine.tree_kind, pine.spec) == ("pine", 7, "file", path)
    assert (other.name, other.spec) == (f"specinfer:{path}", f"specinfer:{path}")


def _plan_file(engine: Engine) -> PlanFile:
    off = Option("off", TreeShape.root_only(), Prediction(1.0, 0.0, 2.0, 0.1))
    tree = Option("tree", TreeShape.kary(2, 2), Prediction(2.5, 0.1, 2.5, 0.1))
    chain = Option("chain", TreeShape.chain(3), Prediction(2.5, 0.1, 2.5, 0.1))
    latency = LatencyProfile({64: {1: Timing(2.0, 0.1)}}, {}, {})
    profile = AcceptanceProfile([[0.5, 0.2]])
    plans = (Plan({"temperature": 0.0}, profile, (off, tree)), Plan({"temperature": 1.0}, profile, (off, chain)))
    return PlanFile(engine.pair, {}, {}, latency, plans)


def test_a_plan_is_a_method(engine: Engine, tmp_path: Path) -> None:
    """The tree of each temperature, in the rounds that `sequoia generate` would run."""
    file = _plan_file(engine)
    file.save(tmp_path / "mine.json")
    prompt = PROMPTS[0].token_ids(engine.tokenizer)
    engine_with_plan = engine.with_tree("auto", plan=file)
    plain, from_file = built(engine, f"plan:{tmp_path / 'mine.json'}")
    for method, origin in (
        (from_file, f"plan:{tmp_path / 'mine.json'}"),
        (built(engine_with_plan, "plan")[1], "plan"),
        (built(engine_with_plan, "sequoia:plan")[1], "sequoia:plan"),
    ):
        assert (method.same_as, method.tree_size, method.tree_kind) == ("plain", 7, "plan")
        assert method.spec == f"{origin} (tree 7/2, chain 3)"
        assert answer(method, prompt, GREEDY) == answer(plain, prompt, GREEDY)
    sizes: list[int] = []
    for temperature in (0, 1):
        params = SamplingParams(max_tokens=10, temperature=temperature, seed=1)
        from_file.generate(prompt, params, lambda round_: sizes.append(round_.tree.shape.size))
    assert {7, 4} <= set(sizes)


def test_a_plan_there_is_not_says_so(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"method plan: this pair has no plan yet\. Run `sequoia tune`"):
        built(engine, "plan")
    replace(_plan_file(engine), pair=engine.pair | {"target": "other"}).save(tmp_path / "mine.json")
    with pytest.raises(FileError, match=r"mine\.json was tuned for other"):
        built(engine, f"plan:{tmp_path / 'mine.json'}")


@pytest.mark.parametrize("spec", ["nonsense", "nonsense:4", "specinfer:nonsense", "llama", ""])
def test_an_unknown_method_gets_the_list(engine: Engine, spec: str) -> None:
    with pytest.raises(UsageError, match=r"unknown method .* There are plain, chain, .*transformers-lookup.*\.yaml"):
        built(engine, spec)


@pytest.mark.parametrize(("spec", "message"), [("chain:0", "tree chain:0"), ("optimal:16", "no such form")])
def test_a_tree_out_of_range_says_so(engine: Engine, spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        built(engine, spec)


def test_a_name_comes_once(engine: Engine) -> None:
    with pytest.raises(UsageError, match="method chain is named twice"):
        built(engine, "chain", "beam", "chain")


# Files with a function


def test_a_function_in_a_file(engine: Engine, tmp_path: Path) -> None:
    _, method = built(engine, write_method(tmp_path, "copy", COPY))
    assert (method.name, method.same_as, method.own_model) == ("copy", "plain", False)
    assert answer(method, [7, 8, 9], GREEDY) == [7, 8, 9]


@pytest.mark.parametrize(
    ("constants", "same_as", "own_model"),
    [
        ("LOSSLESS = False", None, False),
        ("OWN_MODEL = True", None, True),
        ("OWN_MODEL = LOSSLESS = True", "plain", True),
    ],
)
def test_what_a_file_declares(
    engine: Engine, tmp_path: Path, constants: str, same_as: str | None, own_model: bool
) -> None:
    path = Path(write_method(tmp_path, "copy", COPY))
    path.write_text(f"{constants}\n{path.read_text()}")
    _, method = built(engine, str(path))
    assert (method.same_as, method.own_model) == (same_as, own_model)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("x = 1", UsageError, r"no function generate\(engine, prompt, params, emit\)"),
        ("def generate(prompt): pass", UsageError, "does not fit: too many positional arguments"),
        ("def generate(*a): pass\nLOSSLESS = 'no'", UsageError, "LOSSLESS must be True or False, not 'no'"),
        ("import nonsense_that_is_not_there", FileError, "fails while it is imported: ModuleNotFoundError"),
        ("def generate(:", FileError, "fails while it is imported: SyntaxError"),
        ("raise SystemExit(0)", FileError, "fails while it is imported: SystemExit"),
        ("import torch\ntorch.set_default_dtype(torch.float64)", UsageError, "mine.py changes torch's default dtype"),
        (None, FileError, "there is no file .*mine.py"),
    ],
)
def test_a_file_that_is_no_method(
    engine: Engine, tmp_path: Path, source: str | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(error, match=message):
        built(engine, str(path))


# Lists of methods


def test_a_list_of_methods(engine: Engine, tmp_path: Path) -> None:
    write_method(tmp_path, "copy", COPY)
    TreeShape.chain(2).save(tmp_path / "short.json")
    (tmp_path / "mine.yaml").write_text(
        "- beam:2x3\n"
        "- {name: wide, tree: 'kary:3x2'}\n"
        "- {name: drawn, tree: 'kary:3x2', verifier: sampler-match}\n"
        "- {tree: 'kary:2x2', verifier: spectr}\n"
        "- {name: mine, file: copy.py}\n"
        "- short.json\n"
    )
    methods = built(engine, "chain", str(tmp_path / "mine.yaml"))
    assert [(method.name, method.tree_size) for method in methods] == [
        ("plain", None),
        ("chain", 5),
        ("beam:2x3", 7),
        ("wide", 13),
        ("drawn", 13),
        ("spectr:kary:2x2", 7),
        ("mine", None),
        ("short", 3),
    ]
    assert methods[4].spec == "sampler-match:kary:3x2"
    assert methods[6].spec == str(tmp_path / "copy.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain", "must hold a list of methods"),
        ("[]", "must hold a list of methods"),
        ("- [", "is no YAML"),
        ("- beam\n- 3", "method 2: a method is a name or a mapping with name, tree, verifier, file, not 3"),
        ("- {tree: 'chain:2', colour: red}", "method 1: unknown key 'colour'. Known: name, tree, verifier, file"),
        ("- off", r'method 1: .*, not False. YAML reads off as False: write "off".'),
        ("- {tree: off}", r'method 1: tree must be .*, not False. YAML reads off as False: write "off".'),
        ("- {tree: 3}", "method 1: tree must be text that is not empty, not 3"),
        ("- {name: x}", "method 1: a method is a tree, maybe with a verifier, or a file, and here is name"),
        ("- {tree: 'chain:2', file: x.py}", "method 1: .* and here is tree, file"),
        ("- {file: x.py, verifier: spectr}", "method 1: .* and here is file, verifier"),
        ("- other.yaml", "method 1: a list of methods cannot hold another"),
    ],
)
def test_a_list_that_is_none(engine: Engine, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(FileError, match=message):
        built(engine, str(tmp_path / "mine.yaml"))


def test_a_missing_list(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read .*mine.yaml: No such file"):
        built(engine, str(tmp_path / "mine.yaml"))


def test_mappings_from_python_are_checked(engine: Engine) -> None:
    assert build_method({"name": "x", "tree": "chain:2"}, engine, PassClock(engine.target)).name == "x"
    with pytest.raises(UsageError, match="unknown key 'size'"):
        built(engine, {"size": "3"})
