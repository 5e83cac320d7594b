"""`s3-fifo`: three first-in-first-out queues; what is used once passes through quickly.

Covers one built-in retention policy (Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need
for cache eviction", SOSP 2023), on leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pie.page.key import PageKey
from pie.policies.ghosts import GhostTable
from pie.policies.page_rows import Row
from pie.policies.queued import STAY
from pie.policies.turns import TurnTakingRetention
from pie.policies.units import Share

_SMALL, _MAIN = 0, 1
_MOST_USES = 3
_USES_TO_STAY = 2


class S3FifoRetention(TurnTakingRetention):
    """New pages pass a small queue; those used there, or back soon, get into the main one.

    Args:
        small: Share of the pages that the small queue may hold before it gives first.
    """

    def __init__(self, small: Share = 0.1) -> None:
        super().__init__(queues=2)
        self._small = small
        self._uses = array("B")
        self._left = 0
        self._ghosts = GhostTable(1 << 10)

    def grow(self, rows: int) -> None:
        """Make the column `rows` long."""
        self._uses.frombytes(bytes(rows - len(self._uses)))

    def place(self, row: Row) -> int:
        """Return the queue of a new page: the main one where it left the small one not long ago."""
        rows = self.rows
        self._uses[row] = 0
        ghost = self._ghosts.take(rows.key(row), rows.parts[row])
        if ghost is None or self._left - ghost.tick > self.counts[_MAIN]:
            return _SMALL
        return _MAIN

    def use(self, row: Row) -> int:
        """Count a use; the page stays where it is."""
        self._uses[row] = min(_MOST_USES, self._uses[row] + 1)
        return STAY

    def forget(self, row: Row, key: PageKey, part: int) -> None:
        """Remember a page that has left the small queue."""
        if self.queue_of[row] == _SMALL:
            self._left += 1
            self._ghosts = self._ghosts.fitting(len(self.rows))
            self._ghosts.add(key, part, self._left)

    def giving(self, left: Sequence[int]) -> int:
        """Return the small queue where it is longer than it should be, else the main one."""
        return _SMALL if left[_SMALL] > self._small * len(self.rows) else _MAIN

    def spared(self, row: Row) -> bool:
        """Give a page that was used another round in the main queue."""
        queue = self.queue_of[row]
        if queue == _SMALL and self._uses[row] >= _USES_TO_STAY:
            self._uses[row] = 0
        elif queue == _MAIN and self._uses[row]:
            self._uses[row] -= 1
        else:
            return False
        self.tick += 1
        self.move(row, _MAIN, self.tick)
        return True
