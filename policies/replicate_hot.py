"""`replicate-hot`: more copies of what is asked for most, and fewer when it cools.

Covers one built-in cluster policy. A group of pages that prompts use more than `uses` times a second for
each of its copies gets another copy, up to `copies`; one whose uses have stayed below `cool` of that for
`after` gives one back. Between the two nothing changes, so that a group at the edge does not come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterView, SetCopies
from pie.policies.units import Positive, Seconds, Share

_MOST_COPIES = 64


class ReplicateHot:
    """More copies of what is asked for most.

    Args:
        uses: Uses a second that one copy bears.
        copies: Most copies of a group.
        cool: Below this share of what it bears a group gives a copy back.
        after: How long it must have been so.
    """

    def __init__(
        self,
        uses: Positive = 5.0,
        copies: Annotated[int, Field(ge=2, le=_MOST_COPIES)] = 3,
        cool: Share = 0.5,
        after: Seconds = 30.0,
    ) -> None:
        self._uses = uses
        self._copies = copies
        self._cool = cool
        self._after_s = after
        self._cool_since: dict[PageKey, float] = {}

    def decide(self, view: ClusterView) -> Iterable[SetCopies]:
        """Return an order for each group that is too hot or has been cool for long enough."""
        most = min(self._copies, view.nodes)
        orders: list[SetCopies] = []
        cooling: dict[PageKey, float] = {}
        for one in view.groups:
            borne = self._uses * one.copies
            if one.uses_per_s > borne and one.copies < most:
                # As many as it takes at once: a stampede does not wait.
                wanted = min(most, int(one.uses_per_s / self._uses) + 1)
                reason = f"{one.uses_per_s:.1f} uses a second, more than {borne:g}"
                orders.append(SetCopies(one.group, wanted, reason))
            elif one.copies > view.least_copies:
                left = self._cool * self._uses * (one.copies - 1)
                if one.uses_per_s >= left:
                    continue
                since_s = cooling[one.group] = self._cool_since.get(one.group, view.now_s)
                if view.now_s - since_s >= self._after_s:
                    cooling[one.group] = view.now_s
                    reason = f"{one.uses_per_s:.1f} uses a second, less than {left:g}"
                    orders.append(SetCopies(one.group, one.copies - 1, reason))
        self._cool_since = cooling
        return orders
