"""`lfu` and `cost`: pages by how often they are used, and by what they save for their bytes.

Covers two built-in retention policies. Both keep a count of uses for each page that halves while
the page is not used, and pages of about the same value in one queue.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from pie.policies.page_rows import Row
from pie.policies.queued import QueuedRetention
from pie.policies.units import Positive

_LEVELS = 64
_LEVELS_A_DOUBLING = 2
_FIRST_LEVEL = 16
"""The level of a page worth 1: what is worth less goes below it."""
_MOST_MOVED = 256
"""Pages whose count is halved before some are proposed, at most."""
_MOST_USES = 1e6


class LfuRetention(QueuedRetention):
    """Least frequently used; of pages used as often, the one unused for longest.

    Args:
        half_life: A page's count halves after so many uses of others, in times the pages held.
    """

    def __init__(self, half_life: Positive = 8.0) -> None:
        super().__init__(queues=_LEVELS)
        for level in range(_LEVELS):
            self.rank_of[level] = level
        self._half_life = half_life
        self._uses = array("f")
        self._aging = 0

    def value(self, row: Row, uses: float) -> float:  # noqa: ARG002
        """Return what a page is worth that was used so often; 1 is a common one, used once."""
        return uses

    def grow(self, rows: int) -> None:
        """Make the column `rows` long."""
        self._uses.frombytes(bytes(4 * (rows - len(self._uses))))

    def place(self, row: Row) -> int:
        """Return the level of a new page."""
        self._uses[row] = 1.0
        return self._level(row)

    def use(self, row: Row) -> int:
        """Return the level of a page that was used once more."""
        self._uses[row] = min(self._uses[row] + 1.0, _MOST_USES)
        return self._level(row)

    def ranking(self) -> Sequence[int]:
        """Return the levels from the lowest, once pages long unused have been moved down."""
        self._age()
        return [level for level in range(_LEVELS) if not self.is_empty(level)]

    def _level(self, row: Row) -> int:
        doublings = math.log2(max(self.value(row, self._uses[row]), 1e-9))
        level = _FIRST_LEVEL + math.floor(_LEVELS_A_DOUBLING * doublings)
        return min(max(level, 0), _LEVELS - 1)

    def _age(self) -> None:
        """Halve the counts of pages that were not used for a half-life, some at a time."""
        before = self.tick - self._half_life * max(64, len(self.rows))
        moved = 0
        for _ in range(_LEVELS - 1):
            level = 1 + self._aging % (_LEVELS - 1)
            while (row := self.oldest(level)) >= 0 and self.stamps[row] < before:
                if moved >= _MOST_MOVED:
                    return
                moved += 1
                self._uses[row] /= 2
                self.tick += 1
                self.move(row, self._level(row), self.tick)
            self._aging += 1


class CostRetention(LfuRetention):
    """The page leaves first that saves the least time for its bytes.

    Its value is the time to compute it again, times how often it is used, over its bytes; compare
    GreedyDual-Size-Frequency (Cherkasova 1998). Computing a token again takes longer the more
    tokens it attends to.

    Args:
        half_life: A page's count halves after so many uses of others, in times the pages held.
        attention_pages: Pages of context at which a token takes twice the time of a first one.
    """

    def __init__(self, half_life: Positive = 8.0, attention_pages: Positive = 1024.0) -> None:
        super().__init__(half_life)
        self._attention_pages = attention_pages
        self._unit_bytes = 0

    def value(self, row: Row, uses: float) -> float:
        """Return what a page is worth, in uses of the first page that was seen."""
        size = max(1, self.rows.sizes[row])
        self._unit_bytes = self._unit_bytes or size
        time = 1.0 + self.rows.indexes[row] / self._attention_pages
        return uses * time * self._unit_bytes / size
