"""What all commands share: help, version, errors, exit codes, streams and a fast start."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from command_line import start

import sequoia.engine
from sequoia import __version__
from sequoia.app import options, trees
from sequoia.app.generate import generate
from sequoia.errors import ModelError
from sequoia.params import SamplingParams
from sequoia.tree.specs import TREE_FORMS


def test_version(cli):
    outcome = cli("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"sequoia {__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["tree"]])
def test_alone_a_group_prints_its_help(cli, arguments):
    outcome = cli(*arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == cli(*arguments, "--help").out.rstrip("\n") + "\n\n"
    assert "Usage" in outcome.out


def test_help_of_generate_names_every_option(cli):
    outcome = cli("generate", "-h")
    assert outcome.code == 0
    flags = set(re.findall(r"--[a-z][a-z-]+", outcome.out))
    assert flags >= {
        *("--target", "--draft", "--dtype", "--device", "--tree", "--profile", "--verifier"),
        *("--temperature", "--top-p", "--top-k", "--min-p", "--repetition-penalty", "--presence-penalty"),
        *("--frequency-penalty", "--logit-bias", "--seed", "--max-tokens", "--stop", "--ignore-eos"),
        *("--system", "--raw", "--stats", "--json", "--logprobs", "--debug"),
    }


@pytest.mark.parametrize(
    "arguments", [["generate", "-h"], ["tree", "optimal", "-h"], ["tree", "show", "-h"], ["selftest", "-h"]]
)
def test_help_fits_a_narrow_terminal(cli, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, cli(*arguments).out.splitlines())) <= 50


def test_defaults_are_those_of_the_library():
    ours = inspect.signature(generate).parameters
    for name, parameter in inspect.signature(sequoia.engine.load).parameters.items():
        if name in ours:
            assert ours[name].default == parameter.default, name
    assert ours["temperature"].default == 0.0  # the exception: a command should say the same thing twice
    for name in ("max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logprobs"):
        assert ours[name].default == getattr(SamplingParams, name), name


def test_tree_forms_are_those_of_the_library():
    assert options.TREE_FORMS == TREE_FORMS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no such command 'nonsense'"),
        (["--nonsense"], "no such option: --nonsense"),
        (["generate"], "missing argument"),
        (["generate", "hi", "there"], "unexpected extra argument"),
        (["generate", "hi", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "hi", "--temperature"], "--temperature"),
        (["tree", "optimal", "9x4", "--draft", "parrot"], "parrot"),
    ],
)
def test_misuse_is_one_line_and_code_2(cli, arguments, message):
    outcome = cli(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.fullmatch(r"error: [^\n]*See sequoia[a-z ]* --help\.\n", outcome.err)
    assert message in outcome.err.lower()


def _raise(error):
    def raiser(*_, **__):
        raise error

    return raiser


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelError("two\nlines  [red]and markup[/red]"), "two lines [red]and markup[/red]"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero (a bug: run with --debug for the traceback)"),
        (KeyError(), "KeyError (a bug: run with --debug for the traceback)"),
        (MemoryError(), "out of memory. Choose a smaller model, a smaller tree or a shorter prompt."),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "out of memory. Choose a smaller model, a smaller tree or a shorter prompt.",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "out of memory. Choose a smaller model, a smaller tree or a shorter prompt.",
        ),
    ],
)
def test_failures_are_one_line_and_code_1(cli, monkeypatch, error, message):
    monkeypatch.setattr(sequoia.engine, "load", _raise(error))
    outcome = cli("generate", "hi")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", f"error: {message}\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), ModelError("no model")])
def test_debug_adds_the_traceback(cli, monkeypatch, error):
    monkeypatch.setattr(sequoia.engine, "load", _raise(error))
    outcome = cli("generate", "hi", "--debug")
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last):")
    assert outcome.err.splitlines()[-1].startswith("error: ")


def test_ctrl_c_while_loading_is_quiet(cli, monkeypatch):
    monkeypatch.setattr(sequoia.engine, "load", _raise(KeyboardInterrupt()))
    outcome = cli("generate", "hi")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


_FAKE_ENGINE = """
import sys, time, types
from sequoia.errors import ModelError
engine = sys.modules["sequoia.engine"] = types.ModuleType("sequoia.engine")
def load(*arguments, notice, **options):
    {body}
engine.load = load
threads = sys.modules["sequoia.model.threads"] = types.ModuleType("sequoia.model.threads")
threads.set_threads = lambda count: None
from sequoia.app.cli import main
sys.exit(main())
"""


def test_ctrl_c_counts_even_where_a_library_turns_it_into_another_error():
    body = """
    print("loading", file=sys.stderr, flush=True)
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        raise ImportError("cannot load the library") from None
    """
    process = start("generate", "hi", script=_FAKE_ENGINE.format(body=body))
    assert process.stderr.readline() == "loading\n"
    process.send_signal(2)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


def test_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    process = start("tree", "show", "chain:3", stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=30) == (None, "")
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with open("/dev/full", "w") as full:
        process = start("tree", "show", "chain:3", stdout=full)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "error: cannot write to standard output: No space left on device.\n")


def test_closed_streams_and_narrow_encodings_do_not_matter():
    shell = [f"{sys.executable} -m sequoia tree show chains:2x2"]
    closed = subprocess.run(["sh", "-c", f"{shell[0]} >&- 2>&-"], timeout=30)
    assert closed.returncode == 0
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    narrow = subprocess.run(["sh", "-c", shell[0]], env=ascii_only, capture_output=True, timeout=30)
    assert (narrow.returncode, narrow.stderr) == (0, b"")
    assert narrow.stdout.startswith(b"5 nodes ? depth 2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        [],
        ["tree", "show", "beam:4x6"],
        ["tree", "optimal", "9", "4", "--json"],
        ["generate", "-h"],
        ["selftest", "-h"],
    ],
)
def test_light_commands_import_nothing_heavy(arguments):
    script = """
import sys
from sequoia.app.cli import main
code = main()
print([name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    process = start(*arguments, script=script)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "[]\n")


pty = pytest.importorskip("pty", reason="needs a Unix terminal")


def _on_a_terminal(*arguments, script=None, **environment):
    """What a terminal on stderr gets to see."""
    ours, theirs = pty.openpty()
    process = start(*arguments, script=script, stderr=theirs, env={"TERM": "xterm"} | environment)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 1000):
            seen += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    process.communicate(timeout=30)
    os.close(ours)
    return seen.decode()


def test_colour_on_a_terminal_unless_refused(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = ("tree", "show", "chain:0")
    assert "\x1b[1;31merror:\x1b[0m tree" in _on_a_terminal(*arguments)
    assert "\x1b" not in _on_a_terminal(*arguments, NO_COLOR="1")


@pytest.mark.parametrize(("seconds", "spins"), [(1.5, True), (0.1, False)])
def test_a_spinner_only_for_what_takes_long(seconds, spins):
    body = f"""
    notice("converting [b]tiny[/b], once")
    time.sleep({seconds})
    raise ModelError("no")
    """
    seen = _on_a_terminal("generate", "hi", script=_FAKE_ENGINE.format(body=body))
    assert ("converting [b]tiny[/b], once" in seen) == spins
    assert "no" in seen


def test_without_a_terminal_a_notice_is_a_line(cli, monkeypatch):
    def load(*_, notice, **__):
        notice("converting tiny, once")
        raise ModelError("no")

    monkeypatch.setattr(sequoia.engine, "load", load)
    assert cli("generate", "hi").err == "converting tiny, once\nerror: no\n"


def test_help_names_the_drafts_that_rates_are_shipped_for():
    from sequoia.tree.profile import AcceptanceProfile

    assert all(AcceptanceProfile.shipped(kind.value) for kind in trees.DraftKind)


def test_standard_input_is_read_for_a_dash(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n\t\n")))
    outcome = cli("generate", "-")
    assert (outcome.code, outcome.err) == (2, "error: the prompt is empty: stdin holds no text. Give some.\n")


def test_json_of_the_planner_is_one_object(cli):
    assert json.loads(cli("tree", "optimal", "9x4", "--json").out)["size"] == 9
