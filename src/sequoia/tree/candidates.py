"""Trees that could be the fastest: the best of each size and depth, with each draft level charged by its width."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile, level_widths
from sequoia.tree.planner import optimal_shape, optimal_tokens
from sequoia.tree.profile import AcceptanceProfile
from sequoia.tree.shape import TreeShape


@dataclass(frozen=True)
class Costs:
    """What a round is charged, for one context and batch; sums up to `LatencyProfile.round_seconds`."""

    target: Callable[[int], float]  # by size
    draft: Callable[[int], float]  # by width
    overhead: Callable[[int], float]  # by size

    @classmethod
    def of(cls, latency: LatencyProfile, context: int | None = None, batch: int = 1) -> Costs:
        """Costs that remember what they were asked before."""
        return cls(
            cache(lambda size: latency.target_seconds(size * batch, context)),
            cache(lambda width: latency.draft_seconds(width * batch)),
            cache(lambda size: latency.overhead_seconds(size * batch)),
        )

    def round(self, size: int, draft: float) -> float:
        """Seconds of a round with a tree of `size` nodes whose levels take `draft` seconds together."""
        target = self.target(size)
        return max(target, target + draft + self.overhead(size))


@dataclass(frozen=True)
class Contender:
    """A branching tree, by what it takes to build it."""

    size: int
    depth: int  # edges from the root, at most
    width: int | None  # nodes of each depth that have children, at most; None for the tree of most expected tokens
    seconds_per_token: float


class Search:
    """The fastest branching tree of each size and depth.

    Draft levels cost by their width, so trees are looked at whose levels have at most so many inner nodes, for limits
    from one to as many as there are. Under such a limit, where no row of the profile rises, the best n nodes whose
    parents are among the best of their level are the best tree of n nodes (by exchange, level by level), so one
    best-first run gives all sizes.

    Rows that rise are averaged until they fall to choose nodes by, which are then scored by the rows as they are; and
    the trees of most expected tokens at each size and depth join in.

    Args:
        sizes: nodes, the root included, that a tree may have.
        widths: limits to look at: where the draft's time was measured.
    """

    def __init__(self, profile: AcceptanceProfile, costs: Costs, sizes: Iterable[int], widths: Iterable[int]) -> None:
        self._profile, self._costs, self._sizes = profile, costs, frozenset(sizes) - {1}
        self._most = max(self._sizes, default=1)
        self._widths = [*sorted(width for width in {*widths} if width < self._most), self._most]
        self._rates: list[list[float]] = profile.table.tolist()
        self._order = [_falling(row) for row in self._rates]
        self._found: dict[tuple[int, int], Contender] = {}

    def run(self, depth: int) -> list[Contender]:
        """The fastest of each size and of each limit on the depth up to `depth`, the fastest of all first."""
        for edges in range(1, min(depth, self._most - 1) + 1):
            for width in self._widths:
                self._look(edges, width)
        if not self._profile.is_monotone:
            self._add_optima(depth)
        return sorted(self._found.values(), key=_seconds_per_token)

    def shape(self, contender: Contender) -> TreeShape:
        """The tree itself, in level order."""
        if contender.width is None:
            return optimal_shape(self._profile, contender.size, contender.depth)
        nodes = _best_first(self._order, contender.depth, contender.width, contender.size)
        return TreeShape([node.parent for node in nodes]).in_level_order()

    def _look(self, depth: int, width: int) -> None:
        """Charge the best trees of all sizes within these limits."""
        growth = _Growth(depth)
        for size, node in enumerate(_best_first(self._order, depth, width, self._most), start=1):
            growth.add(node, self._rates, self._costs.draft)
            if growth.branches and size in self._sizes:
                self._offer(Contender(size, depth, width, self._costs.round(size, growth.draft) / growth.tokens))

    def _add_optima(self, depth: int) -> None:
        """Charge the trees of most expected tokens, as long as with narrow levels they would be the fastest of all."""
        table = optimal_tokens(self._profile, self._most, depth)
        level = min(map(self._costs.draft, range(1, self._most)))
        bounds = [
            (self._costs.round(size, edges * level) / float(table[size, edges]), size, edges)
            for size, edges in product(sorted(self._sizes), range(1, depth + 1))
            if edges < size and math.isfinite(table[size, edges]) and table[size, edges] != table[size, edges - 1]
        ]
        for bound, size, edges in sorted(bounds):
            if bound >= min((c.seconds_per_token for c in self._found.values()), default=math.inf):
                return
            self._add_optimum(size, edges)

    def _add_optimum(self, size: int, edges: int) -> None:
        shape = optimal_shape(self._profile, size, edges)
        if shape.max_children > 1:
            seconds = self._costs.round(size, sum(map(self._costs.draft, level_widths(shape))))
            tokens = expected_tokens(shape, self._profile)
            self._offer(Contender(size, edges, None, seconds / tokens))

    def _offer(self, contender: Contender) -> None:
        place = contender.size, contender.depth
        if place not in self._found or contender.seconds_per_token < self._found[place].seconds_per_token:
            self._found[place] = contender


@dataclass(frozen=True)
class _Node:
    parent: int  # its number; -1 for the root
    rank: int
    depth: int


class _Growth:
    """What a tree is worth and what its draft takes, node by node."""

    def __init__(self, depth: int) -> None:
        self.tokens = 0.0  # expected, per round
        self.draft = 0.0  # seconds of all levels
        self.branches = False
        self._scores: list[float] = []
        self._widths = [0] * depth

    def add(self, node: _Node, rates: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> None:
        """Take in the next node; its parent was taken in before."""
        level = node.depth - 1
        score = self._scores[node.parent] * rates[min(level, len(rates) - 1)][node.rank] if node.depth else 1.0
        self._scores.append(score)
        self.tokens += score
        self.branches |= node.rank > 0
        if node.depth and node.rank == 0:
            width = self._widths[level]
            self.draft += seconds(width + 1) - (seconds(width) if width else 0.0)
            self._widths[level] = width + 1


def _best_first(rates: Sequence[Sequence[float]], depth: int, width: int, size: int) -> Iterator[_Node]:
    """The `size` nodes of highest score, or all, best first, where at most `width` nodes of each depth have children.

    No row of `rates` may rise. First children of one depth come in the order of their parents, so the limit is used up
    by the best.
    """
    ranks, left = len(rates[0]), [width] * depth
    # (-score, depth, age, parent, rank, -score of the parent); the age makes the order definite
    heap = [(-1.0, 0, 0, -1, 0, 0.0)]
    age = number = 0
    while heap and number < size:
        score, level, _, parent, rank, above = heapq.heappop(heap)
        if level and rank == 0:
            if left[level - 1] == 0:
                continue
            left[level - 1] -= 1
        yield _Node(parent, rank, level)
        age += 2
        if level and rank + 1 < ranks:
            rate = rates[min(level, len(rates)) - 1][rank + 1]
            heapq.heappush(heap, (above * rate, level, age, parent, rank + 1, above))
        if level < depth:
            rate = rates[min(level, len(rates) - 1)][0]
            heapq.heappush(heap, (score * rate, level + 1, age + 1, number, 0, score))
        number += 1


def _falling(rates: Sequence[float]) -> list[float]:
    """The nearest rates that never rise, in least squares: runs that rise are averaged."""
    runs: list[tuple[float, int]] = []  # mean, length
    for rate in rates:
        runs.append((rate, 1))
        while len(runs) > 1 and runs[-1][0] > runs[-2][0]:
            (later, m), (earlier, n) = runs.pop(), runs.pop()
            runs.append(((later * m + earlier * n) / (m + n), m + n))
    return [mean for mean, length in runs for _ in range(length)]


def _seconds_per_token(contender: Contender) -> float:
    return contender.seconds_per_token
