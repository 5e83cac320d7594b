"""Retention by queues that take turns: which one gives is decided anew for each page.

Covers policies whose next victim depends on how much of each queue has been proposed already, and those that
give a page another round instead of proposing it. Where one choice is of many pages at once, it is the choice that
would have been made one page at a time. Does not cover policies whose queues give in one order
(`pie.policies.queued`).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from itertools import filterfalse

from pie.policies.page_rows import NO_ROW, Row
from pie.policies.queued import QueuedRetention

_NONE = -1
_NEW = 0
"""The queue that new pages enter."""
_MOST_SPARED = 64
"""Pages that are given another place before one is proposed, at most: a step waits for the choice."""


class TurnTakingRetention(QueuedRetention):
    """A retention policy whose queues take turns; what inherits from it says which one gives (`giving`)."""

    def giving(self, left: Sequence[int]) -> int:
        """Return the queue that gives the next page; where it has none that can leave, another one does.

        Args:
            left: Pages that each queue would have, had those proposed so far left and as many new ones come
                into the first queue, as happens where pages come and go one at a time.
        """
        raise NotImplementedError

    def spared(self, row: Row) -> bool:  # noqa: ARG002
        """Say whether a page that it would be the turn of has been given another place instead (`move`)."""
        return False

    def row_victims(self, before: Sequence[Row] = ()) -> Iterator[Row]:
        """Propose rows as `victims` proposes pages, as if those of `before` had left already."""
        version = self._version
        turns = _Turns(self, before)
        while (row := turns.next()) >= 0:
            yield row
            if self._version != version:
                return
            turns.leave(row)


class _Turns:
    """One choice: what stands first in each place, as if each page proposed had left."""

    def __init__(self, policy: TurnTakingRetention, before: Sequence[Row]) -> None:
        self._policy = policy
        queues = len(policy.counts)
        self._first, self._last = queues, queues + 1
        """Places of pages that rules want before and after all others."""
        places = queues + 2
        self._left = array("q", policy.counts)
        self._gone: dict[Row, int] = {}
        self._passed = set(before)
        """Pages that stand where they are not to be read: those of `before`, and those that were moved."""
        self._bared: list[list[tuple[int, Row]]] = [[] for _ in range(places)]
        """By place: pages whose children have all left so, and those that were moved."""
        self._standing = [
            filterfalse(self._passed.__contains__, policy.standing(place))
            for place in range(places)
        ]
        self._heads = array("i", [NO_ROW]) * places
        for row in before:
            self.leave(row)
        for place in range(places):
            self._heads[place] = next(self._standing[place], NO_ROW)

    def next(self) -> Row:
        """Return the page to propose now; `NO_ROW` where there is none. It is still to `leave`."""
        policy = self._policy
        for _ in range(_MOST_SPARED):
            place = self._giving()
            if place == _NONE:
                return NO_ROW
            row = self._take(place)
            queue = policy.queue_of[row]
            if place >= self._first or not policy.spared(row):
                return row
            # It may be read again where it stands now, so only what is noted here counts.
            self._passed.add(row)
            self._left[queue] -= 1
            self._left[policy.queue_of[row]] += 1
            heapq.heappush(self._bared[policy.queue_of[row]], (policy.stamps[row], row))
        place = self._giving()
        return NO_ROW if place == _NONE else self._take(place)

    def leave(self, row: Row) -> None:
        """Note that a page is as good as gone, and the one before it where that can leave then."""
        policy, rows = self._policy, self._policy.rows
        self._left[policy.queue_of[row]] -= 1
        self._left[_NEW] += 1
        parent = rows.parent(row)
        if parent < 0:
            return
        gone = self._gone[parent] = self._gone.get(parent, 0) + 1
        if gone == rows.children[parent] and not rows.pins[parent] and parent not in self._passed:
            bared = self._bared[policy.stands_in(parent)]
            heapq.heappush(bared, (policy.stamps[parent], parent))

    def _giving(self) -> int:
        """Return the place that gives now, or `_NONE`."""
        if self._has(self._first):
            return self._first
        queue = self._policy.giving(self._left)
        if self._has(queue):
            return queue
        for place in range(self._last + 1):
            if self._has(place):
                return place
        return _NONE

    def _has(self, place: int) -> bool:
        return self._heads[place] >= 0 or bool(self._bared[place])

    def _take(self, place: int) -> Row:
        """Return the page that entered a place first of those in it, which is not there any more."""
        row, bared = self._heads[place], self._bared[place]
        if bared and (row < 0 or bared[0][0] < self._policy.stamps[row]):
            return heapq.heappop(bared)[1]
        self._heads[place] = next(self._standing[place], NO_ROW)
        return row
