"""The round: what it emits, what it leaves in the caches, where it stops. Numbers are rows of docs/faults.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sequoia.draft.model_draft import ModelDraft
from sequoia.draft.ngram_draft import NgramDraft
from sequoia.engine import Engine, load
from sequoia.errors import ModelError, UsageError
from sequoia.measure.toy import ToyModel
from sequoia.model.causal_lm import CausalLM
from sequoia.model.kv_cache import KVCache
from sequoia.model.language_model import Block, LanguageModel
from sequoia.model.lean.cache import LeanCache
from sequoia.model.loading import load_model
from sequoia.params import SamplingParams
from sequoia.speculate.growth import Frontier, Growth
from sequoia.speculate.processors import Processors
from sequoia.speculate.session import Proposer, Round, Session, TargetRows
from sequoia.speculate.stats import Stats
from sequoia.speculate.token_tree import TokenTree
from sequoia.speculate.verify import VERIFIERS
from sequoia.tree.dynamic import DynamicTree, Tree
from sequoia.tree.shape import TreeShape

_VOCAB = 12
_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_BUSHY = TreeShape((-1, 0, 1, 1, 3, 0, 5, 5, 2, 4, 5, 0, 11))  # not in level order, depth 4
_SHAPES: dict[str, Tree] = {
    "root": TreeShape.root_only(),
    "chain": TreeShape.chain(5),
    "star": TreeShape((-1, 0, 0, 0, 0)),
    "kary": TreeShape.kary(2, 3),
    "beam": TreeShape.beam(3, 3),
    "bushy": _BUSHY,
    "dynamic": DynamicTree(9, 3),
    "dynamic, deep and narrow": DynamicTree(14, 6, width=1),
}


TARGET = ToyModel.random(_VOCAB, seed=1)
DRAFT = TARGET.blended(ToyModel.random(_VOCAB, seed=2), 0.35)


def _session(
    shape: Tree,
    target: LanguageModel = TARGET,
    proposer: Proposer | None = None,
    prompt: Sequence[int] = _PROMPT,
    verifier: str = "sequoia",
    eos: int | None = None,
    **params: Any,
) -> Session:
    proposer = proposer or ModelDraft(DRAFT, _VOCAB).start()
    eos_ids = frozenset() if eos is None else frozenset({eos})
    if isinstance(shape, DynamicTree):
        verifier = "sampler_match"
    return Session(target, proposer, shape, VERIFIERS[verifier], prompt, SamplingParams(**params), eos_ids)


def _rounds(session: Session) -> list[Round]:
    rounds = []
    while session.finish_reason is None:
        rounds.append(session.step())
    return rounds


def _output(session: Session) -> list[int]:
    return [token for round_ in _rounds(session) for token in round_.token_ids]


def _greedy(prompt: Sequence[int], count: int, table: Tensor = TARGET.table) -> list[int]:
    """Plain decoding, without any of the code under test."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(table[tokens[-2], tokens[-1]].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("shape", _SHAPES)
def test_temperature_0_equals_plain_decoding(shape: str, verifier: str) -> None:
    session = _session(_SHAPES[shape], verifier=verifier, temperature=0, max_tokens=40)
    assert _output(session) == _greedy(_PROMPT, 40)
    assert session.finish_reason == "length"


# 9. A node reads another node's logits row.


def _reordered(shape: TreeShape, seed: int) -> TreeShape:
    """The same tree stored in another order: parents first and siblings in rank order, else at random."""
    generator, order, ready = torch.Generator().manual_seed(seed), list[int](), [0]
    waiting = {node: list(shape.children(node)) for node in range(shape.size)}
    while ready:
        node = ready.pop(int(torch.randint(len(ready), (), generator=generator)))
        order.append(node)
        if waiting[node]:
            ready.append(waiting[node].pop(0))
        parent = shape.parents[node]
        if parent >= 0 and waiting[parent]:
            ready.append(waiting[parent].pop(0))
    place = {node: index for index, node in enumerate(order)} | {-1: -1}
    return TreeShape([place[shape.parents[node]] for node in order])


def _law(tree: TokenTree, verifier: str) -> dict[tuple[int, ...], float]:
    """The law of one round's tokens for this token tree."""
    cache = TARGET.new_cache()
    TARGET.forward(torch.tensor(_PROMPT[:-1]), cache)
    logits = TARGET.forward(tree.tokens, cache, tree.layout.block(len(_PROMPT) - 1))
    rows = TargetRows(logits, tree, Processors(SamplingParams(), _PROMPT, _VOCAB))
    law: Counter[tuple[int, ...]] = Counter()

    def walk(node: int, mass: float, emitted: tuple[int, ...]) -> None:
        target, children = rows([node]).double(), tree.shape.children(node)
        weights = target
        if children:
            tokens = tree.tokens[list(children)][None]
            node_law = VERIFIERS[verifier].rule(target, tree.draft_probs([node], _VOCAB), tokens, tree.proposable)
            for child, accept in zip(children, node_law.accept[0].tolist(), strict=True):
                walk(child, mass * accept, (*emitted, int(tree.tokens[child])))
                mass *= 1 - accept
            weights = node_law.residual
        for token, share in enumerate((weights / weights.sum())[0].tolist()):
            law[(*emitted, token)] += mass * share

    walk(0, 1.0, ())
    return dict(law)


@pytest.mark.parametrize("seed", range(4))
def test_9_storage_order_changes_nothing(seed: int) -> None:
    shape = _reordered(_BUSHY, seed)
    assert shape.in_level_order() == _BUSHY.in_level_order()
    assert shape != _BUSHY
    assert _output(_session(shape, temperature=0, max_tokens=30)) == _greedy(_PROMPT, 30)
    # Children by rank depend on no noise, so both orders hold the same tokens.
    trees = [_session(order, verifier="sampler_match").step().tree for order in (_BUSHY, shape)]
    for verifier in VERIFIERS:
        one, other = (_law(tree, verifier) for tree in trees)
        assert one.keys() == other.keys()
        assert max(abs(one[text] - other[text]) for text in one) < 1e-12
        assert math.isclose(sum(one.values()), 1, abs_tol=1e-9)


# 10. Temperature 0 divides by zero.


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-6, 0.01])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_10_small_temperatures_reach_the_limit(temperature: float, verifier: str) -> None:
    clear = TARGET.table.scatter_add(-1, TARGET.table.argmax(-1, keepdim=True), torch.full((_VOCAB, _VOCAB, 1), 2.0))
    session = _session(_BUSHY, target=ToyModel(clear), verifier=verifier, temperature=temperature, max_tokens=30)
    assert _output(session) == _greedy(_PROMPT, 30)


# 11, 14. A draft that places what it is told.


class _Scripted:
    """Puts `tokens[node]` at each node of the shape, at temperature 0."""

    context_length = None
    proposable = _VOCAB

    def __init__(self, script: Callable[[Sequence[int], TreeShape], Sequence[int]]) -> None:
        self._script = script

    def propose(self, tokens: Sequence[int], growth: Growth) -> TokenTree:
        shape = growth.tree
        assert isinstance(shape, TreeShape)
        placed = self._script(tokens, shape)

        def level_logits(frontier: Frontier) -> Tensor:
            nodes = [node for node in shape.levels[frontier.depth] if shape.children(node)]
            logits = torch.full((len(nodes), _VOCAB), -100.0)
            for row, node in enumerate(nodes):
                for rank, child in enumerate(shape.children(node)):
                    logits[row, placed[child]] = -float(rank)
            return logits

        return growth.run(tokens[-1], torch.arange(_VOCAB), level_logits)

    def keep(self, path: Sequence[int]) -> None:
        pass


def _only_right_to(node: int, table: Tensor) -> Callable[[Sequence[int], TreeShape], Sequence[int]]:
    """A script right on the path to `node` and wrong everywhere else."""

    def script(tokens: Sequence[int], shape: TreeShape) -> Sequence[int]:
        placed = [tokens[-1]] + [-1] * (shape.size - 1)
        for step in range(1, shape.size):
            parent = shape.parents[step]
            text = [*tokens, *(placed[earlier] for earlier in shape.paths[parent])]
            right = int(table[text[-2], text[-1]].argmax())
            siblings = {placed[sibling] for sibling in shape.children(parent)}
            wrong = next(token for token in range(_VOCAB) if token != right and token not in siblings)
            placed[step] = right if node < shape.size and step in shape.paths[node] else wrong
        return placed

    return script


@pytest.mark.parametrize("node", range(_BUSHY.size))
def test_14_each_node_accepted_in_turn(node: int) -> None:
    session = _session(
        _BUSHY, proposer=_Scripted(_only_right_to(node, TARGET.table)), temperature=0, max_tokens=5 * _BUSHY.depth
    )
    first = session.step()
    assert first.verdict.path == _BUSHY.paths[node]
    assert session.cache.tokens == session.tokens[:-1]  # type: ignore[attr-defined]
    rest = _output(session)
    assert [*first.token_ids, *rest] == _greedy(_PROMPT, 5 * _BUSHY.depth)


def test_11_second_of_two_children_accepted_with_nothing_after() -> None:
    session = _session(
        TreeShape((-1, 0, 0)), proposer=_Scripted(_only_right_to(2, TARGET.table)), temperature=0, max_tokens=20
    )
    for _ in range(9):
        round_ = session.step()
        assert round_.verdict.path == (2,)
        assert len(round_.token_ids) == 2
    assert session.tokens[len(_PROMPT) :] == _greedy(_PROMPT, 18)


# 12. Noise that is shared or repeated.


def test_12_a_seed_repeats_a_run_and_no_seed_does_not() -> None:
    def sample(seed: int | None, request: int = 0) -> list[int]:
        params = SamplingParams(max_tokens=40, seed=seed)
        proposer = ModelDraft(DRAFT, _VOCAB).start()
        return _output(Session(TARGET, proposer, _BUSHY, VERIFIERS["sequoia"], _PROMPT, params, request=request))

    assert sample(7) == sample(7)
    assert sample(7, request=1) == sample(7, request=1)
    texts = [sample(7), sample(8), sample(7, request=1), sample(7, request=2), sample(None), sample(None)]
    assert len({tuple(text) for text in texts}) == len(texts)


# 13. A bigger tree accepts less.


def test_13_more_nodes_never_mean_fewer_tokens_per_round() -> None:
    parents = (-1, 0, 1, 0, 2, 1, 3, 4, 0, 7)
    means, errors = [], []
    for size in (1, 2, 3, 4, 6, 8, 10):
        session = _session(TreeShape(parents[:size]), max_tokens=900, seed=size)
        lengths = torch.tensor([len(round_.token_ids) for round_ in _rounds(session)]).double()
        means.append(lengths.mean().item())
        errors.append((lengths.std(correction=0) / len(lengths) ** 0.5).item())
    for smaller in range(len(means)):
        for larger in range(smaller + 1, len(means)):
            noise = math.hypot(errors[smaller], errors[larger])
            assert means[larger] > means[smaller] - 3.5 * noise, (means, errors)
    assert means[0] == 1
    assert means[-1] > 1.6


# 15. Position = node index; 16. unusual sizes; with a model that has attention.


def _llama(vocab: int = 320, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
    }
    return _random(LlamaForCausalLM(LlamaConfig(**sizes | changes)), seed)


def _random(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
    return model


def _wrapped(model: Any, lean: bool = True) -> CausalLM:
    return CausalLM(load_model(model, device="cpu"), lean)


@pytest.fixture(scope="module")
def llama() -> CausalLM:
    return _wrapped(_llama())


@pytest.fixture(scope="module")
def llama_text(llama: CausalLM) -> list[int]:
    """Greedy continuation of `_PROMPT` by transformers."""
    ids = torch.tensor([_PROMPT])
    output = llama.loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=300, pad_token_id=0
    )
    tokens: list[int] = output[0, len(_PROMPT) :].tolist()
    return tokens


_SIZES = (1, 2, 3, 5, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("kind", ["star", "chain", "beam"])
def test_15_16_any_size(llama: CausalLM, llama_text: list[int], kind: str, size: int) -> None:
    star = TreeShape([-1] + [0] * (size - 1))
    beam = TreeShape([-1, *(max(0, node - 16) for node in range(1, size))])
    shape = {"star": star, "chain": TreeShape(range(-1, size - 1)), "beam": beam}[kind]
    for draft in (ModelDraft(llama, llama.vocab_size), NgramDraft(llama.vocab_size)):
        session = _session(shape, llama, draft.start(), temperature=0, max_tokens=300)
        found = [token for _ in range(2) for token in session.step().token_ids]
        assert found == llama_text[: len(found)]
        assert session.cache.length == len(session.tokens) - 1
        sampled = _session(shape, llama, draft.start(), max_tokens=300, seed=size)
        assert len(sampled.step().token_ids) >= 1


def test_16_a_branch_wider_than_the_drafts_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="a node with 13 children, but the draft has only 12 tokens to propose"):
        _session(TreeShape([-1] + [0] * 13))
    _session(TreeShape([-1] + [0] * 12)).step()


def test_16_a_branch_wider_than_the_drafts_support() -> None:
    """The draft believes in one token; the other children come from the rest, each once."""
    one = torch.full((_VOCAB,) * 3, -torch.inf)
    one[..., 4] = 0.0
    for verifier in VERIFIERS:
        session = _session(
            TreeShape([-1] + [0] * 12), proposer=ModelDraft(ToyModel(one), _VOCAB).start(), verifier=verifier
        )
        tokens = session.step().tree.tokens[1:].tolist()
        distinct = {4} if verifier in ("specinfer", "spectr") else set(range(_VOCAB))
        assert set(tokens) == distinct


# 17. Caches that keep guesses.


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", _SHAPES)
def test_17_caches_hold_the_text_and_nothing_else(shape: str, temperature: float) -> None:
    proposer = ModelDraft(DRAFT, _VOCAB).start()
    session = _session(_SHAPES[shape], proposer=proposer, temperature=temperature, max_tokens=60, seed=5)
    while session.finish_reason is None:
        session.step()
        assert session.cache.tokens == session.tokens[:-1]  # type: ignore[attr-defined]
        held = proposer.cache.tokens  # type: ignore[attr-defined]
        assert held == session.tokens[: len(held)]
        assert len(held) < len(session.tokens)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_tree_may_change_between_rounds(temperature: float) -> None:
    """After plain rounds the draft is behind, and catches up."""
    proposer = ModelDraft(DRAFT, _VOCAB).start()
    trees = [TreeShape.kary(2, 2), TreeShape.root_only(), TreeShape.root_only(), _BUSHY, TreeShape.chain(3)]
    session = _session(trees[0], proposer=proposer, temperature=temperature, max_tokens=60, seed=5)
    for tree in cycle(trees):
        session.tree = tree
        room = 59 - (len(session.tokens) - len(_PROMPT))
        assert session.step().tree.shape == tree.limit(room)
        assert session.cache.tokens == session.tokens[:-1]  # type: ignore[attr-defined]
        held = proposer.cache.tokens  # type: ignore[attr-defined]
        assert held == session.tokens[: len(held)]
        if session.finish_reason is not None:
            break
    assert temperature == 1 or session.tokens[len(_PROMPT) :] == _greedy(_PROMPT, 60)


def test_a_tree_that_does_not_fit_is_refused_and_the_old_one_stays() -> None:
    session = _session(_BUSHY, max_tokens=10)
    for tree, message in ((TreeShape([-1] + [0] * 13), "a node with 13 children"), (DynamicTree(4, 2), "are chosen")):
        with pytest.raises(UsageError, match=message):
            session.tree = tree
    assert session.step().tree.shape == _BUSHY


@torch.inference_mode()
def _contents(cache: KVCache | LeanCache) -> list[Tensor]:
    """Keys and values of both layers, as the next forward would see them."""
    if isinstance(cache, LeanCache):
        keys, values, *_ = cache.rows(0)
        return [*keys, *values]
    row = torch.zeros(1, 2, 1, 8)
    return [part[:, :, :-1].clone() for layer in range(2) for part in cache.update(row, row, layer)]


@pytest.mark.parametrize("lean", [True, False])
def test_17_keys_and_values_equal_recomputed_ones(lean: bool) -> None:
    llama, other = _wrapped(_llama(), lean), _llama()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    proposer = ModelDraft(_wrapped(other, lean), llama.vocab_size).start()
    session = _session(TreeShape.beam(4, 4), llama, proposer, max_tokens=40, seed=2, temperature=0.7)
    accepted = 0
    while session.finish_reason is None:
        accepted += len(session.step().verdict.path)
        for model, cache in ((llama, session.cache), (proposer._model, proposer.cache)):
            fresh = model.new_cache()
            model.forward(torch.tensor(session.tokens[: cache.length]), fresh)
            pairs = list(zip(_contents(cache), _contents(fresh), strict=True))  # type: ignore[arg-type]
            assert len(pairs) == 4
            for found, expected in pairs:
                assert found.shape == (1, 2, cache.length, 8)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert accepted > 5


# 18. Padded vocabularies.


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("rows", [8, 12, 16])
def test_18_padded_ids_are_never_proposed(rows: int, verifier: str, temperature: float) -> None:
    """Drafts with fewer, as many and more rows than the target, whose padding they believe in most."""
    proposable = 7
    table = ToyModel.random(rows, seed=4).table
    table[..., proposable:] += 9
    table = torch.nn.functional.pad(table, (0, 0, 0, max(0, _VOCAB - rows), 0, max(0, _VOCAB - rows)))

    target = ToyModel(TARGET.table.clone())
    target.table[..., proposable:] -= 30  # as trained models treat the rows that only pad
    proposer = ModelDraft(ToyModel(table), proposable).start()
    prompt = [token % proposable for token in _PROMPT]
    session = _session(
        _BUSHY, target, proposer, prompt, verifier=verifier, temperature=temperature, max_tokens=40, seed=1
    )
    rounds = _rounds(session)
    assert all(int(round_.tree.tokens.max()) < proposable for round_ in rounds)
    if temperature == 0:
        assert session.tokens[len(prompt) :] == _greedy(prompt, 40, target.table)


@pytest.mark.parametrize("temperature", [0, 1])
def test_18_a_target_may_have_tokens_that_the_draft_does_not_know(temperature: float) -> None:
    """They come in the prompt and in the output; the draft has no row for them."""
    draft = ToyModel.random(7, seed=4)
    session = _session(
        _BUSHY, TARGET, ModelDraft(draft, 7).start(), [1, _VOCAB - 1], temperature=temperature, max_tokens=60, seed=1
    )
    _rounds(session)
    assert max(session.tokens[2:]) >= 7
    if temperature == 0:
        assert session.tokens[2:] == _greedy([1, _VOCAB - 1], 60)


# 19. Text after the end.


def _distinct_start() -> tuple[list[int], list[int]]:
    """A prompt whose greedy continuation begins with 7 different tokens."""
    for first in range(_VOCAB):
        for second in range(_VOCAB):
            text = _greedy([first, second], 7)
            if len(set(text)) == 7:
                return [first, second], text
    raise AssertionError("choose another table")


@pytest.mark.parametrize("end", range(7))
@pytest.mark.parametrize("shape", ["chain", "kary", "bushy", "root"])
def test_19_end_of_text_at_each_depth(shape: str, end: int) -> None:
    prompt, text = _distinct_start()

    def session(**params: Any) -> Session:
        proposer = ModelDraft(TARGET, _VOCAB).start()
        return _session(_SHAPES[shape], TARGET, proposer, prompt, eos=text[end], temperature=0, **params)

    stopping = session(max_tokens=50)
    rounds = _rounds(stopping)
    assert [token for round_ in rounds for token in round_.token_ids] == text[: end + 1]
    assert stopping.finish_reason == rounds[-1].finish_reason == "stop"
    assert stopping.cache.tokens == stopping.tokens[:-1]  # type: ignore[attr-defined]

    ignoring = session(max_tokens=7, ignore_eos=True)
    assert _output(ignoring) == text
    assert ignoring.finish_reason == "length"


@pytest.mark.parametrize("limit", range(1, 12))
@pytest.mark.parametrize("shape", ["chain", "kary", "bushy"])
def test_19_max_tokens_inside_a_path(shape: str, limit: int) -> None:
    proposer = ModelDraft(TARGET, _VOCAB).start()
    session = _session(_SHAPES[shape], proposer=proposer, temperature=0, max_tokens=limit)
    assert _output(session) == _greedy(_PROMPT, limit)
    assert session.finish_reason == "length"
    assert session.cache.tokens == session.tokens[:-1]  # type: ignore[attr-defined]


def test_19_end_of_text_wins_over_the_limit_at_the_same_token() -> None:
    prompt, text = _distinct_start()
    session = _session(_SHAPES["chain"], prompt=prompt, eos=text[4], temperature=0, max_tokens=5)
    assert _output(session) == text[:5]
    assert session.finish_reason == "stop"


# 20. Penalties ignored, or counted once per round.


def _penalised(prompt: Sequence[int], count: int, params: SamplingParams) -> list[int]:
    """Plain decoding with penalties as transformers (repetition) and vLLM (presence, frequency) define them."""
    tokens = list(prompt)
    for _ in range(count):
        logits = TARGET.table[tokens[-2], tokens[-1]].clone()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        for token in set(tokens):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, times in Counter(tokens[len(prompt) :]).items():
            logits[token] -= params.presence_penalty + times * params.frequency_penalty
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.3},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.8, "frequency_penalty": 0.4},
        {"logit_bias": {2: 3.0, 7: -math.inf}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {1: 1.5}},
    ],
    ids=lambda penalty: "+".join(penalty),
)
def test_20_penalties_equal_plain_decoding(penalty: dict[str, Any], shape: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, **penalty)
    expected = _penalised(_PROMPT, 40, params)
    assert expected != _greedy(_PROMPT, 40)
    for proposer in (ModelDraft(DRAFT, _VOCAB).start(), NgramDraft(_VOCAB).start()):
        assert _output(_session(_SHAPES[shape], proposer=proposer, temperature=0, max_tokens=40, **penalty)) == expected


# 21. Log-probabilities of drafted tokens.


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_21_logprobs_equal_plain_decodings(shape: str, temperature: float) -> None:
    session = _session(_SHAPES[shape], temperature=temperature, max_tokens=30, seed=4, logprobs=3)
    entries = [entry for round_ in _rounds(session) for entry in round_.logprobs or ()]
    assert [entry.token for entry in entries] == session.tokens[len(_PROMPT) :]
    for index, entry in enumerate(entries):
        logs = TARGET.logits_after(session.tokens[: len(_PROMPT) + index]).double().log_softmax(-1)
        assert entry.logprob == pytest.approx(float(logs[entry.token]), abs=1e-9)
        best = logs.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_21_none_without_asking_and_all_of_a_small_vocabulary() -> None:
    assert _session(_BUSHY).step().logprobs is None
    entries = _session(_BUSHY, logprobs=500).step().logprobs
    assert entries is not None
    assert all(len(entry.top) == _VOCAB for entry in entries)


# 23. The last tokens before the context's end.


class _Bounded(ToyModel):
    """Refuses positions past its context, as a table of learned positions does."""

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        farthest = cache.length + len(tokens) - 1 if block is None else int(block.positions.max())
        assert self.context_length is None or farthest < self.context_length
        return super().forward(tokens, cache, block, last)


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("draft_context", [24, 14, 3, None])
def test_23_prompts_up_to_the_contexts_end(shape: str, draft_context: int | None) -> None:
    context = 24
    target = _Bounded(TARGET.table, context)
    for room in range(1, _SHAPES[shape].size + 2):
        prompt = (_PROMPT * 3)[: context - room]
        proposer = ModelDraft(_Bounded(DRAFT.table, draft_context), _VOCAB).start()
        session = _session(_SHAPES[shape], target, proposer, prompt, temperature=0, max_tokens=99)
        assert _output(session) == _greedy(prompt, room)
        assert session.finish_reason == "length"
        assert len(session.tokens) == context


@pytest.mark.parametrize("length", [24, 25, 60])
def test_23_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match=f"has {length} tokens and the target's context 24"):
        _session(_BUSHY, ToyModel(TARGET.table, 24), prompt=[1] * length)


def test_23_learned_positions_are_not_overrun() -> None:
    def gpt2(context: int) -> CausalLM:
        sizes = {"vocab_size": _VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": context}
        return _wrapped(_random(GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=None)), 0))

    target, draft = gpt2(20), gpt2(16)
    for room in range(1, _BUSHY.size + 2):
        prompt = (_PROMPT * 3)[: 20 - room]
        plain = _output(_session(TreeShape.root_only(), target, prompt=prompt, temperature=0, max_tokens=99))
        proposer = ModelDraft(draft, _VOCAB).start()
        assert _output(_session(_BUSHY, target, proposer, prompt, temperature=0, max_tokens=99)) == plain
        assert len(plain) == room


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "the prompt is empty"), ([1, 12], "token id 12"), ([-1], "id -1")]
)
def test_prompts_that_cannot_be_read_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _session(_BUSHY, prompt=prompt)


@pytest.mark.parametrize("shape", _SHAPES)
def test_a_prompt_of_one_token(shape: str) -> None:
    assert _output(_session(_SHAPES[shape], prompt=[5], temperature=0, max_tokens=20)) == _greedy([0, 5], 20)


# 24. Accept rates above 1, and the "+1".


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("limit", [1, 2, 5, 50])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_24_identities(shape: str, limit: int, verifier: str) -> None:
    session, stats = _session(_SHAPES[shape], max_tokens=limit, seed=3, eos=2, verifier=verifier), Stats()
    for round_ in _rounds(session):
        stats.add(round_)
    assert stats.emitted_tokens == len(session.tokens) - len(_PROMPT)
    assert stats.emitted_tokens == stats.accepted_tokens + stats.rounds - stats.cut_tokens
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.accepted_tokens == sum(map(sum, stats.accepted))
    assert all(sum(ranks) <= visits for ranks, visits in zip(stats.accepted, stats.visits, strict=True))
    if stats.visits:
        assert stats.visits[0] <= stats.rounds
    assert 1 <= stats.mean_accepted_length <= _SHAPES[shape].depth + 1


# Streams of an engine, and models that break.


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(_llama(vocab=64), draft=_llama(vocab=64, seed=0, num_hidden_layers=2), tree="kary:2x3", device="cpu")


def test_an_abandoned_stream_leaves_the_engine_usable(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, seed=1)
    expected = engine.generate(_PROMPT, params).token_ids
    stream = engine.stream(_PROMPT, params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    abandoned = engine.stream([7, 7, 7], params)
    next(abandoned)
    assert engine.generate(_PROMPT, params).token_ids == expected


def test_streams_side_by_side_do_not_disturb_each_other(engine: Engine) -> None:
    prompts = [_PROMPT, [9, 8, 7], [9, 8, 7]]
    params = [SamplingParams(max_tokens=30, seed=1), SamplingParams(max_tokens=20, seed=1), SamplingParams(seed=2)]
    alone = [engine.generate(prompt, each).token_ids for prompt, each in zip(prompts, params, strict=True)]
    streams = [engine.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    together: list[list[int]] = [[], [], []]
    going = set(range(3))
    while going:
        for index in sorted(going):
            chunk = next(streams[index], None)
            if chunk is None:
                going.remove(index)
            else:
                together[index] += chunk.token_ids
    assert [tuple(tokens) for tokens in together] == alone


class _BreaksAfter(ToyModel):
    """Gives `value` for every logit from the given forward on."""

    def __init__(self, table: Tensor, forwards: int, value: float) -> None:
        super().__init__(table)
        self._left, self._value = forwards, value

    def forward(self, tokens: Tensor, cache: Any, block: Block | None = None, last: int | None = None) -> Tensor:
        self._left -= 1
        logits = super().forward(tokens, cache, block, last)
        return logits if self._left >= 0 else torch.full_like(logits, self._value)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_logits_that_are_no_distribution_are_one_clear_error(who: str, value: float, temperature: float) -> None:
    target = _BreaksAfter(TARGET.table, 4, value) if who == "target" else TARGET
    draft = _BreaksAfter(DRAFT.table, 4, value) if who == "draft" else DRAFT
    session = _session(
        _BUSHY, target, ModelDraft(draft, _VOCAB).start(), max_tokens=99, temperature=temperature, seed=1
    )
    with pytest.raises(ModelError, match=f"the {who}'s logits are no distribution") as error:
        _rounds(session)
    assert "\n" not in str(error.value)


def test_a_round_that_failed_can_be_taken_again() -> None:
    """A round interrupted after the target's pass leaves a session that goes on as if unbroken."""
    expected = _session(_BUSHY, TARGET, ModelDraft(DRAFT, _VOCAB).start(), max_tokens=20, temperature=1, seed=1)
    _rounds(expected)
    broken = _BreaksAfter(TARGET.table, 4, math.nan)
    session = _session(_BUSHY, broken, ModelDraft(DRAFT, _VOCAB).start(), max_tokens=20, temperature=1, seed=1)
    with pytest.raises(ModelError):
        _rounds(session)
    broken._left = 1000
    _rounds(session)
    assert session.tokens == expected.tokens


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"logit_bias": {1: 1e30, 2: -1e30}},
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1e6},
        {"presence_penalty": -1e30},
        {"frequency_penalty": 1e30},
    ],
    ids=str,
)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_extreme_parameters_stay_distributions(verifier: str, params: dict[str, Any]) -> None:
    values: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, "seed": 1} | params
    session = _session(_BUSHY, TARGET, ModelDraft(DRAFT, _VOCAB).start(), verifier=verifier, **values)
    _rounds(session)
    assert all(0 <= token < _VOCAB for token in session.tokens)
