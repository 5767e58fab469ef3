"""Texts and rates on disk, so that an interrupted measurement goes on: each finished one is kept, half a one never."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np

from sequoia.errors import FileError
from sequoia.measure.renewal import TextRates
from sequoia.measure.texts import Ask, Text
from sequoia.params import SamplingParams

_VERSION = 1  # of the files, and of what the figures in them mean
_NAMES = ("rates", "marginal")


class TextStore:
    """A folder of texts under one key, and of rates along them under another.

    Args:
        folder: created where it is missing; None keeps nothing.
        texts_key: all that decides what the target writes, apart from the prompt.
        rates_key: all that decides rates along a text beyond that.
    """

    def __init__(self, folder: Path | None, texts_key: Mapping[str, Any], rates_key: Mapping[str, Any]) -> None:
        self._folder = folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        self._key = {"format": "sequoia-texts", "version": _VERSION, **texts_key}
        self._path = folder / f"texts-{_digest(self._key)}.jsonl"
        self._rates = folder / f"rates-{_digest([self._key, dict(rates_key)])}"

    def texts(self) -> dict[Ask, Text]:
        """All that were kept. Half a last line, which a kill may leave, is cut off.

        Raises:
            FileError: the file cannot be read or mended.
        """
        if self._folder is None:
            return {}
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(self._path, whole)
        except OSError as error:
            raise FileError(f"cannot read {self._path}: {error.strerror or error}. Check the path.") from error
        return {text.ask: text for text in map(_parsed, content[:whole].splitlines()) if text is not None}

    def add(self, text: Text) -> None:
        """Keep a text.

        Raises:
            FileError: it cannot be written.
        """
        if self._folder is None:
            return
        record = {"prompt": text.ask.prompt, "repeat": text.ask.repeat, "tokens": text.tokens}
        header = "" if self._path.exists() else json.dumps(self._key) + "\n"  # for people
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(header + json.dumps(record) + "\n")
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def rates(self, text: Text) -> TextRates | None:
        """Those kept for a text; None where there are none that can be trusted."""
        if self._folder is None:
            return None
        try:
            with np.load(self._file(text), allow_pickle=False) as arrays:
                kept = TextRates(*(arrays[name] for name in _NAMES))
        except (OSError, ValueError, KeyError, BadZipFile, EOFError):
            return None
        return kept if len(kept.rates) == len(text.tokens) else None

    def add_rates(self, text: Text, rates: TextRates) -> None:
        """Keep rates: the file is there whole or not at all.

        Raises:
            FileError: it cannot be written.
        """
        if self._folder is None:
            return
        file = self._file(text)
        part = file.with_name(f".{uuid4().hex}.part")
        try:
            file.parent.mkdir(exist_ok=True)
            try:
                with part.open("wb") as out:
                    np.savez_compressed(out, rates=rates.rates, marginal=rates.marginal)
                os.replace(part, file)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(file, error) from error

    def _file(self, text: Text) -> Path:
        return self._rates / f"{_digest([text.ask.prompt, text.ask.repeat, text.tokens])}.npz"


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """As JSON has them."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return values | {"logit_bias": {str(token): amount for token, amount in params.logit_bias.items()}}


def _digest(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _parsed(line: bytes) -> Text | None:
    """The text in a line; None for the first line, which says what the texts are, and for what a crash spoilt."""
    try:
        record = json.loads(line)
        return Text(Ask(tuple(record["prompt"]), int(record["repeat"])), tuple(record["tokens"]))
    except (ValueError, KeyError, TypeError):
        return None


def _unwritable(path: Path, error: OSError) -> FileError:
    return FileError(f"cannot write {path}: {error.strerror or error}. Choose another folder.")
