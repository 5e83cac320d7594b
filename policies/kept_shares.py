"""Which tenants' pages have the room that a rule's `max` leaves for those that it keeps, in one tier.

Covers who gives its place where the room is taken. Of one tenant what came first stays; of several the one whose pages
were used longest ago gives the page that it was given last, so that what nobody uses any more keeps nobody out. Does
not cover which pages the rule is about (`pie.policies.rule_book`).
"""

from __future__ import annotations

from pie.policies.page_rows import PageRows, Row
from pie.policies.queued import Band, QueuedRetention


class KeptShares:
    """The pages kept by one rule, of at most so many bytes where it has a `max`. Not thread-safe."""

    def __init__(self, most: int | None, rows: PageRows, queues: QueuedRetention) -> None:
        self._most = most
        self._rows = rows
        self._queues = queues
        self._by_use: dict[str, dict[Row, None]] = {}
        """Of each tenant its pages, the one given last at the end; the tenant whose pages were used last at the end."""
        self._bytes = 0

    def used(self, row: Row, tenant: str) -> None:
        """Learn that a page of the rule came or was used: it is kept where there is room, or some is given."""
        if self._most is None:
            self._queues.set_band(row, Band.LAST)
            return
        mine = self._by_use.pop(tenant, {})
        size = self._rows.sizes[row]
        if row not in mine and size <= self._most:
            while self._bytes + size > self._most and self._by_use:
                self._give_one()
            if self._bytes + size <= self._most:
                mine[row] = None
                self._bytes += size
                self._queues.set_band(row, Band.LAST)
        if mine:
            self._by_use[tenant] = mine

    def left(self, row: Row, tenant: str) -> None:
        """Learn that a page has left, or is no longer the rule's; its band is the caller's."""
        mine = self._by_use.get(tenant, {})
        if row in mine:
            del mine[row]
            self._bytes -= self._rows.sizes[row]
            if not mine:
                del self._by_use[tenant]

    def check(self) -> None:
        """Assert that the table agrees with itself; slow, for tests."""
        kept = [row for rows in self._by_use.values() for row in rows]
        assert all(self._by_use.values())
        assert len(set(kept)) == len(kept)
        assert all(self._queues.band_of(row) is Band.LAST for row in kept)
        assert self._bytes == sum(self._rows.sizes[row] for row in kept)
        assert self._most is None or self._bytes <= self._most

    def _give_one(self) -> None:
        """Let the tenant whose pages were used longest ago give one."""
        tenant, rows = next(iter(self._by_use.items()))
        row, _ = rows.popitem()
        if not rows:
            del self._by_use[tenant]
        self._bytes -= self._rows.sizes[row]
        self._queues.set_band(row, Band.MIDDLE)
