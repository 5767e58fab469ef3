"""What a start of `sequoia generate` takes up to its first token, in its parts, beside what imports alone take.

    python benchmarks/start.py [--target MODEL] [--dtype FORMAT] [--repeats 9]

Every figure is the median over fresh processes, all kinds in turn, in ms. "Proved" is a model's first start, without a
record of its proof; "on record" is the start after it. Converted models and plans are the user's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

_PROMPT = "Hi"
_IMPORTS = {
    "python alone": "pass",
    "torch": "import torch",
    "torch, transformers": "import torch, transformers",
    "torch, transformers' models": "import torch, transformers.modeling_utils",
}
_KINDS = ("proved", "on record")
_STARTED = "SEQUOIA_BENCHMARK_STARTED"

Times = dict[str, list[float]]  # by row, in seconds


def main() -> None:
    options = _options()
    if options.parts:
        print(json.dumps(_parts(options)))
        return
    imports, starts, parts = defaultdict(list), defaultdict(list), {kind: defaultdict(list) for kind in _KINDS}
    for _ in range(options.repeats):
        for name, code in _IMPORTS.items():
            imports[name].append(_first_byte([sys.executable, "-c", f"{code}\nprint()"], os.environ))
        with _cache() as environment:
            for kind in _KINDS:
                starts[kind].append(_first_byte(_command(options), environment))
        with _cache() as environment:
            for kind in _KINDS:
                for name, seconds in _run_parts(options, environment).items():
                    parts[kind][name].append(seconds)
    _print(imports, starts, parts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _command(options: argparse.Namespace) -> list[str]:
    target = [] if options.target is None else ["--target", options.target]
    generate = [sys.executable, "-m", "sequoia", "generate", _PROMPT, "--max-tokens", "1"]
    return [*generate, "--dtype", options.dtype, *target]


def _first_byte(command: list[str], environment: Mapping[str, str]) -> float:
    """Seconds from the start of a process to the first byte on its stdout."""
    started = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"nothing came from: {' '.join(command)}")
        return time.perf_counter() - started


@contextmanager
def _cache() -> Iterator[dict[str, str]]:
    """An environment whose cache is the user's but for proofs, of which it holds none yet."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sequoia").mkdir()
        for entry in (*own.glob("*"), *own.glob("sequoia/*")):
            if entry.name not in ("sequoia", "proved"):
                (Path(folder) / entry.relative_to(own)).symlink_to(entry)
        yield {**os.environ, "XDG_CACHE_HOME": folder}


def _run_parts(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, float]:
    command = [sys.executable, *sys.argv, "--parts"]
    environment = {**environment, _STARTED: repr(time.time())}
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    times: dict[str, float] = json.loads(found.stdout)
    return times


class _Stopwatch:
    """Seconds by part; time in a part within another counts for the inner one."""

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._since = started

    def end(self, name: str) -> None:
        """What passed since the last end was this."""
        now = time.time()
        self.seconds[name] += now - self._since
        self._since = now

    def watch(self, owner: Any, function: str, name: str, around: str) -> None:
        """Have the function's calls count as a part, within another."""
        original: Callable[..., Any] = getattr(owner, function)

        def timed(*arguments: Any, **named: Any) -> Any:
            self.end(around)
            try:
                return original(*arguments, **named)
            finally:
                self.end(name)

        setattr(owner, function, timed)


def _parts(options: argparse.Namespace) -> dict[str, float]:
    """One start in this process, in the steps of `sequoia generate`: seconds by part."""
    watch = _Stopwatch(float(os.environ[_STARTED]))
    from sequoia.app import cli  # noqa: F401
    from sequoia.app.waiting import uncollected

    watch.end("python, command line")
    with uncollected():
        import torch  # noqa: F401

        watch.end("import torch")
        from sequoia.engine import load
        from sequoia.model import ready
        from sequoia.model.threads import set_threads
    watch.end("import the rest")
    rest, proof = "draft, tree, plan", "prove what is packed"
    watch.watch(ready, "_page", "find the record", rest)
    watch.watch(ready, "_load", "load modules", rest)
    watch.watch(ready, "probed", "probe", rest)
    watch.watch(ready.Page, "describe", "describe for the record", rest)
    watch.watch(ready, "settled", proof, rest)
    watch.watch(ready.CausalLM, "settle", "pack or quantise", proof)
    watch.watch(ready, "_keep", "write the record", rest)
    watch.watch(ready, "read_tokenizer", "tokenizer", rest)
    watch.watch(ready.Page, "model", "read weights", rest)
    set_threads(None)
    engine = load(options.target, dtype=options.dtype)
    watch.end(rest)
    _first_token(engine)
    watch.end("first token")
    return {**watch.seconds, "all": sum(watch.seconds.values())}


def _first_token(engine: Any) -> None:
    from sequoia.params import SamplingParams

    template = getattr(engine.tokenizer, "chat_template", None)
    prompt: Any = _PROMPT if template is None else [{"role": "user", "content": _PROMPT}]
    next(iter(engine.stream(prompt, SamplingParams(max_tokens=1))))


def _print(imports: Times, starts: Times, parts: Mapping[str, Times]) -> None:
    from common import machine

    print(machine())
    print(f"\n{'process, until its first byte of output':<42}{'median':>8}{'least':>8}")
    for name, seconds in imports.items():
        print(f"{name:<42}{1e3 * median(seconds):8.0f}{1e3 * min(seconds):8.0f}")
    for kind, seconds in starts.items():
        print(f"{'sequoia generate, ' + kind:<42}{1e3 * median(seconds):8.0f}{1e3 * min(seconds):8.0f}")
    proved, on_record = (starts[kind] for kind in _KINDS)
    ratios = [after / before for before, after in zip(proved, on_record, strict=True)]
    print(f"on record / proved: {median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
    print(f"\n{'part of a start':<42}" + "".join(f"{kind:>12}" for kind in _KINDS))
    for name in dict.fromkeys(name for kind in _KINDS for name in parts[kind]):
        figures = (parts[kind].get(name) for kind in _KINDS)
        print(f"{name:<42}" + "".join(f"{1e3 * median(found):12.0f}" if found else " " * 11 + "–" for found in figures))


if __name__ == "__main__":
    main()
