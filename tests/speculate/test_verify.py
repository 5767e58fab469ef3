"""Verification: exact at every node, by enumeration and against the recursion that it abbreviates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sequoia.errors import UsageError
from sequoia.measure.enumeration import Node, enumerate_walks, ordered_children, outcome_law, walk_law
from sequoia.speculate import verify as verify_module
from sequoia.speculate.rules import NodeLaw
from sequoia.speculate.sampling import Draws
from sequoia.speculate.token_tree import TokenTree, layout_of
from sequoia.speculate.verify import VERIFIERS, Verifier, verifier_named, verify
from sequoia.tree.shape import TreeShape

ALMOST_ONE = 1 - 2**-53
every_verifier = pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)


def distribution(weights: Sequence[float]) -> Tensor:
    probs = torch.tensor(weights, dtype=torch.float64)
    return probs / probs.sum()


@st.composite
def distributions(draw: st.DrawFn, size: int, support: int | None = None) -> Tensor:
    """Ordinary, sparse and extreme ones; nothing from `support` on."""
    amount = st.one_of(st.just(0.0), st.floats(0.01, 1.0), st.floats(1e-9, 1e-6), st.integers(1, 3).map(float))
    weights = draw(st.lists(amount, min_size=support or size, max_size=support or size).filter(any))
    return distribution(weights + [0.0] * (size - len(weights)))


@st.composite
def node_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """(target_probs, draft_probs, children, proposable)"""
    vocab = draw(st.integers(3, 5))
    proposable = draw(st.integers(2, vocab))
    count = draw(st.integers(1, min(3, proposable)))
    return draw(distributions(vocab)), draw(distributions(vocab, proposable)), count, proposable


# Exactness.


@every_verifier
def test_every_walk_of_the_selftest_is_exact(verifier: Verifier) -> None:
    result = enumerate_walks(verifier)
    assert result.max_error < 1e-13
    assert result.walks > 200


@every_verifier
@given(pair=node_pairs())
@settings(max_examples=60, deadline=None)
def test_the_emitted_token_has_the_targets_law(verifier: Verifier, pair: tuple[Tensor, Tensor, int, int]) -> None:
    target, draft, count, proposable = pair
    node = Node("any node", target, draft, count, proposable, verifier.draws)
    assert (walk_law(verifier.rule, node) - target).abs().max() < 1e-10


@every_verifier
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_greedy_target_takes_likeliest_children(verifier: Verifier, data: st.DataObject) -> None:
    """Temperature 0: both distributions are one-hot, the children any distinct tokens."""
    vocab = data.draw(st.integers(2, 6))
    target = torch.eye(vocab, dtype=torch.float64)[data.draw(st.integers(0, vocab - 1))]
    children = data.draw(st.permutations(range(vocab)))[: data.draw(st.integers(1, vocab))]
    draft = torch.eye(vocab, dtype=torch.float64)[children[0]]
    law = outcome_law(verifier.rule, target, draft, torch.tensor([children]), vocab)
    assert torch.equal(law[0], target)


@given(pair=node_pairs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_sampler_match_is_exact_for_any_children(pair: tuple[Tensor, Tensor, int, int], data: st.DataObject) -> None:
    """Even for equal ones. One draw for all siblings: the chance that one is accepted is the mass of them all."""
    target, draft, count, proposable = pair
    rule = VERIFIERS["sampler_match"].rule
    children = data.draw(st.lists(st.integers(0, proposable - 1), min_size=count, max_size=count))
    tokens = torch.tensor([children])
    assert (outcome_law(rule, target, draft, tokens, proposable)[0] - target).abs().max() < 1e-14
    rejected = (1 - rule(target[None], draft[None], tokens, proposable).accept).prod()
    assert rejected == pytest.approx(1 - target[list(set(children))].sum().item(), abs=1e-14)


# The closed form against the recursion.


def outcomes(accept: Sequence[float], residual: Tensor) -> Tensor:
    """Joint chances: each child accepted, then each next token."""
    left, chances = 1.0, []
    for chance in accept:
        chances.append(left * chance)
        left *= 1 - chance
    return torch.cat([torch.tensor(chances, dtype=torch.float64), left * residual / residual.sum()])


def recursion(
    target: Tensor, draft: Tensor, children: Sequence[int], proposable: int, replacement: bool
) -> tuple[list[float], Tensor]:
    """Chen et al. 2024, algorithm 2, one rejection after another, each residual written out."""
    residual, proposing, accept = target.clone(), draft.clone(), []
    for rank, token in enumerate(children):
        if proposing.sum() <= 0:
            proposing = torch.tensor(
                [float(x < proposable and x not in children[:rank]) for x in range(len(target))], dtype=torch.float64
            )
        proposing = proposing / proposing.sum()
        accept.append(min(1.0, float(residual[token] / proposing[token])))
        rest = (residual - proposing).clamp(min=0)
        if rest.sum() <= 0:  # never reached
            return [*accept, *[0.0] * (len(children) - rank - 1)], target
        residual = rest / rest.sum()
        if not replacement:
            proposing[token] = 0
    return accept, residual


@pytest.mark.parametrize("name", ["sequoia", "specinfer"])
@given(pair=node_pairs())
@settings(max_examples=60, deadline=None)
def test_the_closed_form_is_the_recursion(name: str, pair: tuple[Tensor, Tensor, int, int]) -> None:
    target, draft, count, proposable = pair
    verifier = VERIFIERS[name]
    tuples, chances = ordered_children(verifier.draws, draft, count, proposable)
    rows = len(tuples)
    law = verifier.rule(target.expand(rows, -1), draft.expand(rows, -1), tuples, proposable)
    for row in chances.nonzero().flatten().tolist():
        children = tuples[row].tolist()
        expected = outcomes(*recursion(target, draft, children, proposable, replacement=name == "specinfer"))
        found = outcomes(law.accept[row].tolist(), law.residual[row])
        # With the children's own chance: what is left of nearly equal distributions is ill-conditioned, and rare.
        assert chances[row] * (found - expected).abs().max() < 1e-12


@given(target=distributions(5), draft=distributions(5))
@settings(max_examples=60, deadline=None)
def test_one_child_is_classic_speculative_sampling(target: Tensor, draft: Tensor) -> None:
    """Leviathan et al. 2023: accept with min(1, q/p), else the rest of q over p. All three rules come down to it."""
    for name, token in product(("sequoia", "specinfer", "spectr"), draft.nonzero().flatten().tolist()):
        law = VERIFIERS[name].rule(target[None], draft[None], torch.tensor([[token]]), 5)
        assert float(law.accept) == pytest.approx(min(1.0, float(target[token] / draft[token])), abs=1e-10)
        rest = (target - draft).clamp(min=0)
        if float(law.accept) < 1:
            assert torch.allclose(law.residual[0] / law.residual.sum(), rest / rest.sum(), atol=1e-9)


# Tokens of probability 0, residuals without mass.


@every_verifier
@given(pair=node_pairs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_impossible_token_is_never_accepted_and_never_next(
    verifier: Verifier, pair: tuple[Tensor, Tensor, int, int], data: st.DataObject
) -> None:
    target, draft, count, proposable = pair
    assume(bool((target == 0).any()))
    tuples, _ = ordered_children(verifier.draws, draft, count, proposable)
    rows = len(tuples)
    law = verifier.rule(target.expand(rows, -1), draft.expand(rows, -1), tuples, proposable)
    assert (law.accept[target[tuples] == 0] == 0).all()
    assert (law.residual[:, target == 0] == 0).all()


@every_verifier
@given(pair=node_pairs())
@settings(max_examples=60, deadline=None)
def test_laws_are_always_defined(verifier: Verifier, pair: tuple[Tensor, Tensor, int, int]) -> None:
    """For all children whatever, also such as are never drawn."""
    target, draft, count, proposable = pair
    tuples = torch.tensor(list(product(range(proposable), repeat=count)))
    rows = len(tuples)
    law = verifier.rule(target.expand(rows, -1), draft.expand(rows, -1), tuples, proposable)
    assert ((law.accept >= 0) & (law.accept <= 1)).all()
    assert (law.residual >= 0).all()
    assert (law.residual.sum(-1) > 0).all()


@every_verifier
def test_a_residual_without_mass_falls_back_on_the_target(verifier: Verifier) -> None:
    """Equal distributions accept the first child surely; what would follow a rejection is defined all the same."""
    target = distribution([2, 1, 1])
    # Sampler-match never looks at the draft: there, children that leave nothing over do the same.
    children = torch.tensor([[0, 1, 2] if verifier.name == "sampler_match" else [0]])
    law = verifier.rule(target[None], target[None], children, 3)
    assert float((1 - law.accept).prod()) == pytest.approx(0, abs=1e-12)
    assert (law.residual.sum() > 0).all()
    assert not law.residual.isnan().any()


# Batches.


def random_rows(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


def same_law(found: NodeLaw, expected: NodeLaw) -> bool:
    return torch.allclose(found.accept, expected.accept, rtol=0, atol=1e-14) and torch.allclose(
        found.residual / found.residual.sum(-1, keepdim=True),
        expected.residual / expected.residual.sum(-1, keepdim=True),
        rtol=0,
        atol=1e-14,
    )


@every_verifier
def test_nodes_together_and_one_by_one(verifier: Verifier) -> None:
    """Rows of a batch, spent drafts and padded children among them, do not touch each other."""
    target, draft = random_rows(8, 6), random_rows(8, 6, seed=1)
    draft[1] = draft[4] = torch.eye(6, dtype=torch.float64)[2]
    children = torch.tensor(list(permutations(range(6), 3))[5::13][:8])
    children[1, 0] = children[4, 0] = 2
    children[4, 1:], children[5, 2:], children[6] = -1, -1, -1
    together = verifier.rule(target, draft, children, 6)
    for row in range(8):
        alone = verifier.rule(target[[row]], draft[[row]], children[[row]], 6)
        assert same_law(NodeLaw(together.accept[[row]], together.residual[[row]]), alone)


@every_verifier
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_padded_children_change_nothing(verifier: Verifier, count: int) -> None:
    target, draft = random_rows(4, 5), random_rows(4, 5, seed=1)
    children = torch.tensor([[0, 1, 2], [3, 1, 0], [4, 2, 3], [2, 0, 1]])[:, :count]
    padded = torch.cat([children, torch.full((4, 2), -1)], dim=1)
    law = verifier.rule(target, draft, padded, 5)
    assert (law.accept[:, count:] == 0).all()
    if count == 0:
        assert torch.allclose(law.residual / law.residual.sum(-1, keepdim=True), target, atol=1e-14)
    else:
        assert same_law(NodeLaw(law.accept[:, :count], law.residual), verifier.rule(target, draft, children, 5))


# The walk.


def token_tree(shape: TreeShape, tokens: Sequence[int], draft: Tensor) -> TokenTree:
    """A tree whose inner nodes all have the same draft distribution."""
    layout = layout_of(shape, torch.device("cpu"))
    vocab = draft.shape[-1]
    probs = draft.expand(len(layout.inner), -1)
    return TokenTree(layout, torch.tensor(tokens), torch.arange(vocab), probs, layout.row, vocab)


class Tossed:
    """Stands in for `uniform`: the coins given, for every node the same."""

    def __init__(self, *coins: float) -> None:
        self.coins = torch.tensor(coins, dtype=torch.float64)

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        assert shape[-1] == len(self.coins)
        return self.coins.expand(shape).clone()


def walk(
    monkeypatch: pytest.MonkeyPatch, tree: TokenTree, target: Tensor, verifier: Verifier, *coins: float
) -> tuple[tuple[int, ...], int]:
    """(path, next token), where the target's distribution is `target[node]`."""
    monkeypatch.setattr(verify_module, "uniform", Tossed(*coins))
    verdict = verify(tree, lambda nodes: target[list(nodes)], verifier, torch.Generator())
    return verdict.path, verdict.next_token


@every_verifier
@pytest.mark.parametrize("tokens", [(2, 5, 7), (7, 2, 5), (2, 7, 4), (5, 0, 1)])
def test_the_law_over_the_support_is_the_law_over_the_vocabulary(verifier: Verifier, tokens: tuple[int, ...]) -> None:
    """Also where a child comes from outside the draft's support."""
    layout = layout_of(TreeShape((-1, 0, 0, 0)), torch.device("cpu"))
    support, draft = torch.tensor([2, 5, 7]), random_rows(1, 3)
    tree = TokenTree(layout, torch.tensor([0, *tokens]), support, draft, layout.row, 9)
    target = random_rows(1, 9, seed=1)
    found = verify_module._node_law(tree, [0], [(1, 2, 3)], target, verifier.rule)
    whole = torch.zeros(1, 9, dtype=torch.float64).index_copy(1, support, draft)
    assert same_law(found, verifier.rule(target, whole, torch.tensor([tokens]), 9))


@every_verifier
def test_a_tree_decided_in_one_batch_is_decided_node_by_node(verifier: Verifier) -> None:
    """As on a GPU, leaves among the inner nodes."""
    shape = TreeShape((-1, 0, 0, 1, 1, 1, 2, 6))
    tree = token_tree(shape, [0, 1, 2, 3, 0, 4, 2, 1], random_rows(1, 5))
    target, coins = random_rows(8, 5, seed=1), torch.rand(8, 4, dtype=torch.float64)

    def decide(nodes: Sequence[int]) -> dict[int, object]:
        return dict(verify_module._decide(tree, nodes, target[list(nodes)], verifier.rule, coins))

    together = decide(range(8))
    assert together == {node: decide([node])[node] for node in range(8)}


@pytest.mark.parametrize("name", ["sequoia", "specinfer"])
@pytest.mark.parametrize("tokens", [(4,), (4, 2), (2, 6, 1), (6, 4, 2, 1)])
def test_children_in_turn_are_decided_as_by_the_rule(name: str, tokens: tuple[int, ...]) -> None:
    """By the same coins, for distributions that do not quite sum to 1. What all models hold stays as it was."""
    verifier, support, seen = VERIFIERS[name], torch.tensor([1, 2, 4, 6]), Counter[int | None]()
    layout = layout_of(TreeShape((-1, *[0] * len(tokens))), torch.device("cpu"))
    for seed in range(300):
        target, draft = 1.01 * random_rows(1, 7, seed=seed), 0.98 * random_rows(1, 4, seed=seed + 1000)
        tree = TokenTree(layout, torch.tensor([0, *tokens]), support, draft.clone(), layout.row, 7)
        coins = torch.rand(1, len(tokens) + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert verifier.quick is not None
        decision = verifier.quick(tree, 0, target, coins)
        expected = verify_module._decide(tree, [0], target, verifier.rule, coins)[0]
        assert decision is not None
        assert decision.accepted == expected.accepted
        assert decision.accepted is not None or decision.next_token == expected.next_token
        assert torch.equal(tree.support_probs, draft)
        seen[decision.accepted] += 1
    # The last of all that the draft knows is reached only where the rest of the target lies outside.
    assert set(seen) == {None, *range(1, len(tokens) + 1)}


@pytest.mark.parametrize("name", ["sequoia", "specinfer"])
def test_children_from_outside_the_support_are_left_to_the_rule(name: str) -> None:
    verifier, layout = VERIFIERS[name], layout_of(TreeShape((-1, 0, 0)), torch.device("cpu"))
    support, draft, target = torch.tensor([1, 2, 4, 6]), random_rows(1, 4), random_rows(1, 7)
    coins = torch.tensor([[ALMOST_ONE, ALMOST_ONE, 0.5]], dtype=torch.float64)
    assert verifier.quick is not None
    for tokens, probs in (((0, 5, 2), draft), ((0, 1, 2), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))):
        tree = TokenTree(layout, torch.tensor(tokens), support, probs, layout.row, 7)
        assert verifier.quick(tree, 0, 0.1 * target, coins) is None


@pytest.mark.parametrize("tokens", [(3, 1), (3, 3), (0, 4)])
def test_one_draw_has_the_law_of_sampler_match(tokens: tuple[int, int]) -> None:
    target = distribution([3, 1, 2, 4, 0])
    tree = token_tree(TreeShape((-1, 0, 0)), [2, *tokens], distribution([3, 2, 1, 1, 1]))
    law = outcome_law(VERIFIERS["sampler_match"].rule, target, target, torch.tensor([tokens]), 5)[0]
    verifier, count, found = VERIFIERS["sampler_match"], 1000, torch.zeros(5, dtype=torch.float64)
    for index in range(count):
        assert verifier.quick is not None
        coins = torch.tensor([[0.3, 0.7, (index + 0.5) / count]], dtype=torch.float64)
        decision = verifier.quick(tree, 0, target[None], coins)
        assert decision is not None
        assert (decision.accepted is None) == (decision.next_token not in tokens)
        if decision.accepted is not None:
            assert tokens[decision.accepted - 1] == decision.next_token
            assert decision.accepted - 1 == tokens.index(decision.next_token)
        found[decision.next_token] += 1 / count
    assert (found - law).abs().max() < 2 / count


@every_verifier
@pytest.mark.parametrize("coin", [0.0, ALMOST_ONE])
@pytest.mark.parametrize("impossible", [0, 1, 2])
def test_no_coin_emits_an_impossible_token(
    monkeypatch: pytest.MonkeyPatch, verifier: Verifier, coin: float, impossible: int
) -> None:
    tree = token_tree(TreeShape((-1, 0, 0)), [2, 0, 1], distribution([3, 2, 1]))
    target = distribution([float(token != impossible) for token in range(3)]).expand(3, -1)
    path, next_token = walk(monkeypatch, tree, target, verifier, coin, coin, coin)
    assert impossible not in [*tree.tokens[list(path)].tolist(), next_token]


@every_verifier
def test_the_second_child_accepted_and_nothing_after_it(monkeypatch: pytest.MonkeyPatch, verifier: Verifier) -> None:
    """The bonus token follows the accepted one and does not replace it."""
    tree = token_tree(TreeShape((-1, 0, 0)), [3, 0, 1], distribution([1, 1, 1, 1]))
    target = torch.eye(4, dtype=torch.float64)[[1, 3, 2]]
    assert walk(monkeypatch, tree, target, verifier, 0.5, 0.5, 0.5) == ((2,), 2)


@every_verifier
def test_the_next_token_has_a_coin_of_its_own(monkeypatch: pytest.MonkeyPatch, verifier: Verifier) -> None:
    """With every child rejected, the last coin alone chooses among the residual."""
    tree = token_tree(TreeShape((-1, 0, 0)), [0, 0, 1], distribution([8, 8, 1, 1, 1]))
    target = distribution([0, 0, 1, 1, 1]).expand(3, -1)
    for accept_coin in (0.0, 0.4, ALMOST_ONE):
        tokens = [
            walk(monkeypatch, tree, target, verifier, accept_coin, accept_coin, coin)[1] for coin in (0, 0.5, 0.9)
        ]
        assert tokens == [2, 3, 4]


@every_verifier
def test_the_order_in_which_siblings_subtrees_are_stored_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, verifier: Verifier
) -> None:
    """Node numbers are storage: each node reads its own rows."""
    shape, tokens = TreeShape((-1, 0, 0, 1, 1, 2, 2)), [0, 1, 2, 3, 0, 1, 3]
    other, order = TreeShape((-1, 0, 0, 2, 1, 2, 1)), [0, 1, 2, 5, 3, 6, 4]  # node i of `other` is order[i] of `shape`
    draft, target = distribution([1, 2, 3, 4]), random_rows(7, 4, seed=3)
    for coins in product((0.05, 0.5, 0.95), repeat=3):
        tree, moved = token_tree(shape, tokens, draft), token_tree(other, [tokens[node] for node in order], draft)
        path, next_token = walk(monkeypatch, tree, target, verifier, *coins)
        moved_path, moved_token = walk(monkeypatch, moved, target[order], verifier, *coins)
        assert [order[node] for node in moved_path] == list(path)
        assert moved_token == next_token


@every_verifier
def test_a_root_alone_draws_from_the_target(monkeypatch: pytest.MonkeyPatch, verifier: Verifier) -> None:
    layout = layout_of(TreeShape.root_only(), torch.device("cpu"))
    tree = TokenTree(layout, torch.tensor([0]), torch.zeros(0, dtype=torch.long), torch.zeros(0, 0), {}, 4)
    target = distribution([1, 2, 3, 4])[None]
    assert [walk(monkeypatch, tree, target, verifier, coin) for coin in (0, 0.2, 0.5, ALMOST_ONE)] == [
        ((), 0),
        ((), 1),
        ((), 2),
        ((), 3),
    ]


def test_an_unknown_verifier_is_named_with_the_known_ones() -> None:
    assert verifier_named("spectr") is VERIFIERS["spectr"]
    with pytest.raises(UsageError, match=r"'best'.*sequoia, specinfer, spectr, sampler_match"):
        verifier_named("best")


def test_the_loop_draws_as_each_rule_asks() -> None:
    assert {name: verifier.draws for name, verifier in VERIFIERS.items()} == {
        "sequoia": Draws.WITHOUT_REPLACEMENT,
        "specinfer": Draws.WITH_REPLACEMENT,
        "spectr": Draws.WITH_REPLACEMENT,
        "sampler_match": Draws.TOP_K,
    }
