"""Tiers around tiers: metered, slow, faulty.

Covers what can be observed or done wrong from outside of any tier. Does not cover what a tier does
itself.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from pie.page.columns import PageColumns
from pie.page.events import Tier as TierKind
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.tier import BadPages, PageId, StoredPage, Tier


class WrappedTier:
    """A tier that does what another does. Base of the others here."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.kind: TierKind = inner.kind
        self.budget_bytes = inner.budget_bytes

    @property
    def used_bytes(self) -> int:
        """Physical bytes now taken."""
        return self.inner.used_bytes

    @property
    def bad_pages(self) -> BadPages:
        """Pages that were found bad."""
        return self.inner.bad_pages

    def lookup(self, page: PageId) -> LookupStatus:
        """Say what is known of a page."""
        return self.inner.lookup(page)

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page."""
        return self.inner.prepare_store(header)

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back."""
        return self.inner.complete_store(page, success=success)

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload."""
        return self.inner.prepare_load(page)

    def complete_load(self, page: PageId) -> None:
        """End a loan."""
        self.inner.complete_load(page)

    def expect(self, pages: Iterable[PageId]) -> None:
        """Hear which pages will be loaded soon."""
        self.inner.expect(pages)

    def remove(self, page: PageId) -> bool:
        """Remove a page unless it is in use."""
        return self.inner.remove(page)

    def keep_removed(self, limit_s: float) -> None:
        """Wait until pages that were removed stay gone."""
        self.inner.keep_removed(limit_s)

    def pages(self) -> Iterator[PageHeader]:
        """List the readable pages."""
        return self.inner.pages()

    def columns(self) -> PageColumns:
        """Return the readable pages."""
        return self.inner.columns()

    def close(self) -> None:
        """Close the tier."""
        self.inner.close()

    def check(self) -> None:
        """Assert that the tier's tables agree."""
        self.inner.check()


class MeteredTier(WrappedTier):
    """Counts calls and the seconds that they take. Counts of concurrent calls are approximate."""

    def __init__(self, inner: Tier, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page."""
        began_s = self._clock()
        try:
            return self.inner.prepare_store(header)
        finally:
            self._count("prepare_store", began_s)

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back."""
        began_s = self._clock()
        try:
            return self.inner.complete_store(page, success=success)
        finally:
            self._count("complete_store", began_s)

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload."""
        began_s = self._clock()
        try:
            return self.inner.prepare_load(page)
        finally:
            self._count("prepare_load", began_s)

    def _count(self, call: str, began_s: float) -> None:
        self.calls[call] += 1
        self.seconds[call] += self._clock() - began_s


class SlowTier(WrappedTier):
    """Takes `delay_s` longer for whatever reads or writes payloads."""

    def __init__(
        self, inner: Tier, delay_s: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._sleep = sleep

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back."""
        self._sleep(self.delay_s)
        return self.inner.complete_store(page, success=success)

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload."""
        self._sleep(self.delay_s)
        return self.inner.prepare_load(page)


class FaultyTier(WrappedTier):
    """Fails where `fails(call)` says so, each time as the contract allows it to fail.

    `prepare_store` has no room, `complete_store` finds the payload bad, `prepare_load` cannot say.
    """

    def __init__(self, inner: Tier, fails: Callable[[str], bool]) -> None:
        super().__init__(inner)
        self._fails = fails

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page, unless it fails."""
        if self._fails("prepare_store"):
            return LookupStatus.RETRY
        return self.inner.prepare_store(header)

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, unless it fails."""
        return self.inner.complete_store(
            page, success=success and not self._fails("complete_store")
        )

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload, unless it fails."""
        if self._fails("prepare_load"):
            return LookupStatus.RETRY
        return self.inner.prepare_load(page)
