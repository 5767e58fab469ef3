"""The proof proves something: broken rules and broken loops fail it, the right ones pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sequoia.measure.joint_law import DYNAMIC_TREES, PROMPT, SHAPES, VOCAB, Case, Run, run_session
from sequoia.measure.selftest import SelfTest, run_selftest
from sequoia.measure.toy import ToyCache
from sequoia.speculate import verify as verify_module
from sequoia.speculate.growth import Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.rules import NodeLaw, Rule, recursive_rejection
from sequoia.speculate.sampling import Draws, Noise, Purpose
from sequoia.speculate.session import Session
from sequoia.speculate.token_tree import TokenTree
from sequoia.speculate.verify import VERIFIERS, Verifier

SEQUOIA = VERIFIERS["sequoia"]
TREES = SHAPES | DYNAMIC_TREES


def prove(verifier: Verifier = SEQUOIA, run: Run = run_session, samples: int = 0) -> SelfTest:
    """One verifier, without the engine; `sequoia selftest` takes 250 samples of each case."""
    return run_selftest([verifier], samples=samples, run=run, device=None)


# Broken rules: enumeration must see them, and sampling as well.


def residual_is_target(target: Tensor, draft: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    return replace(SEQUOIA.rule(target, draft, children, proposable), residual=target)


def residual_keeps_the_drafts_share(target: Tensor, draft: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    """Takes out the rejected children alone."""
    rest = target.scatter(1, children.clamp(min=0), 0.0) + 1e-30
    return replace(SEQUOIA.rule(target, draft, children, proposable), residual=rest)


def draft_is_not_renormalised(target: Tensor, draft: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    return recursive_rejection(target, draft, children, proposable, replacement=True)


def accepts_too_much(target: Tensor, draft: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    law = SEQUOIA.rule(target, draft, children, proposable)
    return replace(law, accept=(law.accept * 1.25).clamp(max=1))


def residual_is_nothing(target: Tensor, draft: Tensor, children: Tensor, proposable: int) -> NodeLaw:
    return replace(SEQUOIA.rule(target, draft, children, proposable), residual=target * torch.nan)


BROKEN_RULES: list[Rule] = [
    residual_is_target,
    residual_keeps_the_drafts_share,
    draft_is_not_renormalised,
    accepts_too_much,
    residual_is_nothing,
]


@pytest.mark.parametrize("rule", BROKEN_RULES, ids=lambda rule: rule.__name__)
def test_enumeration_sees_a_broken_rule(rule: Rule) -> None:
    result = prove(replace(SEQUOIA, rule=rule, quick=None))
    assert not result.ok
    assert not result.enumeration_ok
    assert result.joint_ok


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_enumeration_sees_children_of_the_wrong_kind(verifier: Verifier) -> None:
    for draws in Draws:
        result = prove(replace(verifier, draws=draws))
        # Sampler-match is exact for any children; spectr and specinfer need independent ones, sequoia distinct ones.
        assert result.ok == (draws is verifier.draws or verifier.name == "sampler_match")


@pytest.mark.slow
@pytest.mark.parametrize("rule", [residual_is_target, draft_is_not_renormalised], ids=lambda rule: rule.__name__)
def test_sampling_sees_a_broken_rule(rule: Rule) -> None:
    assert not prove(replace(SEQUOIA, rule=rule, quick=None), samples=80).joint_ok


def test_sampling_sees_likeliest_children_verified_as_if_drawn() -> None:
    """In trees of a fixed shape, and in dynamic ones."""
    (result,) = prove(replace(SEQUOIA, draws=Draws.TOP_K), samples=80).verifiers
    assert {"dynamic" in case.name for case in result.failures} == {False, True}


def test_dynamic_trees_take_part() -> None:
    (result,) = prove(VERIFIERS["sampler_match"], samples=4).verifiers
    assert result.joint_ok
    assert sum("dynamic" in case.name for case in result.cases) > 20


# Broken loops: every node's law is right, so only the joint law can see them.


def with_session(spoil: Callable[[Session, Case, int], None]) -> Run:
    """The loop with something in its session replaced."""

    def run(case: Case, request: int) -> Sequence[int]:
        session = Session(
            case.target,
            case.proposer(),
            (SHAPES | DYNAMIC_TREES)[case.tree],
            case.verifier,
            PROMPT,
            case.params,
            request=request,
        )
        spoil(session, case, request)
        while session.finish_reason is None:
            session.step()
        return session.tokens[len(PROMPT) :]

    return run


class OncePerPrompt(Noise):
    def generator(self, round_index: int, purpose: Purpose) -> torch.Generator:
        return super().generator(0, purpose)


class CoinsOncePerPrompt(Noise):
    def generator(self, round_index: int, purpose: Purpose) -> torch.Generator:
        return super().generator(round_index if purpose is Purpose.DRAFT else 0, purpose)


class SharedWithTheVerifier(Noise):
    def generator(self, round_index: int, purpose: Purpose) -> torch.Generator:
        return super().generator(round_index, Purpose.DRAFT)


def noise(kind: type[Noise], own_request: bool = True) -> Run:
    def spoil(session: Session, case: Case, request: int) -> None:
        session._noise = kind(case.params.seed, request if own_request else 0)

    return with_session(spoil)


class BlindToPaths(Processors):
    """Penalties see emitted tokens, not those on the way to a node."""

    def scores(self, logits: Tensor, paths: Sequence[Sequence[int]], *args: Any, **options: Any) -> Tensor:
        return super().scores(logits, [[] for _ in paths], *args, **options)


class Unfiltered(Processors):
    def probs(self, scores: Tensor) -> Tensor:
        params = self.params
        self.params = replace(params, top_k=None, top_p=1.0, min_p=0.0)
        try:
            return super().probs(scores)
        finally:
            self.params = params


class FrozenContext(Processors):
    """Penalties that count nothing after the prompt."""

    def observe(self, tokens: Any) -> None:
        pass


def processors(kind: type[Processors]) -> Run:
    def spoil(session: Session, case: Case, request: int) -> None:
        session._processors = kind(case.params, PROMPT, VOCAB)

    return with_session(spoil)


class RewoundByACount(ToyCache):
    """Keeps as many slots as were accepted, and not those that were."""

    def keep(self, start: int, slots: Sequence[int]) -> None:
        self.truncate(start + len(slots))


def rewound(session: Session, case: Case, request: int) -> None:
    session.cache = RewoundByACount()


class Wrapped:
    """A proposer whose growth or tree is spoilt on the way."""

    def __init__(self, proposer: Any, case: Case) -> None:
        self._proposer, self._case = proposer, case
        self.proposable, self.context_length = proposer.proposable, proposer.context_length

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        return self._proposer.propose(tokens, growth)

    def keep(self, path: Sequence[int]) -> None:
        self._proposer.keep(path)


class FilteredByItself(Wrapped):
    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        own = Processors(self._case.params, PROMPT, VOCAB)
        own.observe(tokens[len(PROMPT) :])
        return super().propose(tokens, replace(growth, processors=own))


class ReportsAnotherLaw(Wrapped):
    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        tree = super().propose(tokens, growth)
        sharper = tree.support_probs**4
        return replace(tree, support_probs=sharper / sharper.sum(-1, keepdim=True).clamp(min=1e-30))


def filters_on_the_draft_only(session: Session, case: Case, request: int) -> None:
    session._processors = Unfiltered(case.params, PROMPT, VOCAB)
    session._proposer = FilteredByItself(session._proposer, case)


def verified_law_is_not_the_drawn_one(session: Session, case: Case, request: int) -> None:
    session._proposer = ReportsAnotherLaw(session._proposer, case)


class LastCoinTwice:
    """The coin of the last child is the residual's as well."""

    def __init__(self, uniform: Callable[..., Tensor]) -> None:
        self._uniform = uniform

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        coins = self._uniform(shape, generator)
        coins[:, -1] = coins[:, -2:][:, 0]
        return coins


BROKEN_LOOPS: dict[str, tuple[Run, int]] = {
    "noise once per prompt": (noise(OncePerPrompt), 60),
    "coins once per prompt": (noise(CoinsOncePerPrompt), 60),
    "draft and verifier share noise": (noise(SharedWithTheVerifier), 260),
    "requests share noise": (noise(Noise, own_request=False), 10),
    "penalties blind to the path": (processors(BlindToPaths), 30),
    "penalties blind to the output": (processors(FrozenContext), 80),
    "no filters": (processors(Unfiltered), 20),
    "filters on the draft only": (with_session(filters_on_the_draft_only), 20),
    "cache rewound by a count": (with_session(rewound), 40),
    "the law verified is not the law drawn from": (with_session(verified_law_is_not_the_drawn_one), 100),
}


@pytest.mark.slow
@pytest.mark.parametrize(("run", "samples"), BROKEN_LOOPS.values(), ids=BROKEN_LOOPS)
def test_sampling_sees_a_broken_loop(run: Run, samples: int) -> None:
    result = prove(run=run, samples=samples)
    assert result.enumeration_ok
    assert not result.joint_ok


@pytest.mark.slow
def test_sampling_sees_an_accept_coin_used_again_for_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "uniform", LastCoinTwice(verify_module.uniform))
    assert not prove(samples=160).joint_ok


# The right ones.


@pytest.mark.slow
def test_all_verifiers_pass_with_the_engine() -> None:
    threads = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    result = run_selftest(samples=12, device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert result.ok, result.to_dict()
    assert [entry.name for entry in result.verifiers] == list(VERIFIERS)
    assert result.max_error < 1e-13
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert torch.get_num_threads() == threads
    assert any("engine" in case.name for case in result.verifiers[0].cases)


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_a_right_verifier_passes_with_another_seed(verifier: Verifier) -> None:
    assert run_selftest([verifier], samples=15, seed=1, device=None).ok


def test_the_same_seed_gives_the_same_proof() -> None:
    first, again = prove(samples=10), prove(samples=10)
    assert first == again
    assert first != run_selftest([SEQUOIA], samples=10, seed=1, device=None)


def test_the_record_is_plain_data() -> None:
    record = json.loads(json.dumps(prove(samples=5).to_dict()))
    assert record["ok"] is True
    assert record["verifiers"][0]["name"] == "sequoia"
    assert len(record["verifiers"][0]["cases"]) == 29
