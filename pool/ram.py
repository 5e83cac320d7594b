"""The RAM tier: pages in one arena.

Covers the two-phase verbs, pins and checks over memory. Does not cover what leaves when it is
full (`pie.pool.cache`).

A payload is hashed twice in its life here: once by `complete_store`, after the copy, which vouches
for the sender, the wire and the copy at once; and by each `prepare_load`, because memory may
have changed since and a bad page has to be found where it can be removed. XXH3 reads 12 GB/s from
memory, so a check costs a twelfth of a transfer. Hashing happens outside the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pie.page.columns import PageColumns
from pie.page.events import Tier as TierKind
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.arena import Arena
from pie.pool.checksum import Checksum
from pie.pool.errors import NotPreparedError
from pie.pool.tier import BadPages, PageId, StoredPage, columns_of, id_of

_MISS = LookupStatus.MISS
"""A name of its own: look-ups of thousands of pages would spend a third of their time on members."""


@dataclass(slots=True)
class _Entry:
    header: PageHeader
    start: int
    status: LookupStatus = LookupStatus.PENDING
    """`HIT` is readable; `MISS` was found bad while pinned, and goes with its last pin."""
    is_checking: bool = False
    """Whether `complete_store` has begun."""
    pins: int = 0


class RamTier:
    """A `pie.pool.tier.Tier` in RAM; `kind` says whose."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        kind: TierKind = TierKind.POOL_RAM,
        checksum: Checksum | None = None,
    ) -> None:
        """Reserve address space; memory becomes resident as pages come.

        Args:
            budget_bytes: Physical bytes that pages and their bookkeeping may take.
            kind: `POOL_RAM` on a node, `HOST` on a worker.
            checksum: How payloads are checked; without it, unkeyed.

        Raises:
            NoArenaError: The system refuses to map so much.
        """
        self.kind = kind
        self.budget_bytes = budget_bytes
        self._checksum = checksum or Checksum()
        self._arena = Arena(budget_bytes)
        self._entries: dict[PageId, _Entry] = {}
        self._bad_at_store = 0
        self._bad_at_load = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages, stores in progress, rounding and bookkeeping included."""
        with self._lock:
            return self._arena.used_bytes

    @property
    def resident_bytes(self) -> int:
        """Upper bound of the physical memory now taken, gaps included; never over the budget."""
        with self._lock:
            return self._arena.resident_bytes

    @property
    def bad_pages(self) -> BadPages:
        """How many payloads did not match their checksum."""
        return BadPages(at_store=self._bad_at_store, at_load=self._bad_at_load)

    def lookup(self, page: PageId) -> LookupStatus:
        """Say what is known of a page, without pinning it."""
        entry = self._entries.get(page)
        return _MISS if entry is None else entry.status

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page and return where its payload goes."""
        page = id_of(header)
        with self._lock:
            if self._closed:
                return LookupStatus.MISS
            entry = self._entries.get(page)
            if entry is not None:
                return entry.status or LookupStatus.RETRY
            start = self._arena.allocate(header.raw_bytes)
            if start is None:
                return LookupStatus.RETRY
            self._entries[page] = _Entry(header, start)
            return self._arena.view(start, header.raw_bytes)

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back."""
        with self._lock:
            entry = self._entries.get(page)
            if entry is None or entry.status is not LookupStatus.PENDING or entry.is_checking:
                if self._closed:
                    return False
                raise NotPreparedError(f"nobody prepared a store of {page.key.hex()}")
            entry.is_checking = True
        good = success and self._is_good(entry)
        with self._lock:
            if good and not self._closed:
                entry.status = LookupStatus.HIT
                return True
            self._bad_at_store += success and not good
            self._drop(page, entry)
            return False

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload, checked; a bad page is removed and is a `MISS`."""
        with self._lock:
            entry = self._entries.get(page)
            if entry is None or entry.status is not LookupStatus.HIT:
                return LookupStatus.MISS if entry is None else entry.status
            entry.pins += 1
        if self._is_good(entry):
            return StoredPage(entry.header, self._payload(entry).toreadonly())
        with self._lock:
            if entry.status is LookupStatus.HIT:
                self._bad_at_load += 1
                entry.status = LookupStatus.MISS
            self._unpin(page, entry)
        return LookupStatus.MISS

    def complete_load(self, page: PageId) -> None:
        """End a loan: the pin goes."""
        with self._lock:
            entry = self._entries.get(page)
            if entry is None or not entry.pins:
                raise NotPreparedError(f"nobody holds a loan of {page.key.hex()}")
            self._unpin(page, entry)

    def expect(self, pages: Iterable[PageId]) -> None:
        """Hear which pages will be loaded soon: they are here."""

    def remove(self, page: PageId) -> bool:
        """Remove a page unless it is pinned or being written; say whether it is gone."""
        with self._lock:
            entry = self._entries.get(page)
            if entry is None:
                return True
            if entry.pins or entry.status is not LookupStatus.HIT:
                return False
            self._drop(page, entry)
            return True

    def keep_removed(self, limit_s: float) -> None:
        """Do nothing: the next process finds nothing here."""

    def pages(self) -> Iterator[PageHeader]:
        """List the readable pages as they were at some moment of the call."""
        with self._lock:
            entries = list(self._entries.values())
        return (entry.header for entry in entries if entry.status is LookupStatus.HIT)

    def columns(self) -> PageColumns:
        """Return the readable pages as they were at one moment of the call, each once."""
        return columns_of(self.pages())

    def close(self) -> None:
        """Let go of the arena. Loans stay valid until they end, and then free the memory."""
        with self._lock:
            self._closed = True
            for page, entry in list(self._entries.items()):
                if entry.status is not LookupStatus.PENDING:
                    entry.status = LookupStatus.MISS
                    if not entry.pins:
                        self._drop(page, entry)
            if not self._entries:
                self._arena.release()

    def check(self) -> None:
        """Assert that entries and extents agree and that the cap holds."""
        with self._lock:
            self._arena.check()
            assert self._arena.extents == len(self._entries)
            for entry in self._entries.values():
                assert entry.pins >= 0
                assert entry.pins == 0 or entry.status is not LookupStatus.PENDING
                assert entry.pins > 0 or entry.status is not LookupStatus.MISS

    def _is_good(self, entry: _Entry) -> bool:
        return self._checksum.matches(entry.header, self._payload(entry))

    def _payload(self, entry: _Entry) -> memoryview:
        return self._arena.view(entry.start, entry.header.raw_bytes)

    def _unpin(self, page: PageId, entry: _Entry) -> None:
        entry.pins -= 1
        if entry.status is LookupStatus.MISS and not entry.pins:
            self._drop(page, entry)

    def _drop(self, page: PageId, entry: _Entry) -> None:
        del self._entries[page]
        self._arena.free(entry.start)
        if self._closed and not self._entries:
            self._arena.release()
