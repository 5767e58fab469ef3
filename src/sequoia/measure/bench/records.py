"""Raw results of a comparison: one JSON line each, in a file that a killed run goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sequoia.errors import FileError
from sequoia.measure.lock import locked

FILE_NAME = "results.jsonl"
FORMAT, VERSION = "sequoia-bench", 1
NEAR_TIE = "near tie"


@dataclass(frozen=True)
class Setting:
    """The sampling parameters that are varied."""

    temperature: float
    top_p: float = 1.0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")


@dataclass(frozen=True)
class MethodEntry:
    """A method as the results name it."""

    name: str
    same_as: str | None  # the method whose greedy output it must repeat; None where nothing is claimed
    tree_size: int | None = None  # nodes, the root included; None without a tree
    tree_kind: str | None = None  # "optimal", "chain", "dynamic", …; None without a tree
    spec: str = ""  # what it was built from: "specinfer:optimal:16x4", a file, …


@dataclass(frozen=True)
class RunEntry:
    """What is compared, and on what: the file's first line. A run goes on only where all of it is the same."""

    settings: Mapping[str, Any]  # target, draft, dtype, device, max_tokens, prompt_tokens, sources, repeats, seed, …
    machine: Mapping[str, Any]  # cpu, cores, threads, gpu, memory, versions, commit
    methods: tuple[MethodEntry, ...]
    sampling: tuple[Setting, ...]
    prompts: tuple[str, ...]  # ids, in the order they are run


@dataclass(frozen=True)
class Result:
    """One request, by one method. All times count from its start, in seconds."""

    method: str
    setting: Setting
    prompt: str  # id
    category: str
    repeat: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    counts: tuple[int, ...]  # tokens of each emission
    times: tuple[float, ...]  # when each emission came
    prefill_seconds: float | None  # end of the target's pass over the last of the prompt; None where not seen
    passes: int | None  # of the target, from the one that reads the prompt's end; None where they cannot be seen
    rows: int | None  # of all its passes together, the prompt's not counted
    finish: str  # "stop" at end-of-text, "length", or "early": neither
    first_token_passes: int | None = None  # those of `passes` that came before the first emission
    drafted_tokens: int | None = None
    visits: tuple[int, ...] = ()  # by depth, as in `Stats`
    accepted: tuple[tuple[int, ...], ...] = ()  # by depth and rank, as in `Stats`

    @property
    def key(self) -> tuple[str, Setting, str, int]:
        return self.method, self.setting, self.prompt, self.repeat

    @property
    def first_token_seconds(self) -> float | None:
        """None where no token came."""
        return self.times[0] if self.times else None

    @property
    def decode_seconds(self) -> float:
        """From the first emission to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    @property
    def decoded_tokens(self) -> int:
        """Tokens emitted in `decode_seconds`."""
        return sum(self.counts[1:])

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding alone; None where everything came at once."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per pass of the target, the next token included: plain decoding has 1."""
        return len(self.token_ids) / self.passes if self.passes else None


@dataclass(frozen=True)
class Finding:
    """Something the harness noticed about a request."""

    method: str
    setting: Setting
    prompt: str
    repeat: int
    kind: str  # "near tie" is no fault; all others of `checks` are
    detail: str  # a sentence for people

    @property
    def is_fault(self) -> bool:
        return self.kind != NEAR_TIE


@dataclass(frozen=True)
class RoundEntry:
    """A real round, to be drawn."""

    method: str
    prompt: str
    parents: tuple[int, ...]
    words: tuple[str, ...]  # by node, the root's first
    path: tuple[int, ...]  # accepted nodes
    next_word: str


@dataclass
class Results:
    """Everything in a results file."""

    run: RunEntry
    results: list[Result] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    rounds: list[RoundEntry] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_fault]


_Line = Result | Finding | RoundEntry
_KINDS: dict[str, type[Result] | type[Finding] | type[RoundEntry]] = {
    "result": Result,
    "finding": Finding,
    "round": RoundEntry,
}


class ResultsFile:
    """The file that results are appended to; what belongs to one prompt is written through before the next starts."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME

    def create(self, run: RunEntry) -> None:
        """Start a new file, and its folder if need be. It appears with its first line or not at all.

        Raises:
            FileError: it cannot be written.
        """
        line = {"entry": "run", "format": FORMAT, "version": VERSION, **asdict(run)}
        part = self.path.with_name(f".{FILE_NAME}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(_dumped(line), encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def locked(self) -> AbstractContextManager[None]:
        """No other process writes to the file meanwhile; see `locked`."""
        return locked(self.path.parent, "Wait for it, or give another --out.")

    def append(self, entries: Iterable[_Line]) -> None:
        """Add what belongs to one prompt in one write.

        Raises:
            FileError: it cannot be written.
        """
        lines = [_dumped({"entry": _kind_of(entry), **asdict(entry)}) for entry in entries]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def mend(self) -> None:
        """Cut off half a last line, which a killed run may leave, so that the next one starts a line of its own.

        Raises:
            FileError: the file cannot be read or written.
        """
        content = self._content()
        whole = content.rfind(b"\n") + 1
        try:
            if whole < len(content):
                os.truncate(self.path, whole)
        except OSError as error:
            raise self._unwritable(error) from error

    def load(self) -> Results:
        """Read everything but half a last line, which may be being written. Findings met twice count once.

        Raises:
            FileError: the file is missing or damaged; the line is named.
        """
        content = self._content()
        whole = content[: content.rfind(b"\n") + 1]
        lines = [self._parsed(number, line) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)]
        if not lines or not isinstance(lines[0], RunEntry):
            raise FileError(f"{self.path} does not start with the description of a run. Choose another folder.")
        results = Results(lines[0])
        for number, entry in enumerate(lines[1:], start=2):
            if isinstance(entry, RunEntry):
                raise FileError(f"{self.path}, line {number} describes a second run. Choose another folder.")
            home: list[Any] = getattr(results, _HOMES[type(entry)])
            home.append(entry)
        results.findings = list(dict.fromkeys(results.findings))
        return results

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise FileError(f"cannot read {self.path}: {error.strerror or error}. Check the path.") from error

    def _unwritable(self, error: OSError) -> FileError:
        return FileError(f"cannot write {self.path}: {error.strerror or error}. Choose another folder.")

    def _parsed(self, number: int, line: bytes) -> RunEntry | _Line:
        try:
            return _entry(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{self.path}, line {number} is no result: {error}. Choose another folder.") from error


_HOMES: dict[type, str] = {Result: "results", Finding: "findings", RoundEntry: "rounds"}


def _dumped(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n"


def _kind_of(entry: _Line) -> str:
    return next(kind for kind, cls in _KINDS.items() if isinstance(entry, cls))


def _entry(record: dict[str, Any]) -> RunEntry | _Line:
    kind = record.pop("entry")
    if kind == "run":
        found = record.pop("format"), record.pop("version")
        if found != (FORMAT, VERSION):
            raise ValueError(f"format and version must be {FORMAT} {VERSION}, not {found[0]} {found[1]}")
        methods = tuple(MethodEntry(**method) for method in record.pop("methods"))
        sampling = tuple(Setting(**setting) for setting in record.pop("sampling"))
        return RunEntry(methods=methods, sampling=sampling, **_frozen(record))
    if "setting" in record:
        record["setting"] = Setting(**record["setting"])
    return _KINDS[kind](**_frozen(record))


def _frozen(record: dict[str, Any]) -> dict[str, Any]:
    """Lists, as JSON has them, back to tuples."""
    return {key: _tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def _tuple(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(value) if isinstance(value, list) else value for value in values)
