"""`sequoia generate`: check, load, stream, close."""

from __future__ import annotations

import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sequoia.app import options
from sequoia.app.failure import INTERRUPTED
from sequoia.app.output import note, write_out
from sequoia.app.report import Answer, closing_line, heading, memory_line, print_json, print_stats
from sequoia.app.waiting import uncollected, waiting
from sequoia.errors import UsageError
from sequoia.params import SamplingParams

PLAIN_TOKENS = 16  # that `--gain` is measured on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sequoia.engine import Chunk, Engine


def generate(
    prompt: options.Prompt,
    system: options.System = None,
    raw: options.Raw = False,
    target: options.Target = None,
    draft: options.Draft = "auto",
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    compile: options.Compile = False,
    offload: options.Offload = "auto",
    memory_budget: options.MemoryBudget = None,
    context: options.Context = None,
    tree: options.Tree = "auto",
    plan: options.Plan = None,
    no_guard: options.NoGuard = False,
    profile: options.Profile = None,
    verifier: options.Verifier = "auto",
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = SamplingParams.top_p,
    top_k: options.TopK = SamplingParams.top_k,
    min_p: options.MinP = SamplingParams.min_p,
    repetition_penalty: options.RepetitionPenalty = SamplingParams.repetition_penalty,
    presence_penalty: options.PresencePenalty = SamplingParams.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = SamplingParams.frequency_penalty,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = SamplingParams.max_tokens,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    gain: options.ShowGain = False,
    stats: options.ShowStats = False,
    as_json: options.AsJson = False,
    logprobs: options.Logprobs = None,
    debug: options.Debug = False,
) -> None:
    """Answer a prompt: the answer streams to stdout, everything else goes to stderr."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_logit_bias(logit_bias or []),
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    _require_sense(system, raw, as_json, logprobs)
    _require_tree(tree, plan, profile, draft)
    text = _prompt_text(prompt, raw)
    with waiting("loading the model") as tell:
        with uncollected():
            from sequoia.engine import load
            from sequoia.model.threads import set_threads

        set_threads(threads)
        engine = load(
            target,
            draft,
            tree,
            verifier,
            dtype,
            device,
            draft_dtype=draft_dtype,
            profile=profile,
            plan=plan,
            guard=not no_guard,
            compile=compile,
            offload=offload,
            memory_budget=memory_budget,
            context=context,
            notice=tell,
        )
    token_ids = _encoded(engine, text, system, raw)
    # Refuses what cannot be generated before anything is said.
    chunks = engine.stream(token_ids, params, plain_first=PLAIN_TOKENS if gain else 0)
    _tell_idle(params, tree, draft, verifier)
    _tell_plan(engine, params, no_guard)
    note(heading(engine, params), "dim")
    if engine.memory is not None:
        note(memory_line(engine.memory), "dim")
    answer = _answer(chunks, with_logprobs=logprobs is not None, show=not as_json)
    if as_json:
        print_json(answer, engine, params, len(token_ids))
    if stats:
        print_stats(answer, engine)
    note(closing_line(answer, engine, params), "dim")
    if answer.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _logit_bias(entries: list[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in entries:
        token, _, amount = entry.partition("=")
        try:
            index, value = int(token), float(amount)
        except ValueError:
            raise UsageError(f"--logit-bias is ID=AMOUNT, such as 198=-2.5, not {entry!r}.") from None
        if index in bias:
            raise UsageError(f"--logit-bias names token {index} twice. Give one amount for it.")
        bias[index] = value
    return bias


def _require_sense(system: str | None, raw: bool, as_json: bool, logprobs: int | None) -> None:
    """Refuse options that would have no effect."""
    if system is not None and raw:
        raise UsageError("--system needs the chat template, which --raw leaves out. Give one of the two.")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is printed by --json only. Add --json.")
    if system is not None:
        _require_utf8("--system", system)


def _tell_idle(params: SamplingParams, tree: str, draft: str, verifier: str) -> None:
    """Say which options change nothing beside the others."""
    choices = {
        "--top-p": params.top_p < 1,
        "--top-k": params.top_k is not None,
        "--min-p": params.min_p > 0,
        "--seed": params.seed is not None,
        "--verifier": verifier != "auto",
    }
    idle = [name for name, given in choices.items() if given]
    if params.temperature == 0 and idle:
        note(f"at temperature 0, the default, {' and '.join(idle)} changes nothing")
    if tree == "off" and draft not in ("auto", "ngram"):
        note("with --tree off the draft is not used")


def _tell_plan(engine: Engine, params: SamplingParams, no_guard: bool) -> None:
    """Say how the plan differs from what runs, or that there is none to guard."""
    if engine.planned is not None and (line := engine.planned.notice(params)):
        note(line)
    if engine.planned is None and no_guard:
        note("without a plan there is no guard, and --no-guard changes nothing")


def _require_tree(tree: str, plan: Path | None, profile: Path | None, draft: str) -> None:
    """Refuse what names no tree before anything slow happens."""
    from sequoia.tree.plan import PlanFile
    from sequoia.tree.profile import AcceptanceProfile
    from sequoia.tree.specs import UNPLANNED, parse_tree

    if plan is not None and (tree != "auto" or profile is not None):
        other = "--profile" if tree == "auto" else f"--tree {tree}"
        raise UsageError(f"--plan chooses the tree, and so does {other}. Give one of the two.")
    if plan is not None:
        PlanFile.load(plan)
    if tree == "auto" and profile is None:
        return
    spec = UNPLANNED if tree == "auto" else tree
    if profile is not None and not spec.startswith("optimal:"):
        raise UsageError(f"--profile plans optimal trees, and --tree is {tree!r}. Use --tree optimal:SIZExDEPTH.")
    parse_tree(spec, AcceptanceProfile.for_draft(draft, profile))


def _prompt_text(prompt: str, raw: bool) -> str:
    text = _stdin() if prompt == "-" else prompt
    if not (text if raw else text.strip()):
        source = "stdin" if prompt == "-" else "the argument"
        raise UsageError(f"the prompt is empty: {source} holds no text. Give some.")
    _require_utf8("the prompt", text)
    # A chat message does not end with the newline that `echo` adds.
    return text if raw else text.rstrip("\r\n")


def _stdin() -> str:
    if sys.stdin is None:
        raise UsageError("the prompt - is read from stdin, which is closed. Pipe some text in.")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start}). Convert it first.") from error


def _require_utf8(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (character {error.start}). Convert it first.") from error


def _encoded(engine: Engine, text: str, system: str | None, raw: bool) -> list[int]:
    """The prompt's token ids, as a chat message where the model was made for chat."""
    from sequoia.text import encode_prompt

    name = engine.target.loaded.name
    if engine.tokenizer is None:
        raise UsageError(f"{name} has no tokenizer, so it cannot read text. Save its tokenizer into the same folder.")
    if not raw and getattr(engine.tokenizer, "chat_template", None) is None:
        if system is not None:
            raise UsageError(f"--system needs a chat template, and {name} has none. Put it into the prompt.")
        note(f"{name} has no chat template: the prompt is continued as it is, as with --raw.")
        raw = True
    system_message = [] if system is None else [{"role": "system", "content": system}]
    message = {"role": "user", "content": text}
    return encode_prompt(engine.tokenizer, text if raw else [*system_message, message], engine.target.vocab_size)


def _answer(chunks: Iterator[Chunk], with_logprobs: bool, show: bool) -> Answer:
    """Generate, up to the end or Ctrl-C."""
    answer = Answer(with_logprobs=with_logprobs)
    started = time.perf_counter()
    try:
        with waiting("reading the prompt"):
            first = next(chunks)
        answer.first_token_seconds = time.perf_counter() - started
        for chunk in chain([first], chunks):
            answer.add(chunk)
            if show:
                write_out(chunk.text)
    except KeyboardInterrupt:
        answer.finish_reason = "interrupted"
    finally:
        if show and answer.token_ids:
            write_out("\n")
    return answer
