"""Failures of the routing policy, as events.

Covers which of them are told, and how often. Pure, with time as a parameter. Does not cover what is done instead
(`pie.router.choice`) or writing events (`pie.router.conductor`).
"""

from __future__ import annotations

from collections import Counter

from pie.policies.cluster_manager import ClusterEvent

_EVERY_S = 60.0
"""What fails for one reason is told so often."""
_MOST_REASONS = 16
"""Reasons of a minute that are told each; a policy may give any number."""
_OTHERS = "other reasons"

_Failure = tuple[str, str]
"""The policy's name, and why it failed."""


class RoutingFailures:
    """What failed since it was told last. For one event loop.

    Args:
        policy: What the routing policy in force is called.
    """

    def __init__(self, policy: str = "") -> None:
        self.policy = policy
        self.count = 0
        """How often the policy in force has failed."""
        self._untold: Counter[_Failure] = Counter()
        self._told_s: dict[_Failure, float] = {}
        """When each was told last, in the last minute."""

    def begin(self, policy: str) -> None:
        """Learn that another policy is in force, and what it is called."""
        self.policy, self.count = policy, 0

    def note(self, reason: str) -> None:
        """Learn that the policy in force did not choose, and why."""
        self.count += 1
        failure = (self.policy, reason)
        known = self._told_s.keys() | self._untold.keys()
        if failure not in known and len(known) >= _MOST_REASONS:
            failure = (self.policy, _OTHERS)
        self._untold[failure] += 1

    def take(self, router: str, now_s: float) -> list[ClusterEvent]:
        """Return what is to be told now, each reason once a minute with how often it was since."""
        self._told_s = {one: at_s for one, at_s in self._told_s.items() if now_s - at_s < _EVERY_S}
        events = []
        for failure in [one for one in self._untold if one not in self._told_s]:
            policy, reason = failure
            count = self._untold.pop(failure)
            self._told_s[failure] = now_s
            times = "once" if count == 1 else f"{count} times"
            told = f"{times} the built-in `cost` chose in its place: {reason}"
            events.append(ClusterEvent(policy, "fail", None, 0, told, place=router))
        return events
