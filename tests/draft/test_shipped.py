"""The head that comes with the package."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import sequoia
from sequoia.draft.copying import CopyingDraft
from sequoia.draft.head_draft import HeadDraft
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.draft.shipped import PLAN, shipped_head
from sequoia.measure.tiny_llama import tiny_llama
from sequoia.model.causal_lm import CausalLM
from sequoia.tree.plan import PlanFile

_WEIGHTS = "77d2728ee0c2ab1f0f08bbaeeea016304044156eb2755934de4eb6f6dfd5b36a"
_MOST_BYTES = 20 * 10**6


@pytest.fixture(scope="module")
def engine() -> sequoia.Engine:
    return sequoia.load()


@pytest.fixture(scope="module")
def folder(engine: sequoia.Engine) -> Path:
    found = shipped_head(engine.target)
    assert found is not None
    return found


def test_the_default_model_drafts_with_its_head(engine: sequoia.Engine) -> None:
    assert isinstance(engine.draft, CopyingDraft)
    assert isinstance(engine.draft.own, HeadDraft)
    assert engine.pair["draft"] == "SmolLM2-135M-Instruct+ngram"


def test_other_targets_draft_with_n_grams() -> None:
    loaded = tiny_llama(48, 3, device="cpu")
    assert shipped_head(CausalLM(loaded)) is None
    assert isinstance(sequoia.load(loaded.model).draft, NgramDraft)


def test_a_model_of_the_same_name_and_another_size_has_no_head(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    target = CausalLM(tiny_llama(48, 3, device="cpu"))
    object.__setattr__(target.loaded, "name", folder.name)
    assert shipped_head(target) is None


def test_its_files_are_whole_and_small(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == _WEIGHTS
    assert sum(file.stat().st_size for file in folder.iterdir()) < _MOST_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "sequoia train-draft" in card
    assert "hours" in card


def test_its_plan_is_for_the_pair_that_loads(folder: Path) -> None:
    plan = PlanFile.load(folder / PLAN)
    assert plan.pair["draft"] == f"{folder.name}+ngram"
    assert [each.params["temperature"] for each in plan.plans] == [0.0, 0.6, 1.0]


def test_its_plan_runs_where_none_was_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    """Number formats that the plan is for; others have the default tree."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = Path.home() / ".cache" / "sequoia" / "models"
    if models.is_dir():
        (tmp_path / "sequoia").mkdir()
        (tmp_path / "sequoia" / "models").symlink_to(models)
    pair = PlanFile.load(folder / PLAN).pair
    formats = {"dtype": pair["target_dtype"], "draft_dtype": pair["draft_dtype"]}
    assert sequoia.load(**formats).planned is not None
    assert sequoia.load(dtype="fp32").planned is None
