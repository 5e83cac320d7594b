"""Pages that a node keeps in RAM because somebody asked for it, for a limited time.

Covers pins from outside, their times and their cap. Does not cover pins of transfers, which end by
themselves (`pie.pool.cache`), or who decides what is worth a pin (`pie.policies`).

A pin is a loan that nobody reads: the page cannot leave, be moved to another node or be removed while
it lasts. A page has one pin at most, whoever asked for it; asking again makes it last longer, never
shorter. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pie.page.lookup import LookupStatus
from pie.pool.cache import Loan, TieredCache
from pie.pool.tier import PageId
from pie.wire.orders import PageChange

MOST_PIN_S: Final = 3600.0
"""Who wants a page for longer asks again: a pin that was forgotten must not last for ever."""
_MOST_SHARE: Final = 0.5
"""Of the first tier's budget: what is left must do for all that comes and goes."""
_MOST_PAGES: Final = 65_536


@dataclass(slots=True)
class _Pin:
    loan: Loan
    until_s: float


class PinnedPages:
    """The pins of one node.

    Args:
        cache: What holds the pages.
        budget_bytes: Of its first tier; half of that may be pinned.
        clock: Seconds, going forward only.
    """

    def __init__(
        self,
        cache: TieredCache,
        budget_bytes: int,
        *,
        most: int = _MOST_PAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._limit_bytes = int(_MOST_SHARE * budget_bytes)
        self._most = most
        self._clock = clock
        self._pins: dict[PageId, _Pin] = {}
        self._bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def bytes(self) -> int:
        """Payload of all pinned pages."""
        return self._bytes

    @property
    def next_end_s(self) -> float | None:
        """When the first pin ends, by the clock; None where there is none."""
        with self._lock:
            return min((pin.until_s for pin in self._pins.values()), default=None)

    def pin(self, pages: Sequence[PageId], seconds: float) -> list[PageChange]:
        """Keep pages in the first tier for so long, `MOST_PIN_S` at most; may wait for lower tiers."""
        self.expire()
        until_s = self._clock() + min(seconds, MOST_PIN_S)
        return [self._pin(page, until_s) for page in pages]

    def unpin(self, pages: Sequence[PageId]) -> list[PageChange]:
        """End pins."""
        self.expire()
        return [PageChange.DONE if self._end(page) else PageChange.NOT_HELD for page in pages]

    def expire(self) -> None:
        """End the pins whose time is over."""
        now_s = self._clock()
        with self._lock:
            over = [page for page, pin in self._pins.items() if pin.until_s <= now_s]
        for page in over:
            self._end(page, now_s)

    def close(self) -> None:
        """End all pins and take no more."""
        self._is_closed = True
        for page in list(self._pins):
            self._end(page)

    def check(self) -> None:
        """Assert that the cap holds and that the sum is right."""
        assert self._bytes == sum(pin.loan.page.payload.nbytes for pin in self._pins.values())
        assert self._bytes <= self._limit_bytes
        assert len(self._pins) <= self._most

    def _pin(self, page: PageId, until_s: float) -> PageChange:
        if self._prolong(page, until_s):
            return PageChange.DONE
        loan = self._loan(page)
        if not isinstance(loan, Loan):
            return loan
        size = loan.page.payload.nbytes
        with self._lock:
            pin = self._pins.get(page)
            has_room = self._bytes + size <= self._limit_bytes and len(self._pins) < self._most
            is_new = pin is None and has_room and not self._is_closed
            if is_new:
                self._pins[page] = _Pin(loan, until_s)
                self._bytes += size
        if not is_new:
            self._cache.complete_load(loan)
        if pin is not None:  # Another thread pinned it meanwhile.
            return self._pin(page, until_s)
        return PageChange.DONE if is_new else PageChange.FULL

    def _prolong(self, page: PageId, until_s: float) -> bool:
        with self._lock:
            pin = self._pins.get(page)
            if pin is not None:
                pin.until_s = max(pin.until_s, until_s)
            return pin is not None

    def _loan(self, page: PageId) -> Loan | PageChange:
        """Borrow a page from the first tier, copying it there where only a lower one has it."""
        for _ in range(2):
            loan = self._cache.prepare_load(page, is_use=False)
            if loan is LookupStatus.MISS:
                return PageChange.NOT_HELD
            if not isinstance(loan, Loan):
                return PageChange.IN_USE
            if not loan.level:
                return loan
            self._cache.complete_load(loan)
            if self._bytes >= self._limit_bytes or not self._cache.promote(page):
                break
        return PageChange.FULL

    def _end(self, page: PageId, by_s: float | None = None) -> bool:
        """End a page's pin; with `by_s` only if its time is over then."""
        with self._lock:
            pin = self._pins.get(page)
            if pin is None or (by_s is not None and pin.until_s > by_s):
                return False
            del self._pins[page]
            self._bytes -= pin.loan.page.payload.nbytes
        self._cache.complete_load(pin.loan)
        return True
