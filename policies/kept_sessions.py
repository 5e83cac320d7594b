"""Conversations that a rule keeps for their next turn, in one tier.

Covers which conversations are kept, until when, and which gives its place where there is too much. Does
not cover which pages the rule is about (`pie.policies.rule_book`).

A conversation is kept as a whole, by its latest use: pages that it shares with nobody are used once a
turn, and its answer's pages only in the turn after. What is no longer kept stands among the other
pages again, some of it at a time, since a conversation may have ten thousand pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from pie.policies.page_rows import PageRows, Row
from pie.policies.queued import Band, QueuedRetention
from pie.policies.rules import KeepSession

Owner: TypeAlias = tuple[str, str]
"""Tags of a tenant and of its conversation."""

_MOST_LET_GO = 256
"""Pages that are put among the others before victims are chosen, at most."""


@dataclass(slots=True)
class _Session:
    used_s: float
    size: int = 0
    rows: dict[Row, None] = field(default_factory=dict)


class KeptSessions:
    """The conversations kept by one `keep-session` rule. Not thread-safe."""

    def __init__(self, action: KeepSession, rows: PageRows, queues: QueuedRetention) -> None:
        self._action = action
        self._rows = rows
        self._queues = queues
        self._sessions: dict[Owner, _Session] = {}
        """The one unused for longest in front."""
        self._kept_bytes = 0
        self._let_go: dict[Row, None] = {}
        """Pages that are not kept any more and still stand behind the others."""

    def used(self, row: Row, owner: Owner, now_s: float) -> None:
        """Learn that a page came or was used; one of no conversation is not kept."""
        if not owner[1]:
            return
        session = self._sessions.pop(owner, None) or _Session(now_s)
        self._sessions[owner] = session
        session.used_s = max(session.used_s, now_s)
        if row in session.rows:
            return
        size, most = self._rows.sizes[row], self._action.max
        if most is not None:
            while self._kept_bytes + size > most and len(self._sessions) > 1:
                self._drop(next(iter(self._sessions)))
            if self._kept_bytes + size > most:
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

    def settle(self, now_s: float) -> None:
        """Let go of conversations whose time is over, some of their pages at a time."""
        while self._sessions and len(self._let_go) < _MOST_LET_GO:
            owner = next(iter(self._sessions))
            if self._sessions[owner].used_s + self._action.keep > now_s:
                break
            self._drop(owner)
        for row in list(islice(self._let_go, _MOST_LET_GO)):
            del self._let_go[row]
            self._queues.set_band(row, Band.ORDER)

    def check(self) -> None:
        """Assert that the tables agree; slow, for tests."""
        sizes = self._rows.sizes
        for session in self._sessions.values():
            assert session.size == sum(sizes[row] for row in session.rows)
            assert all(self._queues.band_of(row) is Band.LAST for row in session.rows)
        assert self._kept_bytes == sum(one.size for one in self._sessions.values())
        assert self._action.max is None or self._kept_bytes <= self._action.max

    def _drop(self, owner: Owner) -> None:
        session = self._sessions.pop(owner)
        self._kept_bytes -= session.size
        self._let_go.update(session.rows)
