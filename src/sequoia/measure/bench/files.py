"""Methods from files: a user's own function, and lists of methods."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sequoia.engine import Engine
from sequoia.errors import FileError, UsageError
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.method import PLAIN, Method
from sequoia.measure.bench.shared import left_alone

Spec = str | Mapping[str, str]
"""A method on the command line, or an item of a .yaml file."""

_KEYS = ("name", "tree", "verifier", "file")
_LISTS = (".yaml", ".yml")
_ARGUMENTS = ("engine", "prompt", "params", "emit")
_SIGNATURE = f"generate({', '.join(_ARGUMENTS)})"


def user_method(path: Path, engine: Engine, clock: PassClock, name: str | None = None) -> Method:
    """The method in a Python file, named after it. docs/harness.md says what the file holds.

    Raises:
        FileError: the file is missing, or fails while it is imported.
        UsageError: it has no such function, or a constant that is not True or False, or changes what all run with.
    """
    with left_alone(str(path)):
        module = _imported(path)
    generate = getattr(module, "generate", None)
    if not callable(generate):
        raise UsageError(f"{path} has no function {_SIGNATURE}. Add it; docs/harness.md shows one.")
    try:
        inspect.signature(generate).bind(*_ARGUMENTS)
    except TypeError as error:
        raise UsageError(f"{path}: the harness calls {_SIGNATURE}, which does not fit: {error}.") from error
    own_model = _flag(module, path, "OWN_MODEL", False)
    lossless = _flag(module, path, "LOSSLESS", not own_model)
    if not own_model:
        clock.watch(engine.target_model)
    return Method(
        name or path.stem,
        partial(generate, engine),
        same_as=PLAIN if lossless else None,
        spec=str(path),
        own_model=own_model,
    )


def _imported(path: Path) -> Any:
    if not path.is_file():
        raise FileError(f"there is no file {path}. Check the path.")
    name = f"sequoia_method_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileError(f"{path} is no Python file. Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise FileError(f"{path} fails while it is imported: {type(error).__name__}: {error}. Mend it.") from error
    return module


def _flag(module: Any, path: Path, name: str, default: bool) -> bool:
    value = getattr(module, name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{path}: {name} must be True or False, not {value!r:.80}.")
    return value


def read_method_list(path: Path) -> list[Spec]:
    """The methods of a .yaml file: a list of names, or of mappings with the keys name, tree, verifier and file.

    Files in it are looked for beside it.

    Raises:
        FileError: the file is missing, is no YAML, or holds something else; the item is named.
    """
    import yaml

    try:
        items = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}. Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is no YAML: {' '.join(str(error).split())}. Mend it.") from error
    if not isinstance(items, list) or not items:
        raise FileError(f"{path} must hold a list of methods, such as `- optimal:16x4`, and here is {items!r:.80}.")
    return [_item(item, path, number) for number, item in enumerate(items, start=1)]


def _item(item: object, path: Path, number: int) -> Spec:
    try:
        spec = check_spec(item)
    except UsageError as error:
        raise FileError(f"{path}, method {number}: {error}") from error
    if isinstance(spec, str):
        return _beside(path, spec)
    return {key: _beside(path, value) if key in ("tree", "file") else value for key, value in spec.items()}


def _beside(path: Path, value: str) -> str:
    own = path.parent / value
    return str(own) if value.endswith((".py", ".json")) and own.is_file() else value


def check_spec(spec: object) -> Spec:
    """Return `spec` if it is a name, or a mapping with keys that go together.

    Raises:
        UsageError: it is something else; the message names what is wrong.
    """
    if isinstance(spec, str):
        if spec.endswith(_LISTS):
            raise UsageError(f"a list of methods cannot hold another, {spec}. Put its methods into the first.")
        return spec
    if not isinstance(spec, Mapping):
        raise UsageError(f"a method is a name or a mapping with {', '.join(_KEYS)}, not {spec!r:.80}.{_hint(spec)}")
    unknown = next((key for key in spec if key not in _KEYS), None)
    if unknown is not None:
        raise UsageError(f"unknown key {unknown!r}. Known: {', '.join(_KEYS)}.")
    wrong = next((key for key, value in spec.items() if not isinstance(value, str) or not value), None)
    if wrong is not None:
        raise UsageError(f"{wrong} must be text that is not empty, not {spec[wrong]!r:.80}.{_hint(spec[wrong])}")
    if ("tree" in spec) == ("file" in spec) or ("file" in spec and "verifier" in spec):
        found = ", ".join(spec) or "nothing"
        raise UsageError(
            f"a method is a tree, maybe with a verifier, or a file, and here is {found}. Give one of them."
        )
    return spec


def _hint(value: object) -> str:
    return ' YAML reads off as False: write "off".' if value is False else ""


def is_method_list(spec: object) -> bool:
    return isinstance(spec, str) and spec.endswith(_LISTS)
