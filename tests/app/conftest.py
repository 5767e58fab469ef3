"""Fixtures for the command line: tiny models, and a call in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, write_model

from sequoia.app.cli import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 20 words that speaks nonsense, with a chat template."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template, and with a context of 32 tokens."""
    return write_model(tmp_path_factory.mktemp("models") / "plain", chat_template=None, context=32)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Call the command line in this process."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: Any) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call
