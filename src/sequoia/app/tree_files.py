"""Files that hold a tree, a plan or acceptance rates: ours and other tools'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sequoia.app.output import note
from sequoia.errors import FileError, UsageError

if TYPE_CHECKING:
    from sequoia.tree.plan import Plan, PlanFile
    from sequoia.tree.profile import AcceptanceProfile
    from sequoia.tree.shape import TreeShape


def load(path: Path) -> TreeShape | AcceptanceProfile | PlanFile:
    """What a file holds, whichever tool wrote it.

    Raises:
        FileError: it is missing, damaged, or holds nothing of these; the message names the first wrong entry.
    """
    from sequoia.tree.formats import TORCH_SUFFIXES
    from sequoia.tree.records import build, load_record

    if path.suffix not in TORCH_SUFFIXES:
        return load_record(path, _read)
    from sequoia.model.torch_files import load_data  # torch takes a second to import

    return build(path, load_data(path), _read)


def load_tree(path: Path) -> TreeShape | PlanFile:
    """The tree or the plan in a file. FileError if it holds neither, as in `load`."""
    from sequoia.tree.profile import AcceptanceProfile

    content = load(path)
    if isinstance(content, AcceptanceProfile):
        raise FileError(f"{path} holds acceptance rates, not a tree. Plan one: sequoia tree optimal.")
    return content


def _read(record: Any) -> TreeShape | AcceptanceProfile | PlanFile:
    from sequoia.tree.formats import read
    from sequoia.tree.plan import PlanFile

    if isinstance(record, Mapping) and record.get("format") == "sequoia-plan":
        return PlanFile.from_dict(record)
    return read(record)


def choose_plan(plan_file: PlanFile, temperature: float | None) -> Plan:
    """The plan for a temperature, by default the first one; a note tells of the others.

    Raises:
        UsageError: there is none for it.
    """
    planned = [plan.params["temperature"] for plan in plan_file.plans]
    if temperature is None:
        if len(planned) > 1:
            note(f"for temperature {planned[0]:g}; there are plans for {_listed(planned)}: --temperature")
        return plan_file.plans[0]
    if temperature not in planned:
        raise UsageError(f"no plan for temperature {temperature:g}. There are plans for {_listed(planned)}.")
    return plan_file.plans[planned.index(temperature)]  # whatever its other parameters are


def _listed(temperatures: list[float]) -> str:
    return ", ".join(f"{temperature:g}" for temperature in dict.fromkeys(temperatures))


def save_shape(shape: TreeShape, path: Path, kind: str | None) -> str:
    """Write a tree in a format, by default the one its suffix tells; returns the format's name.

    Raises:
        UsageError: only growmaps are torch files, and only torch files are growmaps.
        FileError: it cannot be written; then nothing is.
    """
    from sequoia.tree.formats import TORCH_SUFFIXES, WRITERS
    from sequoia.tree.records import save_bytes, save_record

    is_torch = path.suffix in TORCH_SUFFIXES
    kind = kind or ("growmap" if is_torch else "sequoia")
    if (kind == "growmap") != is_torch:
        remedy = f"Name it {path.stem}.pt, or use --to umbrella." if kind == "growmap" else "Use another suffix."
        raise UsageError(f"a growmap is a torch file, any other format is JSON; {path} would not be. {remedy}")
    record = WRITERS[kind](shape)
    if is_torch:
        from sequoia.model.torch_files import to_bytes

        save_bytes(path, to_bytes(record))
    else:
        save_record(path, record)
    return kind


def save_profile(profile: AcceptanceProfile, path: Path, kind: str | None) -> str:
    """Write acceptance rates as a profile of ours; returns a line about them.

    Raises:
        UsageError: another format or a torch file is asked for.
        FileError: it cannot be written; then nothing is.
    """
    from sequoia.tree.formats import TORCH_SUFFIXES

    if kind not in (None, "sequoia") or path.suffix in TORCH_SUFFIXES:
        raise UsageError("acceptance rates become a profile of ours, in JSON, and nothing else.")
    profile.save(path)
    rejected = profile.provenance.get("rejected")
    last = "" if rejected is None else f"; the last entry, {rejected:g}, is the share with all rejected"
    return f"profile, {profile.ranks} ranks{last}"
