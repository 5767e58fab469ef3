"""The checks, run on each prompt's answers while the model that must have given them is at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sequoia.engine import Engine
from sequoia.measure.bench import checks
from sequoia.measure.bench.method import PLAIN, Method
from sequoia.measure.bench.records import NEAR_TIE, Finding, Result, Setting

_Key = tuple[str, Setting, str, int]
_Answer = tuple[str, bool, tuple[int, ...]]  # method, whether sampled, token ids

_COARSE = torch.bfloat16  # methods with a model of their own calculate with quantised numbers, about as coarse


class Checker:
    """Remembers all answers, since some faults show only beside others.

    Args:
        prompts: token ids by prompt.
    """

    def __init__(
        self, engine: Engine, methods: Sequence[Method], prompts: Mapping[str, Sequence[int]], max_tokens: int
    ) -> None:
        self._target = engine.target
        self._methods = {method.name: method for method in methods}
        self._prompts = prompts
        self._limits = checks.Limits(engine.target.vocab_size, engine.target.loaded.eos_ids, max_tokens)
        self._results: dict[_Key, Result] = {}
        self._first: dict[_Answer, Result] = {}
        self._tied: set[_Key] = set()

    def remember(self, results: Sequence[Result], findings: Sequence[Finding]) -> None:
        """What was checked before, maybe by another process."""
        self._results |= {result.key: result for result in results}
        self._tied |= {(tie.method, tie.setting, tie.prompt, tie.repeat) for tie in findings if tie.kind == NEAR_TIE}
        for result in results:
            self._first.setdefault(_answer(result), result)

    def check(self, results: Sequence[Result]) -> list[Finding]:
        """Everything noticeable about answers to one prompt; those that they are compared with are among them or
        were remembered."""
        self._results |= {result.key: result for result in results}
        findings = []
        for result in results:
            found = list(self._findings(result))
            self.remember([result], found)
            findings += found
        return findings

    def _findings(self, result: Result) -> Iterator[Finding]:
        found = list(checks.alone(result, self._limits))
        yield from found
        if any(entry.kind in ("no token", "beyond the vocabulary") for entry in found):
            return
        compared = self._compared(result)
        if compared is not None:
            yield compared
        earlier = self._first.get(_answer(result))
        if earlier is not None and self._is_reuse(result, earlier, compared):
            yield checks.finding(result, "reused answer", f"the {len(result.token_ids)} tokens of {_where(earlier)}")

    def _compared(self, result: Result) -> Finding | None:
        """The greedy answer beside the one it must repeat."""
        method = self._methods[result.method]
        reference = self._results.get((method.same_as or "", *result.key[1:]))
        if result.setting.temperature > 0 or reference is None:
            return None
        prompt = list(self._prompts[result.prompt])
        dtype = _COARSE if method.own_model else self._target.loaded.dtype

        def logits_from(count: int) -> Tensor:
            # Past a tie another model goes its own way, of which the target's logits say nothing.
            rows = 1 if method.own_model else len(result.token_ids) - count
            return self._logits([*prompt, *result.token_ids[: count + rows - 1]], rows)

        return checks.against(result, reference, logits_from, torch.finfo(dtype).eps)

    def _is_reuse(self, result: Result, earlier: Result, compared: Finding | None) -> bool:
        if len(result.token_ids) < checks.SHORTEST_REUSE:
            return False
        if result.setting.temperature > 0 and not self._methods[result.method].own_model:
            return self._log_probability(result) < math.log(checks.SURPRISE)
        tied = earlier.key in self._tied or (compared is not None and compared.kind == NEAR_TIE)
        plain, plain_earlier = (self._results.get((PLAIN, *key[1:])) for key in (result.key, earlier.key))
        differ = plain is not None and plain_earlier is not None and plain.token_ids != plain_earlier.token_ids
        return result.prompt != earlier.prompt and differ and not tied

    def _log_probability(self, result: Result) -> float:
        ids = list(result.token_ids)
        logits = self._logits([*self._prompts[result.prompt], *ids[:-1]], len(ids))
        return checks.log_probability(logits, ids, result.setting)

    def _logits(self, tokens: list[int], last: int) -> Tensor:
        """[last, vocab] the target's logits after the last of `tokens`, in one linear pass."""
        rows = torch.tensor(tokens, device=self._target.device)
        return self._target.forward(rows, self._target.new_cache(), last=last).float()


def _answer(result: Result) -> _Answer:
    return result.method, result.setting.temperature > 0, result.token_ids


def _where(earlier: Result) -> str:
    return f"its answer to {earlier.prompt} at {earlier.setting}, repeat {earlier.repeat}, came again"
