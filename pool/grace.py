"""Pages that may leave a node, after a time in which readers on their way still find them.

Covers since when others have had such pages, for a capped number of them. Pure; time comes in. Does not
cover which pages those are (`pie.pool.rebalance`) or removing them (`pie.pool.migration`).
"""

from __future__ import annotations

from typing import Final

from pie.pool.tier import PageId

_MOST_PAGES: Final = 65_536
"""About 13 MB of bookkeeping. Further pages stay until some of these have left."""


class Grace:
    """Counts the time of pages from when others were seen to have them, over several rounds.

    Args:
        grace_s: How long a page stays after that.
        most: Of how many pages that is remembered.
    """

    def __init__(self, grace_s: float, most: int = _MOST_PAGES) -> None:
        self.grace_s = grace_s
        self._most = most
        self._view: object = None
        self._before: dict[PageId, float] = {}
        """What the last round saw and this one has not seen yet."""
        self._seen: dict[PageId, float] = {}

    def begin(self, view: object) -> None:
        """Begin a round; with another view of who should have what, all times begin again."""
        self._before, self._seen = ({} if view != self._view else self._seen), {}
        self._view = view

    def may_leave(self, page: PageId, now_s: float) -> bool:
        """Say whether a page may leave that all others that should have it have now."""
        since_s = self._before.pop(page, None)
        if since_s is None:
            since_s = self._seen.get(page)
        if since_s is None:
            if len(self) >= self._most:
                return False
            since_s = now_s
        self._seen[page] = since_s
        return now_s - since_s >= self.grace_s

    def left(self, page: PageId) -> None:
        """Forget a page, because it has left."""
        self._seen.pop(page, None)

    def __contains__(self, page: PageId) -> bool:
        return page in self._seen or page in self._before

    def __len__(self) -> int:
        return len(self._seen) + len(self._before)
