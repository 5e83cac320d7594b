"""`drain`: a worker that leaves hands its pages on first, and its conversations go on elsewhere, warm.

Covers one built-in cluster policy. A worker that is told to leave stores in the pool what only it has
(`pie.worker.handing_on`), for `share` of its time; the policy moves its conversations to the workers that
are least busy, the latest first, and has their pages brought near there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pie.policies.cluster_policy import ClusterView, MoveSession, Order
from pie.policies.moving import along

_FOLLOWED_S = 60.0


class Drain:
    """A worker that leaves hands its pages on first.

    Args:
        share: How much of the time that a worker has to end goes to handing pages on at most; 0 hands
            on nothing.
        sessions: Conversations that are moved at a time, at most.
    """

    def __init__(
        self,
        share: Annotated[float, Field(ge=0, le=1)] = 0.5,
        sessions: Annotated[int, Field(ge=0, le=1024)] = 8,
    ) -> None:
        self.share = share
        self._sessions = sessions

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return orders for the conversations of workers that leave."""
        leaving = {one.place for one in view.places if one.draining}
        if not leaving:
            return
        moved = 0
        for session in view.sessions:
            if session.place in leaving and moved < self._sessions:
                targets = view.workers(session.model_root)
                if targets:
                    # In turn, so that not all of them come to one.
                    to = targets[moved % len(targets)].place
                    yield MoveSession(session.session, to, f"{session.place} is leaving")
                    moved += 1
            elif session.came_from in leaving and session.moved_s <= _FOLLOWED_S:
                yield from along(session, view)
