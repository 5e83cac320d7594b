"""Which places a look asks about.

Covers taking turns where far more places are listed than can be asked about at once, as somebody else's
names in the list may be. Does not cover asking (`pie.index.reading`) or following (`pie.index.feed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set as AbstractSet

from pie.page.events import PlaceId

MOST_PLACES = 4_096
"""Places that one reader follows: each costs some commands in every look, and a connection in a Cluster."""

NEW_AT_ONCE = 1_024
"""Listed places that are not followed and are asked about in one look."""


class Roll:
    """Calls all that are listed, many at a time."""

    def __init__(self) -> None:
        self._last = PlaceId("")
        self.was_called = False
        """All that were listed have been called, be it in several turns."""

    def turn(self, followed: AbstractSet[PlaceId], listed: AbstractSet[PlaceId]) -> list[PlaceId]:
        """Return the places to ask about now: those followed, and the next of the others."""
        others = sorted(listed - followed)
        at = bisect_right(others, self._last)
        if at == len(others):
            at = 0
        chosen = others[at : at + NEW_AT_ONCE]
        is_end = at + len(chosen) == len(others)
        self._last = PlaceId("") if is_end else chosen[-1]
        self.was_called = self.was_called or is_end
        return sorted(followed) + chosen
