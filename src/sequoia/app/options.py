"""The options of the commands, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sequoia.app.failure import Run

# As in `sequoia.tree.specs`, which takes NumPy to import; a test compares them.
TREE_FORMS = "off, chain:4, chains:16x8, beam:4x6, kary:2x4, optimal:64x8, dynamic:64x8 or a shape file"

TREE_PANEL = "Tree"
_MODELS, _SAMPLING, _LENGTH, _OUTPUT = "Models", "Sampling", "Length", "Output"


def _note_debug(context: typer.Context, debug: bool) -> bool:
    run = context.find_root().obj
    if isinstance(run, Run):
        run.debug = run.debug or debug
    return debug


Prompt = Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.", show_default=False)]

Target = Annotated[
    str | None,
    typer.Option(
        help="The model to answer: a folder, a .gguf file or a hub name.",
        show_default="SmolLM2-135M-Instruct",
        metavar="MODEL",
        rich_help_panel=_MODELS,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        help="What proposes tokens: ngram, a smaller model of the same vocabulary, a head trained for the target, or "
        "the target's own weights rounded; any but ngram with copies of what followed the same tokens earlier.",
        show_default="auto: the head shipped for the target+ngram, else ngram",
        metavar="auto|ngram|MODEL|HEAD|self:int4[+ngram]",
        rich_help_panel=_MODELS,
    ),
]
_DTYPES = "auto, int8 (on CPUs), int4, bf16, fp16 or fp32"
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        "--weights",
        help=f"Number format of the target: {_DTYPES}. With int8 or int4 the target is the quantised model.",
        metavar="NAME",
        rich_help_panel=_MODELS,
    ),
]
DraftDtype = Annotated[
    str,
    typer.Option(
        help=f"Of a draft that is a model or a head: {_DTYPES}. No choice changes what is said.",
        show_default="int8 where fast",
        metavar="NAME",
        rich_help_panel=_MODELS,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.", metavar="NAME", rich_help_panel=_MODELS)]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Of the CPU.", show_default="one for each core", rich_help_panel=_MODELS),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Faster passes on a CPU with a C++ compiler, once compiled.", rich_help_panel=_MODELS
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        help="Where the target's weights lie that do not fit into memory: disk, host (for a GPU) or off; auto is off "
        "where they fit.",
        metavar="auto|disk|host|off",
        rich_help_panel=_MODELS,
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        help="All the fast memory there is, such as 2GiB; with it layers are streamed that do not fit.",
        show_default="what is free",
        metavar="SIZE",
        rich_help_panel=_MODELS,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help="Most tokens of prompt and answer, which memory is planned for.",
        show_default="the model's; 4096 when streamed",
        rich_help_panel=_MODELS,
    ),
]

Tree = Annotated[
    str,
    typer.Option(help=f"auto, {TREE_FORMS}.", show_default="auto: planned", metavar="TREE", rich_help_panel=TREE_PANEL),
]
Plan = Annotated[
    Path | None,
    typer.Option(
        help="What `sequoia tune` wrote for this pair of models.",
        show_default="the one tuned here earlier, if any",
        metavar="FILE",
        rich_help_panel=TREE_PANEL,
    ),
]
NoGuard = Annotated[
    bool,
    typer.Option(
        "--no-guard",
        help="Keep to the plan, also where plain decoding is measured to be faster.",
        rich_help_panel=TREE_PANEL,
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="Acceptance rates to plan optimal trees with.",
        show_default="rates shipped for the kind of draft",
        metavar="FILE",
        rich_help_panel=TREE_PANEL,
    ),
]
Verifier = Annotated[
    str,
    typer.Option(
        help="How tokens are accepted: auto, sequoia, specinfer, spectr or sampler_match; all are lossless.",
        metavar="NAME",
        rich_help_panel=TREE_PANEL,
    ),
]

Temperature = Annotated[
    float, typer.Option(help="0 always takes the most probable token; 1 samples as trained.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option(help="Keep the most probable tokens that have this mass.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the most probable.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(help="Keep tokens at least this times as probable as the best.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: against tokens in prompt or answer.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Above 0: against tokens in the answer.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, once per occurrence.", rich_help_panel=_SAMPLING)]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        help="Add to a token's logit; -inf bans it. Repeatable.", metavar="ID=AMOUNT", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Repeat a run exactly; without it each run differs.", rich_help_panel=_SAMPLING)
]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_LENGTH)]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text. Repeatable.", metavar="TEXT", rich_help_panel=_LENGTH)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.", rich_help_panel=_LENGTH)
]

System = Annotated[str | None, typer.Option(help="A system message before the prompt.", metavar="TEXT")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")]

Logprobs = Annotated[
    int | None,
    typer.Option(
        help="With --json: log-probabilities of the tokens, and of this many alternatives to each.",
        metavar="COUNT",
        rich_help_panel=_OUTPUT,
    ),
]
ShowGain = Annotated[
    bool,
    typer.Option("--gain", help="Decode 16 tokens plainly, and tell what drafting gains.", rich_help_panel=_OUTPUT),
]
ShowStats = Annotated[bool, typer.Option("--stats", help="Print what happened in the rounds.", rich_help_panel=_OUTPUT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=_OUTPUT)]
Out = Annotated[
    Path | None,
    typer.Option(help="Write the shape to a file that --tree reads.", metavar="FILE", rich_help_panel=_OUTPUT),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Print tracebacks of errors.", is_eager=True, callback=_note_debug, rich_help_panel=_OUTPUT
    ),
]

_COMPARISON = "Comparison"

Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="Commas between: plain, a tree such as optimal:16x4, VERIFIER:TREE, plan, plan:FILE, transformers, "
        "transformers-assisted, transformers-lookup, llama.cpp, llama.cpp-lookup, a .py or .yaml file. Repeatable.",
        show_default="all but files, assisted and llama.cpp",
        metavar="NAMES",
        rich_help_panel=_COMPARISON,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        help="Where prompts come from: built-in, a .jsonl or .txt file, c4, openwebtext, cnn_dailymail, mt_bench, "
        "wikitext or hf:NAME:CONFIG:SPLIT. Repeatable.",
        show_default="built-in",
        metavar="SOURCE",
        rich_help_panel=_COMPARISON,
    ),
]
PromptCount = Annotated[int, typer.Option("--count", help="Most prompts to use.", rich_help_panel=_COMPARISON)]
Repeats = Annotated[int, typer.Option(help="Requests for each prompt.", rich_help_panel=_COMPARISON)]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Fewer methods, 48 tokens, at most 5 minutes.", rich_help_panel=_COMPARISON),
]
BenchSeed = Annotated[
    int, typer.Option("--seed", help="Of the noise and of the prompts' order.", rich_help_panel=_COMPARISON)
]
Temperatures = Annotated[
    str, typer.Option("--temperature", help="One or more.", metavar="LIST", rich_help_panel=_SAMPLING)
]
TopPs = Annotated[
    str,
    typer.Option("--top-p", help="One or more, each with each temperature.", metavar="LIST", rich_help_panel=_SAMPLING),
]
BenchMaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", help="Most tokens of an answer.", show_default="128; quick: 48", rich_help_panel=_LENGTH
    ),
]
PromptTokens = Annotated[int, typer.Option(min=1, help="Texts are cut to this many tokens.", rich_help_panel=_LENGTH)]
BenchOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder for results and page; a run that stopped there goes on.",
        show_default="bench-DATE-TIME",
        metavar="DIR",
        rich_help_panel=_OUTPUT,
    ),
]
BenchFolder = Annotated[
    Path, typer.Argument(help="The folder that a run has written.", metavar="DIR", show_default=False)
]

_MEASUREMENT, _PLANNING = "Measurement", "Planning"

TunePrompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        help="What acceptance is measured on: built-in, a .jsonl or .txt file, c4, openwebtext, cnn_dailymail, "
        "mt_bench, wikitext or hf:NAME:CONFIG:SPLIT. Repeatable.",
        show_default="built-in",
        metavar="SOURCE",
        rich_help_panel=_MEASUREMENT,
    ),
]
TunePromptCount = Annotated[
    int, typer.Option("--count", min=1, help="Most prompts to use.", rich_help_panel=_MEASUREMENT)
]
Samples = Annotated[
    int, typer.Option(min=1, help="Answers to measure, for each temperature.", rich_help_panel=_MEASUREMENT)
]
SampleTokens = Annotated[
    int, typer.Option("--tokens", min=1, help="Most tokens of such an answer.", rich_help_panel=_MEASUREMENT)
]
TunePromptTokens = Annotated[
    int,
    typer.Option("--prompt-tokens", min=1, help="Texts are cut to this many tokens.", rich_help_panel=_MEASUREMENT),
]
TuneSeed = Annotated[int, typer.Option("--seed", min=0, help="Of the answers' noise.", rich_help_panel=_MEASUREMENT)]
Seconds = Annotated[
    float, typer.Option(min=0, help="For timing, about; the longer the surer.", rich_help_panel=_MEASUREMENT)
]
FromRun = Annotated[
    list[Path] | None,
    typer.Option(
        help="Merge in what answers accepted: a file of what generate --json printed, one a line. Repeatable.",
        metavar="FILE",
        rich_help_panel=_MEASUREMENT,
    ),
]
TuneTemperatures = Annotated[
    str,
    typer.Option("--temperature", help="One or more; each gets a plan.", metavar="LIST", rich_help_panel=_SAMPLING),
]
MaxSize = Annotated[int, typer.Option(min=1, help="Most nodes of a tree.", rich_help_panel=_PLANNING)]
MaxDepth = Annotated[int, typer.Option(min=1, help="Most edges from the root.", rich_help_panel=_PLANNING)]
Batch = Annotated[
    str,
    typer.Option(
        help="Plan on paper for so many requests at once, at the first temperature.",
        metavar="LIST",
        rich_help_panel=_PLANNING,
    ),
]
PlanOut = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Write the plan to this file too, which --plan reads.", metavar="FILE", rich_help_panel=_OUTPUT
    ),
]
ReportOut = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Write an HTML page of what was measured, and a picture of the same name.",
        metavar="FILE",
        rich_help_panel=_OUTPUT,
    ),
]

HeadOut = Annotated[
    Path, typer.Option("--out", help="The folder for the head, and for what its training keeps.", metavar="FOLDER")
]
TrainData = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Prompts that the target answers, as for `tune --prompts`; repeat it for several.",
        show_default="requests that the target writes itself",
        metavar="SOURCE",
    ),
]
TrainTokens = Annotated[int, typer.Option("--tokens", min=1, help="Of text that the target writes.")]
Epochs = Annotated[int, typer.Option(min=1, help="Times that the texts are trained on.")]
Hours = Annotated[
    float | None, typer.Option(help="For all of it, at most; fewer texts are written then.", show_default="no limit")
]
DraftVocab = Annotated[int, typer.Option(min=1, help="Tokens that the head can propose: the most frequent ones.")]
Disk = Annotated[str, typer.Option(help="What texts and their features may take of the disk.", metavar="SIZE")]
TrainSeed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same head.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the training in the folder.")]
