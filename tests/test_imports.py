"""The house's rules about imports: arrows run one way, torch and transformers stay in their rooms, only app/ prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sequoia"

# A module may import from lower layers, and from its own package; tree and model do not know each other.
LAYERS = {
    "errors": 0,
    "params": 1,
    "tree": 2,
    "model": 2,
    "speculate": 3,
    "draft": 4,
    "text": 5,
    "planning": 6,
    "engine": 7,
    "measure": 8,
    "training": 9,
    "app": 10,
    "__main__": 11,
}


def room_of(module: str) -> str:
    """The part of the house a module of `sequoia` belongs to; "" is the package itself, which is its front door."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported anywhere in the file, under TYPE_CHECKING and in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [alias.name for alias in node.names]
            # `from sequoia import tree` names a room, `from sequoia.tree import x` is in it already.
            yield from ((node.lineno, f"{origin}.{name}" if origin == "sequoia" else origin) for name in names)


def objection(module: str, imported: str) -> str | None:
    """What is wrong with `module` importing `imported`, if anything."""
    room, top = room_of(module), imported.split(".")[0]
    if top == "torch" and room == "tree":
        return "torch under tree/"
    if top == "transformers" and room not in ("model", "text"):
        return "transformers outside model/ and text.py"
    if top != "sequoia" or room == "":
        return None
    other = room_of(imported)
    if other == "__version__" or other == room:
        return None
    if other not in LAYERS:
        return f"{imported} is the front door, not a room"
    return None if LAYERS[other] < LAYERS[room] else f"{room} must not import {other}"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The broken rules of one file as "line: rule"."""
    tree = ast.parse(source)
    room = room_of(module)
    found = [f"1: {room} is in no layer"] if room and room not in LAYERS else []
    if not found:
        imports = imported_modules(tree, module, is_package)
        found = [f"{line}: {text}" for line, name in imports if (text := objection(module, name))]
    prints = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "print")
    return found + [f"{node.lineno}: print outside app/" for node in prints if room != "app"]


def module_name(file: Path) -> str:
    parts = ("sequoia", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_run_one_way(file: Path) -> None:
    assert violations(file.read_text(encoding="utf-8"), module_name(file), file.name == "__init__.py") == []


def test_there_is_something_to_check() -> None:
    assert len(list(SOURCE.rglob("*.py"))) > len(LAYERS)


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("sequoia.tree.shape", "import torch", "1: torch under tree/"),
        ("sequoia.tree.shape", "def f():\n    from torch.nn import Module", "2: torch under tree/"),
        ("sequoia.speculate.session", "import transformers", "1: transformers outside model/ and text.py"),
        (
            "sequoia.engine",
            "if TYPE_CHECKING:\n    from transformers import PreTrainedModel",
            "2: transformers outside model/ and text.py",
        ),
        ("sequoia.errors", "from sequoia.params import SamplingParams", "1: errors must not import params"),
        ("sequoia.tree.shape", "from sequoia.model.loading import load_model", "1: tree must not import model"),
        ("sequoia.model.loading", "import sequoia.tree.shape", "1: model must not import tree"),
        ("sequoia.speculate.session", "from sequoia.draft import ngram_draft", "1: speculate must not import draft"),
        ("sequoia.speculate.session", "from sequoia import draft", "1: speculate must not import draft"),
        ("sequoia.speculate.session", "from ..draft.ngram_draft import x", "1: speculate must not import draft"),
        ("sequoia.speculate.session", "from .. import text", "1: speculate must not import text"),
        ("sequoia.planning.planned", "from sequoia.engine import Engine", "1: planning must not import engine"),
        ("sequoia.engine", "from .measure import tune", "1: engine must not import measure"),
        ("sequoia.engine", "import sequoia.app.cli", "1: engine must not import app"),
        ("sequoia.measure.bench", "from sequoia import load", "1: sequoia.load is the front door, not a room"),
        ("sequoia.measure.bench", "import sequoia", "1: sequoia is the front door, not a room"),
        ("sequoia.newroom.x", "", "1: newroom is in no layer"),
        ("sequoia.measure.bench", "x = 1\nprint(x)", "2: print outside app/"),
    ],
)
def test_the_check_can_fail(module: str, source: str, rule: str) -> None:
    assert violations(source, module) == [rule]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sequoia.draft.ngram_draft", "from sequoia.speculate.sampling import draw"),
        ("sequoia.speculate.session", "from sequoia.speculate.verify import verify\nimport torch"),
        ("sequoia.speculate.session", "from . import verify\nfrom .stats import Stats"),
        ("sequoia.text", "from transformers import AutoTokenizer\nfrom sequoia.errors import UsageError"),
        ("sequoia.app.cli", "import sequoia.engine\nfrom sequoia import __version__\nprint(__version__)"),
        ("sequoia", "from sequoia.engine import load\nfrom .params import SamplingParams"),
    ],
)
def test_the_check_lets_the_right_way_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert violations("from .profile import x", "sequoia.tree", is_package=True) == []
    assert violations("from ..model import x", "sequoia.tree", is_package=True) == ["1: tree must not import model"]
