"""A model's tokenizer by the class that once proved to be the right one: finding it takes transformers' models."""

from __future__ import annotations

from typing import Any

from sequoia.model.quiet import quiet

_FINDER = "AutoTokenizer"
_PASSING = {"_tokenizer", "init_kwargs", "deprecation_warnings", "local_files_only"}  # compared otherwise, or no matter


def read_tokenizer(source: str, name: str | None) -> Any:
    """The tokenizer of a folder or hub name as transformers' class of this name reads it; None for a model without one.

    Raises:
        Exception: nearly any, where files are damaged.
    """
    if name is None:
        return None
    import transformers

    with quiet():
        return getattr(transformers, name).from_pretrained(source, local_files_only=True)


def class_name(source: str, tokenizer: Any) -> str | None:
    """The name by which `read_tokenizer` gives this very tokenizer."""
    if tokenizer is None:
        return None
    name = type(tokenizer).__name__
    try:
        return name if _content(read_tokenizer(source, name)) == _content(tokenizer) else _FINDER
    except Exception:  # a class that reads no files, or other ones
        return _FINDER


def _content(tokenizer: Any) -> tuple[str, str, str]:
    """All that decides how text and ids are turned into each other."""
    settings = [*sorted(vars(tokenizer).items()), *sorted(tokenizer.init_kwargs.items())]
    kept = [(name, value) for name, value in settings if name not in _PASSING]
    return tokenizer.backend_tokenizer.to_str(), str(tokenizer), str(kept)
