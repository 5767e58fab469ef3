"""A plan that follows what its requests accept."""

from __future__ import annotations

from sequoia.speculate.stats import Stats
from sequoia.tree.choice import plan as planned
from sequoia.tree.expected import expected_tokens
from sequoia.tree.latency import LatencyProfile
from sequoia.tree.plan import Plan

_MARGIN = 0.05  # predicted gain in seconds per token that another shape is taken for


class Adaptation:
    """One plan of a file, planned anew between requests.

    Args:
        plan: where it starts.
        latency: measured times, which stay.
    """

    def __init__(self, plan: Plan, latency: LatencyProfile) -> None:
        from sequoia.tree.adapt import AdaptiveProfile

        self._plan = plan
        self._latency = latency
        self._profile = AdaptiveProfile(plan.profile)
        self._is_current = True

    def add(self, stats: Stats) -> None:
        """Take in what a request accepted."""
        if stats.visits:
            self._profile.add(stats.visits, stats.accepted)
            self._is_current = False

    def current(self) -> Plan:
        """The plan; another one where that is predicted to gain enough."""
        if not self._is_current:
            self._plan = self._replanned()
            self._is_current = True
        return self._plan

    def _replanned(self) -> Plan:
        profile = self._profile.profile
        other = planned(profile, self._latency, params=self._plan.params)
        shape = self._plan.chosen.shape
        now = self._latency.round_seconds(shape) / expected_tokens(shape, profile)
        return other if now > (1 + _MARGIN) * other.chosen.prediction.seconds_per_token else self._plan
