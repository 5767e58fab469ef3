"""A plan that follows what its requests accept."""

from __future__ import annotations

from collections.abc import Iterable

from sequoia.tree.adapt import AdaptiveProfile
from sequoia.tree.choice import plan as planned
from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile
from sequoia.tree.plan import Plan
from sequoia.tree.shape import TreeShape

_MARGIN = 0.05  # predicted gain in time per token that another plan is taken for

Walk = tuple[TreeShape, tuple[int, ...]]
"""A round's tree, and its accepted nodes from the root's child down."""


class Adaptation:
    """One plan of a file, made anew between requests.

    Args:
        plan: where it starts.
        latency: measured times, which stay.
    """

    def __init__(self, plan: Plan, latency: LatencyProfile) -> None:
        self._plan = plan
        self._latency = latency
        self._profile = AdaptiveProfile(plan.profile)
        self._is_current = True

    def add(self, walks: Iterable[Walk]) -> None:
        """Take in what a request accepted."""
        for shape, path in walks:
            if shape.size > 1:
                self._profile.observe(shape, path)
                self._is_current = False

    @property
    def plan(self) -> Plan:
        """As it stands now: another one once that is predicted to gain enough."""
        if not self._is_current:
            self._plan, self._is_current = self._better(), True
        return self._plan

    def _better(self) -> Plan:
        profile = self._profile.profile
        other = planned(profile, self._latency, params=self._plan.params)
        if other.chosen.kind == "off":  # it would teach nothing more; falling back is the guard's business
            return self._plan
        shape = self._plan.chosen.shape
        now = self._latency.round_seconds(shape) / expected_tokens(shape, profile)
        return other if now > (1 + _MARGIN) * other.chosen.prediction.seconds_per_token else self._plan
