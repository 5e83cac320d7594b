"""What a place has still to say.

Covers the bounded queue between the threads that change pages and the task that tells Redis. Does
not cover sending (`pie.index.publisher`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from pie.page.events import (
    Epoch,
    PageEntry,
    PageEvent,
    PageRemoved,
    PageStored,
    PlaceCleared,
    PlaceId,
)

_EVENT_ENTRIES = 256
"""Entries in one event. Redis works on a batch of events for about 2 µs an entry, and nobody else is
served meanwhile."""

_BATCH_EVENTS = 4

_Kind = type[PageStored] | type[PageRemoved] | type[PlaceCleared]


class Outbox:
    """Changes of a place in order, until they are more than the limit: then it must announce anew.

    Thread-safe. While the place must announce itself anew, changes are dropped: what it holds then
    contains them.
    """

    def __init__(self, limit_entries: int) -> None:
        self._limit_entries = limit_entries
        self._lock = threading.Lock()
        self._changes: deque[tuple[_Kind, tuple[PageEntry, ...], int]] = deque()
        self._entries = 0
        self._anew = True
        self._closed = False
        self._added = 0
        self._taken = 0

    @property
    def added(self) -> int:
        """How many changes were added since the start, dropped ones included."""
        return self._added

    @property
    def must_announce(self) -> bool:
        """Whether the place must be announced anew; so it is at first."""
        return self._anew

    def stored(self, entries: Sequence[PageEntry]) -> None:
        """Add pages that the place holds from now on."""
        self._add(PageStored, entries)

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Add pages that the place no longer holds."""
        self._add(PageRemoved, entries)

    def cleared(self) -> None:
        """Add that the place holds nothing any more."""
        self._add(PlaceCleared, ())

    def begin_anew(self) -> None:
        """Drop everything until `announcing`: the place must announce itself anew."""
        with self._lock:
            self._drop()

    def announcing(self) -> int:
        """Keep changes again. Look at what the place holds *after* this call.

        Returns how many changes were added before: what it holds then contains them.
        """
        with self._lock:
            self._anew = False
            return self._added

    def close(self) -> None:
        """Drop everything, now and from now on."""
        with self._lock:
            self._drop()
            self._closed = True

    def take(self, place: PlaceId, epoch: Epoch, seq: int) -> tuple[list[PageEvent], int]:
        """Take changes out, in order, as some events whose first has number `seq`.

        Returns also how many changes, of those `added`, are out after this call.
        """
        events: list[PageEvent] = []
        with self._lock:
            while self._changes and len(events) < _BATCH_EVENTS:
                kind, entries = self._take_one()
                if kind is PlaceCleared:
                    events.append(PlaceCleared(place, epoch, seq + len(events)))
                elif kind is PageStored:
                    events.append(PageStored(place, epoch, seq + len(events), entries))
                else:
                    events.append(PageRemoved(place, epoch, seq + len(events), entries))
            return events, self._taken

    def _take_one(self) -> tuple[_Kind, tuple[PageEntry, ...]]:
        """Take neighbours of one kind together, up to the size of an event."""
        kind, entries, self._taken = self._changes.popleft()
        self._entries -= _weight(entries)
        if kind is PlaceCleared:
            return kind, ()
        gathered = list(entries)
        while (
            self._changes
            and self._changes[0][0] is kind
            and len(gathered) + len(self._changes[0][1]) <= _EVENT_ENTRIES
        ):
            _, more, self._taken = self._changes.popleft()
            self._entries -= _weight(more)
            gathered.extend(more)
        return kind, tuple(gathered)

    def _add(self, kind: _Kind, entries: Sequence[PageEntry]) -> None:
        if not entries and kind is not PlaceCleared:
            return
        with self._lock:
            self._added += 1
            if self._anew or self._closed:
                return
            if self._entries + max(len(entries), 1) > self._limit_entries:
                self._drop()
                return
            for start in range(0, max(len(entries), 1), _EVENT_ENTRIES):
                # A copy: the caller may go on with its own list.
                piece = tuple(entries[start : start + _EVENT_ENTRIES])
                # The change is out with its last piece.
                last = start + _EVENT_ENTRIES >= len(entries)
                self._changes.append((kind, piece, self._added if last else self._added - 1))
                self._entries += _weight(piece)

    def _drop(self) -> None:
        self._changes.clear()
        self._entries = 0
        self._anew = True


def _weight(entries: Sequence[PageEntry]) -> int:
    """Return what a change counts in the limit: no change is free."""
    return max(len(entries), 1)
