"""The cache of finished parts: there until all is done, and never anybody else's."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sequoia.errors import FileError
from sequoia.measure.tune_store import kept_parts, tunings_folder

ABOUT: dict[str, Any] = {"pair": {"target": "a"}, "settings": {"contexts": (128, 1024)}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sequoia" / "tunings"


def interrupt(about: dict[str, Any] = ABOUT) -> Path:
    """Ctrl-C while something is half done."""
    with suppress(KeyboardInterrupt), kept_parts(about) as folder:
        (folder / "part").write_text("half of it")
        raise KeyboardInterrupt
    return folder


def test_it_lies_in_the_users_cache_and_goes_when_all_is_done(cache: Path):
    assert tunings_folder() == cache
    with kept_parts(ABOUT) as folder:
        assert folder.parent == cache
        (folder / "part").write_text("1")
        (folder / "more").mkdir()
    assert list(cache.iterdir()) == []


def test_it_stays_when_something_is_missing_and_is_found_again():
    first = interrupt()
    with kept_parts(ABOUT, notice=pytest.fail) as folder:
        assert folder == first
        assert (folder / "part").read_text() == "half of it"


def test_another_tuning_gets_another():
    assert interrupt() != interrupt({**ABOUT, "pair": {"target": "b"}})


@pytest.mark.parametrize("content", ["", "[1]", '{"about": {"pair": {"target": "b"}}}'])
def test_a_damaged_or_foreign_one_starts_anew_with_a_line(content: str):
    folder = interrupt()
    (folder / "about.json").write_text(content)
    lines: list[str] = []
    with kept_parts(ABOUT, lines.append) as again:
        assert again == folder
        assert [path.name for path in again.iterdir()] == ["about.json"]
    assert lines == [f"{folder} is damaged, so this tuning starts anew"]


def test_two_at_once_do_not_share_it():
    with kept_parts(ABOUT), pytest.raises(FileError, match="in use by another run"), kept_parts(ABOUT):
        pass
    with kept_parts(ABOUT), kept_parts({"pair": "another"}):
        pass


def test_what_nobody_goes_on_with_is_forgotten(cache: Path):
    old, new = interrupt({"pair": 1}), interrupt({"pair": 2})
    long_ago = time.time() - 15 * 24 * 3600
    for path in (old, *old.iterdir()):
        os.utime(path, (long_ago, long_ago))
    with kept_parts(ABOUT) as folder:
        assert sorted(cache.iterdir()) == sorted([new, folder])


def test_an_unwritable_cache_is_one_line(cache: Path):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(FileError, match="cannot make"), kept_parts(ABOUT):
        pass
