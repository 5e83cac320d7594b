"""What a worker knows of the pages that the pool has, and what leaves where the pool is all there is below.

Covers remembering what the pool took or gave, and counting what leaves device memory for nowhere. Does not cover asking the
pool (`pie.worker.page_pool`) or workers with tiers of their own below (`pie.worker.lower_tiers`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from pie.page.events import Part
from pie.page.key import PageKey
from pie.pool.tier import PageId
from pie.worker.batch import PageSlot
from pie.worker.page_table import FrozenPage

_MOST = 65_536
"""Pages that are remembered: the last ones."""


class InPool:
    """Pages that the pool took or gave, and may have still. Thread-safe."""

    def __init__(self) -> None:
        self._pages: dict[PageId, None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def note(self, pages: Iterable[PageId]) -> None:
        """Learn that the pool took pages, or gave them: they may leave here and are not lost."""
        with self._lock:
            for page in pages:
                self._pages.pop(page, None)
                self._pages[page] = None
            while len(self._pages) > _MOST:
                del self._pages[next(iter(self._pages))]

    def has(self, key: PageKey, parts: Sequence[Part]) -> bool:
        """Say whether it has all of these parts of a page, as far as is remembered."""
        return all(PageId(key, part) in self._pages for part in parts)


class PoolBelow:
    """A `pie.worker.page_table.Below` for some parts where nothing but the pool is below."""

    def __init__(self, in_pool: InPool, parts: Sequence[Part]) -> None:
        self._in_pool = in_pool
        self._parts = parts
        self.lost = 0
        """Pages that left and that the pool had not taken."""

    @property
    def waiting(self) -> int:
        """None: a page that leaves before it was stored is dropped from what waits."""
        return 0

    def holds(self, key: PageKey) -> bool:
        """Say whether the pool has a page."""
        return self._in_pool.has(key, self._parts)

    def demote(self, victims: Sequence[tuple[PageSlot, FrozenPage]]) -> None:
        """Count what is lost."""
        self.lost += sum(not self.holds(page.key) for _, page in victims)

    def keep(self, uses: Mapping[PageKey, int]) -> None:
        """Do nothing: what the pool keeps is for its own rules."""
