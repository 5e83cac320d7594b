"""`follow-session`: a conversation that moves to another worker takes its pages along.

Covers one built-in cluster policy. It acts whoever moved the conversation: a routing policy, another cluster
policy, or a worker that was not there.
"""

from __future__ import annotations

from collections.abc import Iterable

from pie.policies.cluster_policy import ClusterView, LetGo, Order
from pie.policies.moving import along
from pie.policies.units import Seconds


class FollowSession:
    """A conversation that moves takes its pages along.

    Args:
        within: How long after it moved its pages follow.
        keep: Whether the worker that had it keeps its pages too, until retention lets them go; else it lets
            go of those that no other conversation shares once the other worker has them.
    """

    def __init__(self, within: Seconds = 60.0, *, keep: bool = True) -> None:
        self._within_s = within
        self._keep = keep

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return orders for conversations that have moved."""
        for session in view.sessions:
            before = session.came_from
            if before is None or session.moved_s > self._within_s:
                continue
            orders = list(along(session, view))
            yield from orders
            here, there = session.held.get(session.place, 0), session.held.get(before, 0)
            if not self._keep and not orders and session.shared < there <= here:
                reason = f"conversation {session.session} is at {session.place}"
                yield LetGo(before, session.pages[:there], reason, start=session.shared)
