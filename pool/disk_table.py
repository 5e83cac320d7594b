"""What the disk tier holds: pages at rest as rows, those that something happens to as entries.

Covers one table; the tier's lock guards it. Does not cover what happens to pages (`pie.pool.disk`).

An entry is made of a row when a page is lent, moved or removed, and is gone with the last that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from pie.page.columns import PageColumns, concatenated
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.disk_entry import LOCKED, DiskEntry
from pie.pool.folder import Folder, FoundPack, FoundPage, Home
from pie.pool.pack_index import fits, join
from pie.pool.packs import Pack, Slot
from pie.pool.rest_rows import Place, RestRows
from pie.pool.tier import PageId, columns_of, id_of

_NEVER = 2**63 - 1
_AT_ONCE = 1024
"""Headers made while others wait: some 2 ms."""

_PACKS_AT_ONCE = 512
"""Packs whose pages are taken in together: 139 bytes of lists a page."""

Where: TypeAlias = "tuple[Folder, Pack | None]"


class DiskTable:
    """Pages by name."""

    def __init__(self) -> None:
        self._rows = RestRows[Where]()
        self._entries: dict[PageId, DiskEntry] = {}
        """Pages that something happens to, and those that have no row; they come before rows."""
        self._stamp = 0

    def __contains__(self, page: PageId) -> bool:
        return page in self._entries or self._rows.find(page) >= 0

    def status(self, page: PageId) -> LookupStatus:
        """Say what is known of a page."""
        entry = self._entries.get(page)
        if entry is not None:
            return entry.status
        return LookupStatus.HIT if self._rows.find(page) >= 0 else LookupStatus.MISS

    def look(self, page: PageId) -> DiskEntry | None:
        """Return what is known of a page; what is changed in it may not be in the table."""
        entry = self._entries.get(page)
        if entry is None and (row := self._rows.find(page)) >= 0:
            home = _home(self._rows.place(row))
            stamp = self._rows.stamp(row)
            entry = DiskEntry(self._rows.header(row), LookupStatus.HIT, home, stamp=stamp)
        return entry

    def wake(self, page: PageId, entry: DiskEntry | None = None) -> DiskEntry | None:
        """Return a page's entry, which stays in the table until `rest` or `remove`.

        Where the caller has looked already, it is that one.
        """
        entry = entry or self.look(page)
        if entry is not None:
            self._entries[page] = entry
        return entry

    def put(self, page: PageId, entry: DiskEntry) -> None:
        """Take in a page."""
        if not entry.stamp:
            entry.stamp = self._stamp + 1
        self._stamp = max(self._stamp, entry.stamp)
        self._entries[page] = entry
        self.rest(page, entry)

    def rest(self, page: PageId, entry: DiskEntry) -> None:
        """Keep no entry of a page that nothing happens to any more."""
        if not entry.rests or self._entries.get(page) is not entry or not fits(entry.header):
            return
        assert entry.home is not None
        row = self._rows.find(page)
        if row < 0:
            self._rows.add(entry.header, _place(entry.home), entry.stamp)
        del self._entries[page]

    def remove(self, page: PageId) -> None:
        """Forget a page."""
        self._entries.pop(page, None)
        row = self._rows.find(page)
        if row >= 0:
            self._rows.remove(row)

    def move(self, page: PageId, old: Home, new: Home) -> bool:
        """Take in that a page lies elsewhere now, if it lay at `old` till now and is still wanted."""
        entry = self.look(page)
        if entry is None or entry.home != old or not (entry.is_readable or entry.is_locked):
            return False
        entry.home = new
        row = self._rows.find(page)
        if row >= 0:
            self._rows.move(row, _place(new))
        return True

    def adopt_all(self, found: Iterable[FoundPage | FoundPack]) -> list[DiskEntry]:
        """Take in what an earlier process left. Of two copies the later one stays; returns the others."""
        packs: list[FoundPack] = []
        others: list[DiskEntry | None] = []
        for one in found:
            if isinstance(one, FoundPage):
                others.append(self.adopt(one))
                continue
            packs.append(one)
            if len(packs) >= _PACKS_AT_ONCE:
                others += self._adopt_packs(packs)
                packs.clear()
        others += self._adopt_packs(packs)
        return [other for other in others if other is not None]

    def locked(self) -> list[PageId]:
        """Return the pages whose key is not here, the oldest first."""
        found = [(entry.stamp, page) for page, entry in self._entries.items() if entry.is_locked]
        return [page for _, page in sorted(found)]

    def adopt(self, page: FoundPage) -> DiskEntry | None:
        """Take in a page that was found. Of two copies the later one stays; returns the other."""
        name = id_of(page.header)
        status = LookupStatus.MISS if page.is_locked else LookupStatus.HIT
        bad = LOCKED if page.is_locked else ""
        entry = DiskEntry(page.header, status, page.home, bad=bad, stamp=page.stored_ns)
        known = self.look(name)
        if known is not None and known.stamp > page.stored_ns:
            return entry
        if known is not None:
            self.remove(name)
        self.put(name, entry)
        return known

    def _adopt_packs(self, packs: list[FoundPack]) -> Iterator[DiskEntry]:
        """Take in the pages of packs that were found, and give back copies as `adopt` does."""
        if not packs:
            return
        came = join([pack.came for pack in packs])
        again = self._rows.add_all(came, lambda number: (packs[number].folder, packs[number].pack))
        if len(came):
            self._stamp = max(self._stamp, int(came.records["stored_ns"].max()))
        for line, one in zip(again.tolist(), came.came(again.tolist()), strict=True):
            pack = packs[came.pack_of[line]]
            home = Home(pack.folder, Slot(pack.pack, one.offset, one.length), 0)
            other = self.adopt(FoundPage(one.header, home, one.stored_ns, is_locked=False))
            if other is not None:
                yield other

    def lose(self, folder: Folder) -> list[PageId]:
        """Forget the pages of a folder but those on loan, and return them all."""
        rows = self._rows.rows_in(lambda where: where[0] is folder)
        lost = {self._rows.page(row) for row in rows}
        lost |= {
            page
            for page, entry in self._entries.items()
            if entry.home is not None and entry.home.folder is folder
        }
        for page in lost:
            self._give_up(page)
        return list(lost)

    def clear(self) -> None:
        """Forget all pages but those on loan or being written."""
        for page, entry in list(self._entries.items()):
            if entry.status is not LookupStatus.PENDING:
                self._give_up(page)
        self._rows = RestRows()

    def oldest(self) -> Iterator[PageId]:
        """List the readable pages, the oldest first, as they are now."""
        rows = self._rows.rows().tolist()
        yield from (self._rows.page(row) for row in rows)
        yield from list(self._entries)

    def headers(self, lock: threading.Lock) -> Iterator[PageHeader]:
        """List the readable pages, the oldest first, holding the lock for some at a time."""
        with lock:
            rows = self._rows.rows()
            stamps = self._rows.stamps(rows)
            others = sorted(
                (entry.stamp, page)
                for page, entry in self._entries.items()
                if self._rows.find(page) < 0
            )
        at = 0
        for stamp, page in [*others, (_NEVER, None)]:
            until = int(np.searchsorted(stamps, stamp, side="right"))
            for start in range(at, until, _AT_ONCE):
                some = slice(start, min(start + _AT_ONCE, until))
                pairs = zip(rows[some].tolist(), stamps[some].tolist(), strict=True)
                with lock:
                    found = [self._header(row, stamp) for row, stamp in pairs]
                yield from (header for header in found if header is not None)
            at = until
            if page is not None:
                with lock:
                    entry = self.look(page)
                if entry is not None and entry.is_readable:
                    yield entry.header

    def columns(self) -> PageColumns:
        """Return the readable pages, the oldest first but for those that something happens to."""
        columns = self._rows.columns()
        if not self._entries:
            return columns
        hidden = {self._rows.find(page) for page in self._entries}
        shown = ~np.isin(self._rows.rows(), list(hidden))
        entries = [entry.header for entry in self._entries.values() if entry.is_readable]
        return concatenated(columns.take(np.flatnonzero(shown)), columns_of(entries))

    def packed(self) -> int:
        """Return how many pages lie in packs."""
        rows = self._rows.rows_in(lambda where: where[1] is not None)
        own = (
            entry.home is not None and entry.home.slot is not None
            for page, entry in self._entries.items()
            if self._rows.find(page) < 0
        )
        return len(rows) + sum(own)

    def check(self) -> None:
        """Assert that rows and entries agree."""
        self._rows.check()
        for page, entry in self._entries.items():
            entry.check()
            row = self._rows.find(page)
            assert row < 0 or _home(self._rows.place(row)) == entry.home
            assert not entry.rests or not fits(entry.header)

    def _header(self, row: int, stamp: int) -> PageHeader | None:
        """Return the header of a row's page, if that is readable and what it was."""
        if not self._rows.holds(row, stamp):
            return None
        header = self._rows.header(row)
        entry = self._entries.get(id_of(header)) if self._entries else None
        return header if entry is None or entry.is_readable else None

    def _give_up(self, page: PageId) -> None:
        entry = self.wake(page)
        self.remove(page)
        if entry is not None:
            entry.status = LookupStatus.MISS
            if entry.pins:
                self._entries[page] = entry


def _home(place: Place[Where]) -> Home:
    folder, pack = place.where
    if pack is None:
        return Home(folder, None, place.start << 32 | place.length)
    return Home(folder, Slot(pack, place.start, place.length), 0)


def _place(home: Home) -> Place[Where]:
    slot = home.slot
    if slot is None:
        return Place((home.folder, None), home.file_bytes >> 32, home.file_bytes & 0xFFFFFFFF)
    return Place((home.folder, slot.pack), slot.offset, slot.length)
