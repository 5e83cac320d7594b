"""Conversations that a rule keeps for their next turn, in one tier.

Covers which conversations are kept, until when, and which gives its place where there is too much. Does
not cover which pages the rule is about (`pie.policies.rule_book`).

A conversation is kept as a whole, by its latest use: pages that it shares with nobody are used once a
turn, and its answer's pages only in the turn after. Uses of a page that others go on from are theirs as likely as
its own and do not count: who computed a system prompt first would be kept for as long as anybody asks with it. What is no longer kept stands among the other
pages again, some of it at a time, since a conversation may have ten thousand pages.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from pie.policies.page_rows import PageRows, Row
from pie.policies.queued import Band, QueuedRetention
from pie.policies.rules import KeepSession

Owner: TypeAlias = tuple[str, str]
"""Tags of a tenant and of its conversation."""

_MOST_STALE = 64
"""Entries of uses that are no conversation's latest, beyond one for each conversation."""
_MOST_LET_GO = 256
"""Pages that are put among the others before victims are chosen, at most."""


@dataclass(slots=True)
class _Session:
    used_s: float
    tick: int
    """When `used_s` was noted; unique."""
    size: int = 0
    rows: dict[Row, None] = field(default_factory=dict)


class KeptSessions:
    """The conversations kept by one `keep-session` rule. Not thread-safe."""

    def __init__(self, action: KeepSession, rows: PageRows, queues: QueuedRetention) -> None:
        self._action = action
        self._rows = rows
        self._queues = queues
        self._sessions: dict[Owner, _Session] = {}
        self._by_use: list[tuple[float, int, Owner]] = []
        """A heap; entries that are no session's latest are passed over."""
        self._tick = 0
        self._kept_bytes = 0
        self._let_go: dict[Row, None] = {}
        """Pages that are not kept any more and still stand behind the others."""

    def used(self, row: Row, owner: Owner, now_s: float) -> None:
        """Learn that a page came or was used; one of no conversation is not kept."""
        if not owner[1]:
            return
        session = self._sessions.get(owner)
        if session is None or now_s > session.used_s:
            session = self._note_use(owner, now_s)
        if row in session.rows:
            return
        size, most = self._rows.sizes[row], self._action.max
        if most is not None:
            while self._kept_bytes + size > most and (oldest := self._oldest()) != owner:
                self._drop(oldest)
            if self._kept_bytes + size > most:
                if not session.rows:
                    del self._sessions[owner]
                    self._drop_stale()
                return
        self._let_go.pop(row, None)
        session.rows[row] = None
        session.size += size
        self._kept_bytes += size
        self._queues.set_band(row, Band.LAST)

    def left(self, row: Row, owner: Owner) -> None:
        """Learn that a page has left, or is no longer the rule's; its band is the caller's."""
        self._let_go.pop(row, None)
        session = self._sessions.get(owner)
        if session is None or row not in session.rows:
            return
        del session.rows[row]
        size = self._rows.sizes[row]
        session.size -= size
        self._kept_bytes -= size
        if not session.rows:
            del self._sessions[owner]
            self._drop_stale()

    def settle(self, now_s: float) -> None:
        """Let go of conversations whose time is over, some of their pages at a time."""
        while self._sessions and len(self._let_go) < _MOST_LET_GO:
            owner = self._oldest()
            if self._sessions[owner].used_s + self._action.keep > now_s:
                break
            self._drop(owner)
        for row in list(islice(self._let_go, _MOST_LET_GO)):
            del self._let_go[row]
            self._queues.set_band(row, Band.MIDDLE)

    def check(self) -> None:
        """Assert that the tables agree; slow, for tests."""
        sizes = self._rows.sizes
        for session in self._sessions.values():
            assert session.size == sum(sizes[row] for row in session.rows)
            assert all(self._queues.band_of(row) is Band.LAST for row in session.rows)
            assert session.rows
        if self._sessions:
            assert self._sessions[self._oldest()].used_s == min(
                one.used_s for one in self._sessions.values()
            )
        assert len(self._by_use) <= 2 * len(self._sessions) + _MOST_STALE
        assert self._kept_bytes == sum(one.size for one in self._sessions.values())
        assert self._action.max is None or self._kept_bytes <= self._action.max

    def _note_use(self, owner: Owner, now_s: float) -> _Session:
        self._tick += 1
        session = self._sessions.get(owner)
        if session is None:
            session = self._sessions[owner] = _Session(now_s, self._tick)
        session.used_s, session.tick = now_s, self._tick
        heapq.heappush(self._by_use, (now_s, self._tick, owner))
        self._drop_stale()
        return session

    def _drop_stale(self) -> None:
        """Make the heap anew where most of it is of no use."""
        if len(self._by_use) > 2 * len(self._sessions) + _MOST_STALE:
            self._by_use = [(one.used_s, one.tick, who) for who, one in self._sessions.items()]
            heapq.heapify(self._by_use)

    def _oldest(self) -> Owner:
        """Return the conversation unused for longest; there is one."""
        while True:
            _, tick, owner = self._by_use[0]
            session = self._sessions.get(owner)
            if session is not None and session.tick == tick:
                return owner
            heapq.heappop(self._by_use)

    def _drop(self, owner: Owner) -> None:
        session = self._sessions.pop(owner)
        self._kept_bytes -= session.size
        self._drop_stale()
        self._let_go.update(session.rows)
