"""`rebalance`: idle conversations, and their pages with them, go from full or busy workers to others.

Covers one built-in cluster policy. Among pool nodes pages are shared out by their keys and need nobody to do
so (`pie.pool.rebalance`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pie.page.events import PlaceId
from pie.policies.cluster_policy import (
    ClusterView,
    LetGo,
    MoveSession,
    Order,
    PlaceView,
    SessionView,
)
from pie.policies.moving import along
from pie.policies.units import Bytes, Count, Seconds, Share

_FOLLOWED_S = 120.0
_HEARD_S = 5.0
"""A conversation that has not moved so long after it was to does not: that was refused."""
_BURST_S = 2.0


class Rebalance:
    """Idle conversations and their pages go from full or busy workers to others.

    Args:
        full: How much of a worker's device memory holds pages for it to be full.
        difference: How much less, as a share of device memory, another worker must hold.
        waiting: Or how many fewer requests must wait there.
        idle: How long a conversation must be idle before it is moved.
        sessions: Conversations that are moved from one worker in one second, at most.
        rate: Bytes a second, at most.
    """

    def __init__(
        self,
        full: Share = 0.9,
        difference: Share = 0.25,
        waiting: Count = 4,
        idle: Seconds = 10.0,
        sessions: Annotated[int, Field(ge=1, le=64)] = 2,
        rate: Bytes = 32 << 20,
    ) -> None:
        self._full = full
        self._difference = difference
        self._waiting = waiting
        self._idle_s = idle
        self._sessions = sessions
        self._rate = rate
        self._left = _BURST_S * rate
        self._seen_s: float | None = None
        self._asked: dict[str, _Move] = {}
        self._moved: dict[str, float] = {}
        """Conversations that have moved, and when they were to."""

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return orders that make workers more alike."""
        since_s = 0.0 if self._seen_s is None else max(0.0, view.now_s - self._seen_s)
        self._seen_s = view.now_s
        self._left = min(_BURST_S * self._rate, self._left + since_s * self._rate)
        self._moved = {
            name: at_s for name, at_s in self._moved.items() if view.now_s - at_s < _FOLLOWED_S
        }
        self._hear(view)
        for session in view.sessions:
            if session.session in self._moved:
                yield from self._followed(session, view)
        at: dict[PlaceId, list[SessionView]] = {}
        for session in view.sessions:
            at.setdefault(session.place, []).append(session)
        for source, target, reason in self._pairs(view):
            yield from self._move(source, target, reason, at.get(source.place, ()), view.now_s)

    def _hear(self, view: ClusterView) -> None:
        """Learn which conversations have moved that were to, and take back what was counted for others."""
        if not self._asked:
            return
        at = {one.session: one.place for one in view.sessions}
        for name, move in list(self._asked.items()):
            if at.get(name) == move.target:
                self._moved[name] = move.at_s
            elif view.now_s - move.at_s < _HEARD_S:
                continue
            else:
                self._left += move.bytes
            del self._asked[name]

    def _pairs(self, view: ClusterView) -> Iterator[tuple[PlaceView, PlaceView, str]]:
        """Yield each worker that has too much, with the one that should have some of it, and why."""
        workers = view.workers()
        by_root: dict[bytes, list[PlaceView]] = {}
        for one in workers:
            by_root.setdefault(one.model_root, []).append(one)
        # The second one for who is the first one itself: to look through all for each would be quadratic.
        calmest = {
            root: heapq.nsmallest(2, some, key=lambda one: (one.waiting, one.filled))
            for root, some in by_root.items()
        }
        emptiest = {
            root: heapq.nsmallest(2, some, key=lambda one: (one.filled, one.waiting))
            for root, some in by_root.items()
        }
        for source in workers:
            root = source.model_root
            if len(by_root[root]) < 2:
                continue
            calm, empty = (
                next(one for one in best[root] if one is not source) for best in (calmest, emptiest)
            )
            if source.waiting - calm.waiting >= self._waiting:
                reason = f"{source.waiting} requests wait at {source.place}, {calm.waiting} there"
                yield source, calm, reason
            elif source.filled >= self._full and source.filled - empty.filled >= self._difference:
                reason = f"{source.place} is {source.filled:.0%} full, the other {empty.filled:.0%}"
                yield source, empty, reason

    def _move(
        self,
        source: PlaceView,
        target: PlaceView,
        reason: str,
        there: Iterable[SessionView],
        now_s: float,
    ) -> Iterator[Order]:
        idle = [
            one
            for one in there
            if one.idle_s >= self._idle_s
            and one.held.get(source.place, 0) > one.shared
            and one.session not in self._moved
            and one.session not in self._asked
        ]
        # The one used last is wanted first, so that it stays where it is.
        idle.sort(key=lambda one: -one.idle_s)
        for session in idle[: self._sessions]:
            size = session.held[source.place] * source.page_bytes
            if self._left < min(size, self._rate):
                return
            self._left -= size
            self._asked[session.session] = _Move(target.place, now_s, size)
            yield MoveSession(session.session, target.place, reason)

    def _followed(self, session: SessionView, view: ClusterView) -> Iterator[Order]:
        """Yield what is next for a conversation that was moved: its pages follow, and leave where they were."""
        before = session.came_from
        if before is None:
            return
        orders = list(along(session, view))
        yield from orders
        here, there = session.held.get(session.place, 0), session.held.get(before, 0)
        if not orders and session.shared < there <= max(here, session.pooled):
            reason = f"conversation {session.session} is at {session.place} now"
            yield LetGo(before, session.pages[:there], reason, start=session.shared)


@dataclass(frozen=True, slots=True)
class _Move:
    """A move that was proposed."""

    target: PlaceId
    at_s: float
    bytes: int
