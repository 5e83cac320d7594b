"""What a pool node does with orders about pages that it holds: remove them, pin them, let them go.

Covers carrying them out beside the event loop, and ending pins in time. Does not cover the pins themselves
(`pie.pool.pinned`), transfers (`pie.pool.serving`) or who gives orders (`pie.pool.page_orders`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from pie.page.lookup import LookupStatus
from pie.pool.cache import TieredCache
from pie.pool.pinned import PinnedPages
from pie.pool.tier import PageId
from pie.wire.orders import PageChange, PinPages, RemovePages, UnpinPages

_KEEP_REMOVED_S = 2.0
"""How long an answer waits at most for a store to take in that pages are gone."""


class OrderService:
    """Carries out the orders that one node gets. For one event loop.

    Args:
        cache: What holds the pages.
        budget_bytes: Of its first tier.
        threads: For what may wait for lower tiers.
        clock: Seconds, going forward only.
    """

    def __init__(
        self,
        cache: TieredCache,
        budget_bytes: int,
        threads: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pinned = PinnedPages(cache, budget_bytes, clock=clock)
        self._cache = cache
        self._threads = threads
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    async def change(
        self, message: RemovePages | PinPages | UnpinPages, pages: Sequence[PageId]
    ) -> list[PageChange]:
        """Carry out an order about `pages`, those that it names; say what became of each."""
        if isinstance(message, UnpinPages):
            changes = self.pinned.unpin(pages)
        elif isinstance(message, RemovePages):
            changes = await self._in_thread(lambda: self._remove(pages))
        else:
            seconds = message.seconds
            changes = await self._in_thread(lambda: self.pinned.pin(pages, seconds))
        self._end_in_time()
        return changes

    def _remove(self, pages: Sequence[PageId]) -> list[PageChange]:
        changes = []
        for page in pages:
            if self._cache.lookup(page) is LookupStatus.MISS:
                changes.append(PageChange.NOT_HELD)
            else:
                self._cache.remove(page)
                is_gone = self._cache.lookup(page) is LookupStatus.MISS
                changes.append(PageChange.DONE if is_gone else PageChange.IN_USE)
        self._cache.keep_removed(_KEEP_REMOVED_S)
        return changes

    def _end_in_time(self) -> None:
        """See to it that pins end also when nobody asks for anything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end_s = self.pinned.next_end_s
        if end_s is not None:
            delay_s = max(0.0, end_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self.pinned.expire()
        self._end_in_time()

    async def _in_thread(self, work: Callable[[], list[PageChange]]) -> list[PageChange]:
        # It is carried out to its end also where nobody waits any more.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))
