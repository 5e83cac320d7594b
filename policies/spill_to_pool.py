"""`spill-to-pool`: what workers have goes to the pool, as it is made or before it has to leave.

Covers one built-in cluster policy. Workers store pages in the pool behind each step by themselves
(`pie.worker.stores`); the policy says whether they do, and has stored what is missing there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pie.page.events import PlaceKind
from pie.policies.cluster_policy import ClusterView, Order, StorePages
from pie.policies.units import Seconds


class SpillToPool:
    """What workers have goes to the pool, as it is made or before it has to leave.

    Args:
        as_made: Whether workers store pages there as they make them; else only what this policy orders.
        above: How much of a worker's device memory holds pages before what the pool lacks is stored.
        idle: How long a conversation must be idle for its pages to be stored then.
    """

    def __init__(
        self,
        *,
        as_made: bool = True,
        above: Annotated[float, Field(ge=0, le=1)] = 0.8,
        idle: Seconds = 5.0,
    ) -> None:
        self.as_made = as_made
        self._above = above
        self._idle_s = idle

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return orders to workers that are nearly full, for conversations that are idle."""
        if not view.nodes:
            return
        full = {
            one.place: one.filled
            for one in view.places
            if one.kind is PlaceKind.WORKER and one.filled >= self._above
        }
        # What has been idle for longest leaves first.
        for session in sorted(view.sessions, key=lambda one: -one.idle_s):
            for place, held in session.held.items():
                if place in full and held > session.pooled and session.idle_s >= self._idle_s:
                    reason = f"{place} is {full[place]:.0%} full"
                    yield StorePages(place, session.pages[:held], reason)
