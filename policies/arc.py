"""`arc`: balances pages used once against pages used again, by which of them it misses.

Covers one built-in retention policy (Megiddo and Modha, "ARC: a self-tuning, low overhead
replacement cache", FAST 2003), on leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.page.key import PageKey
from pie.policies.ghosts import GhostTable
from pie.policies.page_rows import Row
from pie.policies.turns import TurnTakingRetention

_ONCE, _AGAIN = 0, 1


class ArcRetention(TurnTakingRetention):
    """Adaptive replacement cache: two lists by recency, and a target for the first that learns."""

    def __init__(self) -> None:
        super().__init__(queues=2)
        self._target = 0.0
        """Pages that the list of those used once should hold."""
        self._ghosts = (GhostTable(1 << 10), GhostTable(1 << 10))
        self._left = 0

    def place(self, row: Row) -> int:
        """Return the list of a new page; one that was missed moves the target."""
        rows = self.rows
        for queue in (_ONCE, _AGAIN):
            ghost = self._ghosts[queue].take(rows.key(row), rows.parts[row])
            if ghost is not None and self._left - ghost.tick <= len(rows):
                mine, other = self._ghosts[queue].held + 1, self._ghosts[1 - queue].held
                step = max(1.0, other / mine)
                wanted = self._target + (step if queue == _ONCE else -step)
                self._target = min(max(wanted, 0.0), float(len(rows)))
                return _AGAIN
        return _ONCE

    def use(self, row: Row) -> int:  # noqa: ARG002
        """Return the list of pages used again."""
        return _AGAIN

    def forget(self, row: Row, key: PageKey, part: int) -> None:
        """Remember a page that has left, by the list it was on."""
        self._left += 1
        size = len(self.rows)
        self._ghosts = (self._ghosts[0].fitting(size), self._ghosts[1].fitting(size))
        self._ghosts[self.queue_of[row]].add(key, part, self._left)

    def giving(self, left: Sequence[int]) -> int:
        """Return the list of pages used once where it is longer than it should be, else the other."""
        return _ONCE if left[_ONCE] > self._target else _AGAIN
