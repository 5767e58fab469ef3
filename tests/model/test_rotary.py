"""Tables of rotary positions against transformers' own angles, and what they need of transformers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sequoia.errors import ModelError
from sequoia.model.rotary import RotaryTable

SIZES = {"hidden_size": 48, "num_attention_heads": 3, "head_dim": 16}
CPU = torch.device("cpu")
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 100_000},
        {"rope_theta": 10_000.0},
        {"rope_theta": 10_000.0, "rope_scaling": LINEAR},
        {"rope_parameters": {**LINEAR, "rope_theta": 500.0}},
        {},
    ],
)
def test_angles_are_those_of_transformers_to_the_bit(settings: dict[str, Any], dtype: torch.dtype) -> None:
    module = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **settings))
    positions = torch.tensor([0, 1, 2, 63, 64, 1023, 1024, 5000])
    cosines, sines = module(torch.empty(1, dtype=dtype), positions[None])
    first, second = sines.chunk(2, dim=-1)
    table = RotaryTable({**SIZES, **settings}, dtype, CPU)
    table(positions[:3], 3)  # so that it has to grow
    found = table(positions, 5001)
    assert found[0].dtype == dtype
    assert torch.equal(found[0], cosines)
    assert torch.equal(found[1], torch.cat([-first, second], dim=-1))


def test_angles_that_change_with_the_text_are_refused() -> None:
    with pytest.raises(ModelError, match="dynamic rotary positions change"):
        RotaryTable(
            {**SIZES, "rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, torch.float32, CPU
        )


def test_settings_that_nobody_can_read_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot make rotary positions"):
        RotaryTable({**SIZES, "rope_theta": 1e4, "rope_scaling": {"rope_type": "spiral"}}, torch.float32, CPU)


def test_plain_angles_need_no_models_of_transformers() -> None:
    code = (
        "import sys, torch\nfrom sequoia.model.rotary import RotaryTable\n"
        f"RotaryTable({SIZES | {'rope_theta': 1e5}!r}, torch.float32, torch.device('cpu'))\n"
        "print('transformers.modeling_utils' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
