"""The manager of cluster policies: they propose, it disposes.

Covers which orders are carried out, what is refused, and containing a policy that fails; pure. Each comes
back with its reason, for the log of events. Does not cover carrying orders out (`pie.router.conductor`).

What a policy cannot break: no group has fewer copies than the configuration says (so no last copy goes) or
more than there are nodes; no more than `MOST_RAISED` groups have more copies than that, and no more than
`MOST_AT_ONCE` groups change at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterPolicy, ClusterView, SetCopies
from pie.policies.containing import is_own

log = logging.getLogger("pie.policies.cluster_manager")

MOST_RAISED = 512
"""Groups with more copies than usual: every place keeps the list."""
MOST_AT_ONCE = 32
_MOST_PROPOSALS = 1_000


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """What was ordered, and what became of it."""

    policy: str
    action: str
    """`raise`, `lower`, `refuse` or `fail`."""
    group: PageKey | None
    copies: int
    reason: str


class ClusterManager:
    """Asks one policy, and keeps the table of copies.

    Args:
        policy: Who proposes.
        name: What events call it.
    """

    def __init__(self, policy: ClusterPolicy, name: str) -> None:
        self._policy = policy
        self._name = name
        self.failures = 0

    def decide(
        self, view: ClusterView, table: Mapping[PageKey, int]
    ) -> tuple[dict[PageKey, int], list[ClusterEvent]]:
        """Return the table of groups with more copies than usual as it is to be, and what happened."""
        after = dict(table)
        events: list[ClusterEvent] = []
        changed: set[PageKey] = set()
        for order in self._proposals(view, events):
            group, copies = order.group, order.copies
            before = after.get(group, view.least_copies)
            refused = _refusal(order, view)
            if not refused and copies == before:
                continue
            if not refused and group in changed:
                refused = "the group was changed in this round already"
            if not refused and len(changed) >= MOST_AT_ONCE:
                refused = f"{MOST_AT_ONCE} groups were changed in this round"
            if not refused and group not in after and len(after) >= MOST_RAISED:
                refused = f"{MOST_RAISED} groups have more copies already"
            if refused:
                reason = f"{refused} ({order.reason})"
                events.append(ClusterEvent(self._name, "refuse", group, copies, reason))
                continue
            changed.add(group)
            if copies > view.least_copies:
                after[group] = copies
            else:
                after.pop(group, None)
            action = "raise" if copies > before else "lower"
            events.append(ClusterEvent(self._name, action, group, copies, order.reason))
        return after, events

    def _proposals(self, view: ClusterView, events: list[ClusterEvent]) -> list[SetCopies]:
        try:
            proposed = list(islice(self._policy.decide(view), _MOST_PROPOSALS))
        except BaseException as error:
            if not is_own(error):
                raise
            return self._failed(f"{type(error).__name__}: {error}", events)
        good = [one for one in proposed if _is_order(one)]
        if len(good) < len(proposed):
            self._failed(f"{len(proposed) - len(good)} proposals are no orders", events)
        return good

    def _failed(self, reason: str, events: list[ClusterEvent]) -> list[SetCopies]:
        self.failures += 1
        # The first one and then ever fewer: a policy that always raises must not fill the log.
        if self.failures & (self.failures - 1) == 0:
            log.error("cluster policy %s: %s (%d failures)", self._name, reason, self.failures)
            events.append(ClusterEvent(self._name, "fail", None, 0, reason))
        return []


def _is_order(proposal: object) -> bool:
    if not isinstance(proposal, SetCopies):
        return False
    fields: tuple[object, ...] = (proposal.group, proposal.copies, proposal.reason)
    return all(map(isinstance, fields, (bytes, int, str)))


def _refusal(order: SetCopies, view: ClusterView) -> str:
    """Return why an order cannot be carried out; nothing where it can."""
    if order.copies < view.least_copies:
        return f"every page has {view.least_copies} copies at least"
    if order.copies > max(view.nodes, view.least_copies):
        return f"there are {view.nodes} nodes"
    return ""
