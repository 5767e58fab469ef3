"""Peers do what was asked of them, and leave nothing behind for the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import PROMPTS, answer, answers, tiny_engine, tokenizer

from sequoia.engine import Engine, load
from sequoia.errors import FileError, UsageError
from sequoia.measure.bench import llama as llama_module
from sequoia.measure.bench.clock import PassClock
from sequoia.measure.bench.methods import build_methods
from sequoia.measure.bench.peers import PEERS
from sequoia.measure.reference import reference_probs
from sequoia.params import SamplingParams

TRANSFORMERS = tuple(name for name in PEERS if name.startswith("transformers"))
GREEDY = SamplingParams(max_tokens=16, temperature=0)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> list[int]:
    return PROMPTS[0].token_ids(engine.tokenizer)


@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_answers_are_plain_ones(seed: int) -> None:
    engine = tiny_engine(seed=seed)  # with seed 2 all four end with end-of-text
    params = SamplingParams(max_tokens=24, temperature=0)
    for record in PROMPTS:
        found = answers(["plain", *TRANSFORMERS], engine, record.token_ids(engine.tokenizer), params)
        assert {tuple(tokens) for tokens in found.values()} == {tuple(found["plain"])}
        assert (found["plain"][-1] in engine.target.loaded.eos_ids) == (seed == 2)


def test_end_of_text_can_be_ignored() -> None:
    engine = tiny_engine(seed=2)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    found = answers(["plain", *TRANSFORMERS], engine, PROMPTS[1].token_ids(engine.tokenizer), params)
    assert {tuple(tokens) for tokens in found.values()} == {tuple(found["plain"])}
    assert len(found["plain"]) == 20


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_steps_come_as_they_are_decided(engine: Engine, prompt: list[int], name: str) -> None:
    steps: list[int] = []
    with PassClock(engine.target) as clock:
        _, method = build_methods([name], engine, clock)
        clock.start(len(prompt))
        method.generate(prompt, GREEDY, lambda step: steps.append(clock.passes))
    assert steps == list(range(1, len(steps) + 1))  # one after each pass of the target, before the next


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_seed_repeats_an_answer(engine: Engine, prompt: list[int], name: str) -> None:
    first, second = (answers([name], engine, prompt, SAMPLED) for _ in range(2))
    assert first == second
    assert first != answers([name], engine, prompt, SamplingParams(max_tokens=16, temperature=0.9, seed=4))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_first_tokens_have_the_targets_law(engine: Engine, prompt: list[int], name: str) -> None:
    asked: dict[str, Any] = {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3}
    with PassClock(engine.target) as clock:
        _, method = build_methods([name], engine, clock)
        drawn = [answer(method, prompt, SamplingParams(max_tokens=3, seed=seed, **asked))[0] for seed in range(200)]
    with torch.inference_mode():
        logits = engine.target_model(input_ids=torch.tensor([prompt])).logits[0, -1].double().numpy()
    law = reference_probs(logits, SamplingParams(**asked), prompt, [])
    counts = np.bincount(drawn, minlength=len(law))
    assert counts[law == 0].sum() == 0
    likely = law > 0
    assert likely.sum() > 3
    chi_square = ((counts[likely] - 200 * law[likely]) ** 2 / (200 * law[likely])).sum()
    assert chi_square < likely.sum() + 5 * (2 * likely.sum()) ** 0.5


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_nothing_is_left_behind(engine: Engine, prompt: list[int], name: str, params: SamplingParams) -> None:
    models = [engine.target_model, engine.draft.model.loaded.model]  # type: ignore[attr-defined]
    before = [(model.generation_config, model.generation_config.to_dict(), model.config.to_dict()) for model in models]
    noise = torch.random.get_rng_state()
    answers([name], engine, prompt, params)
    with pytest.raises(RuntimeError, match="emit"), PassClock(engine.target) as clock:
        build_methods([name], engine, clock)[1].generate(prompt, params, _failing)
    assert torch.equal(torch.random.get_rng_state(), noise)
    for model, (config, generation, whole) in zip(models, before, strict=True):
        assert model.generation_config is config
        assert (config.to_dict(), model.config.to_dict()) == (generation, whole)


def _failing(step: object) -> None:
    raise RuntimeError("emit")


def test_the_checkpoints_own_settings_do_not_count(prompt: list[int]) -> None:
    engine = tiny_engine()
    expected = answers(TRANSFORMERS, engine, prompt, GREEDY), answers(TRANSFORMERS, engine, prompt, SAMPLED)
    for model in (engine.target_model, engine.draft.model.loaded.model):  # type: ignore[attr-defined]
        model.generation_config.update(
            do_sample=True, temperature=5.0, top_k=2, top_p=0.1, repetition_penalty=9.0, no_repeat_ngram_size=1
        )
        model.generation_config.update(num_assistant_tokens=1, suppress_tokens=[expected[0]["transformers"][0]])
    found = answers(TRANSFORMERS, engine, prompt, GREEDY), answers(TRANSFORMERS, engine, prompt, SAMPLED)
    assert found == expected


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize(
    "asked",
    [{"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_cannot_be_asked_is_refused(engine: Engine, prompt: list[int], name: str, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{name} has nothing that means what {next(iter(asked))} does"):
        answers([name], engine, prompt, SamplingParams(**asked))


def test_assisted_needs_a_model() -> None:
    with pytest.raises(UsageError, match=r"needs a draft that is a model.*--draft MODEL"):
        answers(["transformers-assisted"], tiny_engine("ngram"), [3], GREEDY)


def test_assisted_needs_a_model_with_modules_of_its_own() -> None:
    target = tiny_engine("ngram").target_model, tokenizer()
    with pytest.raises(UsageError, match="in modules of its own, and self:int4 has none"):
        answers(["transformers-assisted"], load(target, "self:int4", device="cpu"), [3], GREEDY)


def test_transformers_take_no_file(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"takes no file. Leave x.gguf out"):
        answers(["transformers:x.gguf"], engine, [3], GREEDY)


# llama.cpp, whose library is replaced by one that runs the same tiny model


class FakeLlama:
    """As llama-cpp-python's: `generate` yields token by token and calls `eval` for what it has not read."""

    opened: list[dict[str, Any]]
    engine: Engine

    def __init__(self, model_path: str, **options: Any) -> None:
        self.opened.append({"model_path": model_path, **options})
        self.draft_model = options["draft_model"]
        self.read: list[int] = []
        self.seed: int | None = None

    def reset(self) -> None:
        self.read = []

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def eval(self, tokens: list[int]) -> None:
        self.read += tokens

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        self.opened[-1]["options"] = options | {"seed": self.seed}
        assert not self.read, "what an earlier request left is still there"
        pending = list(tokens)
        while True:
            self.eval(pending)
            model = self.engine.target_model
            with torch.inference_mode():
                logits = type(model).forward(model, input_ids=torch.tensor([self.read])).logits  # unseen by hooks
            pending = [int(logits[0, -1].argmax())]
            yield pending[0]


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeLlama]:
    """The tiny model passes for the conversion of a GGUF file, and the library is there."""
    engine = tiny_engine()
    gguf = tmp_path / "tiny.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    folder = tmp_path / "tiny-0123"
    engine.target_model.config.name_or_path = str(folder)
    fake = type("Llama", (FakeLlama,), {"opened": [], "engine": engine})
    speculative = SimpleNamespace(LlamaPromptLookupDecoding=lambda num_pred_tokens: f"lookup of {num_pred_tokens}")
    library = ModuleType("llama_cpp")
    library.Llama = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    monkeypatch.setattr(llama_module, "packaged_gguf", lambda: gguf)
    monkeypatch.setattr(llama_module, "converted_folder", lambda file: folder)
    monkeypatch.setattr(llama_module, "_FIRST_PASS", "import sys; assert sys.argv[1].endswith('tiny.Q4_1.gguf')")
    return fake


def test_llama_cpp(llama: type[FakeLlama], prompt: list[int]) -> None:
    with PassClock(llama.engine.target) as clock:
        plain, method = build_methods(["llama.cpp"], llama.engine, clock)
        assert (method.same_as, method.own_model, method.spec) == (None, True, "llama.cpp:tiny.Q4_1.gguf")
        method.prepare(40)
        for _ in range(2):
            clock.start(len(prompt))
            tokens = answer(method, prompt, GREEDY)
            assert (clock.passes, clock.rows) == (16, 15)
            assert clock.prefill_seconds is not None
        assert tokens == answer(plain, prompt, GREEDY)
    (opened,) = llama.opened
    assert Path(opened["model_path"]).name == "tiny.Q4_1.gguf"
    assert (opened["n_ctx"], opened["draft_model"], opened["logits_all"]) == (50, None, False)
    assert opened["n_threads"] == opened["n_threads_batch"] == torch.get_num_threads()
    assert (opened["options"]["temp"], opened["options"]["repeat_penalty"]) == (0, 1.0)


def test_llama_cpp_is_asked_for_what_the_request_says(llama: type[FakeLlama]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, top_k=7, min_p=0.1, seed=11)
    with PassClock(llama.engine.target) as clock:
        method = build_methods(["llama.cpp"], llama.engine, clock)[1]
        method.prepare(40)
        assert len(answer(method, [3, 4], params)) == 3
    assert llama.opened[-1]["options"] == {
        "temp": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.0, "seed": 11
    }  # fmt: skip


def test_llama_cpp_ends_with_the_text(llama: type[FakeLlama], prompt: list[int]) -> None:
    end = answers(["plain"], llama.engine, prompt, GREEDY)["plain"][2]
    llama.engine.target_model.generation_config.eos_token_id = end
    loaded = llama.engine.target.loaded
    loaded.__dict__.pop("eos_ids", None)  # cached
    with PassClock(llama.engine.target) as clock:
        method = build_methods(["llama.cpp"], llama.engine, clock)[1]
        method.prepare(40)
        assert answer(method, prompt, GREEDY)[-1] == end


def test_llama_cpp_lookup_repeats_llama_cpp(llama: type[FakeLlama]) -> None:
    clock = PassClock(llama.engine.target)
    _, alone = build_methods(["llama.cpp-lookup"], llama.engine, clock)
    assert alone.same_as is None
    _, _, beside = build_methods(["llama.cpp", "llama.cpp-lookup"], llama.engine, clock)
    assert beside.same_as == "llama.cpp"
    beside.prepare(40)
    assert (llama.opened[-1]["draft_model"], llama.opened[-1]["logits_all"]) == ("lookup of 10", True)


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}])
def test_llama_cpp_refuses_what_it_counts_otherwise(llama: type[FakeLlama], asked: dict[str, Any]) -> None:
    method = build_methods(["llama.cpp"], llama.engine, PassClock(llama.engine.target))[1]
    method.prepare(40)
    with pytest.raises(UsageError, match=r"llama\.cpp has nothing that means what"):
        answer(method, [3], SamplingParams(**asked))


def test_llama_cpp_not_installed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UsageError, match=r'llama\.cpp needs llama-cpp-python .*pip install "sequoia\[peers\]"'):
        build_methods(["llama.cpp"], engine, PassClock(engine.target))


def test_llama_cpp_only_runs_the_targets_own_file(llama: type[FakeLlama], engine: Engine, tmp_path: Path) -> None:
    clock = PassClock(engine.target)
    with pytest.raises(UsageError, match=r"was not loaded from .*tiny.Q4_1.gguf. Use the default target, or --target"):
        build_methods(["llama.cpp"], engine, clock)
    with pytest.raises(FileError, match=r"there is no file .*other.gguf"):
        build_methods([f"llama.cpp:{tmp_path / 'other.gguf'}"], llama.engine, clock)
    named = build_methods([f"llama.cpp:{tmp_path / 'tiny.Q4_1.gguf'}"], llama.engine, clock)
    assert named[1].name == "llama.cpp"


@pytest.mark.parametrize(
    ("first_pass", "reason"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("raise ValueError('bad file')", "ValueError: bad file"),
        ("exit(3)", "exit code 3"),
    ],
)
def test_llama_cpp_that_crashes_does_so_elsewhere(
    llama: type[FakeLlama], monkeypatch: pytest.MonkeyPatch, first_pass: str, reason: str
) -> None:
    monkeypatch.setattr(llama_module, "_FIRST_PASS", first_pass)
    with pytest.raises(UsageError, match=f"does not run on this machine: its first pass ended with {reason}. Build"):
        build_methods(["llama.cpp"], llama.engine, PassClock(llama.engine.target))
