"""What a generation tells besides its text: a heading, a closing line, a table, a JSON object."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sequoia.app.output import console, write_out
from sequoia.app.report_plan import end_mark, plan_mark, plan_record, print_plan

if TYPE_CHECKING:
    from rich.table import Table

    from sequoia.engine import Chunk, Engine
    from sequoia.model.offload.budget import MemoryPlan
    from sequoia.params import SamplingParams
    from sequoia.speculate.session import TokenLogprobs
    from sequoia.speculate.stats import Stats
    from sequoia.tree.dynamic import Tree
    from sequoia.tree.shape import TreeShape

_GAP = " " * 6
_COLUMNS_WITHOUT_RANKS = 26  # of the acceptance table
_RANK_COLUMNS = 10


@dataclass
class Answer:
    """Chunks joined as they come; an interrupted answer is as good as a whole one."""

    with_logprobs: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    first_token_seconds: float | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()
        self.finish_reason = chunk.finish_reason or ""


def heading(engine: Engine, params: SamplingParams) -> str:
    """What runs: target, draft and tree, on one line where there is room for it."""
    parts = [f"target {engine.target.loaded.name} · {_dtype(engine)} · {_device(engine)}"]
    draft, draft_dtype = _draft_name(engine), _draft_dtype(engine)
    told = draft_dtype is None or draft.endswith(f":{draft_dtype}")  # self:int4
    parts.append(f"draft {draft}" + ("" if told else f" · {draft_dtype}"))
    parts.append(_tree(engine.tree_for(params)) + plan_mark(engine))
    if engine.verifier.name != "sequoia" and not _is_dynamic(engine.tree):
        parts.append(f"verifier {engine.verifier.name}")
    line = _GAP.join(parts)
    return line if not sys.stderr.isatty() or len(line) <= console().width else "\n".join(parts)


def memory_line(memory: MemoryPlan) -> str:
    """How fast memory is divided, and what is read in each pass."""
    parts = {
        "libraries": memory.libraries,
        "embedding and head": memory.ends,
        "draft": memory.draft,
        "caches": memory.caches,
        "rows": memory.rows,
        f"{memory.resident} of {memory.layers} layers": memory.kept,
        f"ring of {memory.slots}": memory.ring,
    }
    spent = " · ".join(f"{name} {_mebibytes(count)}" for name, count in parts.items() if count)
    read = f"; {_mebibytes(memory.read)} MiB are read in each pass" if memory.streamed else ""
    return f"memory {_mebibytes(memory.total)} of {_mebibytes(memory.budget)} MiB: {spent}{read}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def closing_line(answer: Answer, engine: Engine, params: SamplingParams) -> str:
    """What it took: tokens, speed, tokens per round and tree; on a terminal set off from the answer."""
    stats, gain = engine.stats, engine.stats.gain
    per_round = stats.mean_accepted_length if gain is None else gain.tokens_per_round
    parts = [
        f"{_count(stats.emitted_tokens, 'token')} in {stats.seconds:.1f} s",
        f"{stats.tokens_per_second:.3g} tokens/s",
        f"{per_round:.2f} tokens per round",
        *([f"{gain.speedup:.2f}× plain decoding, as measured on {gain.plain_tokens} tokens"] if gain else []),
        _tree(engine.tree_for(params)) + end_mark(stats),
        f"finish: {answer.finish_reason}",
    ]
    return ("\n" if sys.stderr.isatty() else "") + " · ".join(parts)


def print_json(answer: Answer, engine: Engine, params: SamplingParams, prompt_tokens: int) -> None:
    """One JSON object on stdout; `sequoia tune --from-run` reads it."""
    from sequoia.tree.plan import law_of

    record = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "logprobs": [_logprobs(entry) for entry in answer.logprobs] if answer.with_logprobs else None,
        "prompt_tokens": prompt_tokens,
        "params": law_of(params),
        "target": engine.target.loaded.name,
        "draft": _draft_name(engine),
        "dtype": _dtype(engine),
        "draft_dtype": _draft_dtype(engine),
        "device": str(engine.target.device),
        "verifier": engine.verifier.name,
        "path": engine.target.path,
        "draft_path": _draft_path(engine),
        "tree": _tree_record(engine.tree_for(params)),
        "plan": plan_record(engine.stats),
        "stats": _stats(engine.stats),
    }
    write_out(json.dumps(record, allow_nan=False) + "\n")


def print_stats(answer: Answer, engine: Engine) -> None:
    """Tables for people, on stderr."""
    screen, stats = console(), engine.stats
    for line in _paths(engine):
        screen.print(line)
    screen.print(_counts(answer, stats))
    print_plan(screen, stats)
    if stats.visits:
        screen.print("accepted by depth and rank")
        screen.print(_acceptance(stats, ranks=_ranks_that_fit(stats, screen.width)))


def _stats(stats: Stats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "emitted_tokens": stats.emitted_tokens,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "cut_tokens": stats.cut_tokens,
        "mean_accepted_length": stats.mean_accepted_length,
        "seconds": stats.seconds,
        "first_round_seconds": stats.first_round_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "gain": None if stats.gain is None else asdict(stats.gain),
        "visits": stats.visits,
        "accepted": stats.accepted,
    }


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token": token, "logprob": _finite(logprob)} for token, logprob in entry.top]
    return {"token": entry.token, "logprob": _finite(entry.logprob), "top": top}


def _finite(number: float) -> float | None:
    """JSON has no infinity: a token of probability 0 gets null."""
    return number if math.isfinite(number) else None


def _counts(answer: Answer, stats: Stats) -> Table:
    from rich.table import Table

    rows = [
        ("rounds", f"{stats.rounds:,}"),
        ("tokens emitted", f"{stats.emitted_tokens:,}"),
        ("drafted", f"{stats.drafted_tokens:,}"),
        ("accepted", f"{stats.accepted_tokens:,}"),
        ("cut at the end", f"{stats.cut_tokens:,}"),
        ("first round", _seconds(stats.first_round_seconds)),
        ("first token after", _seconds(answer.first_token_seconds)),
        ("later rounds", _later_rounds(stats)),
    ]
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _acceptance(stats: Stats, ranks: int) -> Table:
    """By depth: visits, and the share of them that each rank's child was accepted in."""
    from rich.table import Table

    most = max(map(len, stats.accepted))
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading_ in ("depth", "visits", *(f"rank {rank}" for rank in range(ranks))):
        table.add_column(heading_, justify="right", no_wrap=True)
    if ranks < most:
        table.add_column("others", justify="right", no_wrap=True)
    table.add_column("none", justify="right", no_wrap=True)
    for depth, (visits, accepted) in enumerate(zip(stats.visits, stats.accepted, strict=True)):
        counts = [*accepted, *[0] * (most - len(accepted))]
        shown = [*counts[:ranks], *([sum(counts[ranks:])] if ranks < most else []), visits - sum(accepted)]
        table.add_row(str(depth), f"{visits:,}", *(f"{count / max(visits, 1):.3f}" for count in shown))
    return table


def _ranks_that_fit(stats: Stats, width: int) -> int:
    most = max(map(len, stats.accepted))
    room = (width - _COLUMNS_WITHOUT_RANKS) // _RANK_COLUMNS
    return min(most, max(1, room))


def _tree(tree: Tree) -> str:
    if tree.size == 1:
        return "tree off"
    kind = "dynamic tree of up to" if _is_dynamic(tree) else "tree"
    return f"{kind} {tree.size} nodes, depth {tree.depth}"


def _tree_record(tree: Tree) -> dict[str, Any]:
    is_dynamic = _is_dynamic(tree)
    parents = None if is_dynamic else list(cast("TreeShape", tree).parents)
    return {"size": tree.size, "depth": tree.depth, "dynamic": is_dynamic, "parents": parents}


def _is_dynamic(tree: Tree) -> bool:
    from sequoia.tree.dynamic import DynamicTree

    return isinstance(tree, DynamicTree)


def _dtype(engine: Engine) -> str:
    return engine.target.loaded.weights


def _draft_dtype(engine: Engine) -> str | None:
    """None where the draft is no model loaded here."""
    loaded = getattr(getattr(engine.draft, "model", None), "loaded", None)
    return getattr(loaded, "weights", None)


def _paths(engine: Engine) -> list[str]:
    """Which code runs the passes."""
    draft = _draft_path(engine)
    return [f"target passes: {engine.target.path}", *([f"draft passes: {draft}"] if draft else [])]


def _draft_path(engine: Engine) -> str | None:
    return getattr(getattr(engine.draft, "model", None), "path", None)


def _device(engine: Engine) -> str:
    import torch

    device = engine.target.device
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"cpu, {_count(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else str(device)


def _draft_name(engine: Engine) -> str:
    from sequoia.planning.pair import draft_name

    name = draft_name(engine.draft)
    return "n-gram" if name == "ngram" else name


def _later_rounds(stats: Stats) -> str:
    later = stats.rounds - 1
    return f"{1000 * (stats.seconds - stats.first_round_seconds) / later:.1f} ms each" if later > 0 else "–"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
