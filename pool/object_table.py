"""What the object tier knows: pages, packs, and the bytes that they take.

Covers one table under one lock, and what changes in it by itself: uploads that end, pages that move
between packs, what a look at the bucket has found. Does no I/O. Does not cover the verbs
(`pie.pool.object`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from pie.page.format import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.object_catalogue import FoundPage, Look
from pie.pool.object_entry import MISSING, ObjectEntry, ObjectHome, ObjectPack
from pie.pool.object_writer import name_of
from pie.pool.space import Space
from pie.pool.tier import PageId, id_of


class Removes(Protocol):
    """What removes from the bucket what the table gives up."""

    def free(self, home: ObjectHome, name: str) -> None:
        """Give up a page's bytes in the bucket."""

    def retire(self, pack: ObjectPack) -> None:
        """Let a pack go, if nothing in it is alive."""

    def is_leaving(self, name: str) -> bool:
        """Say whether an object is about to go."""
        ...


class ObjectTable:
    """Rows of pages and packs. Whoever reads more than one row at a time holds `lock`."""

    def __init__(
        self,
        space: Space,
        on_listed: Callable[[PageHeader, int], None],
        on_changed: Callable[[], None],
    ) -> None:
        """Begin empty.

        Args:
            space: What bytes are taken from.
            on_listed: Told of page files that are in the bucket now, with their sizes.
            on_changed: Called when pages have gone by themselves.
        """
        self.entries: dict[PageId, ObjectEntry] = {}
        self.packs: dict[str, ObjectPack] = {}
        self.scan = 0
        """Looks at the bucket that have begun."""
        self.has_doomed = False
        """Whether something is under way that will give bytes back."""
        self.lock = threading.RLock()
        self._space = space
        self._on_listed = on_listed
        self._on_changed = on_changed
        self._left: set[PageId] = set()
        """Pages that have left since the last look began: it may have seen their objects still."""
        self._list_bytes = 0
        self._writer: Removes
        self._compact: Callable[[ObjectPack], None]

    def connect(self, writer: Removes, compact: Callable[[ObjectPack], None]) -> None:
        """Say what removes objects and what empties packs that are half dead."""
        self._writer = writer
        self._compact = compact

    def uploaded(self, entry: ObjectEntry, home: ObjectHome) -> bool:
        """Take in where a page lies now; False where nobody wants it any more."""
        page = id_of(entry.header)
        with self.lock:
            if home.pack is not None:
                home.pack.scan = self.scan
                self.packs[home.pack.name] = home.pack
            if self.entries.get(page) is not entry or entry.status is not LookupStatus.HIT:
                return False
            entry.home, entry.room, entry.scan = home, None, self.scan
        if home.pack is None:
            self._on_listed(entry.header, home.length)
        return True

    def dropped(self, entry: ObjectEntry) -> None:
        """Take in that a page that only memory held is not kept."""
        page = id_of(entry.header)
        with self.lock:
            if self.entries.get(page) is not entry:
                return
            was_readable = entry.status is LookupStatus.HIT
            entry.status = LookupStatus.MISS
            if not entry.pins:
                del self.entries[page]
        if was_readable:
            self._on_changed()

    def leave(self, page: PageId, entry: ObjectEntry) -> None:
        """Let a page go, and its bytes in the bucket; the caller holds the lock."""
        entry.status = LookupStatus.MISS
        if self.entries.get(page) is entry:
            del self.entries[page]
        self._left.add(page)
        if entry.home is None:
            # The writer finds that nobody wants it any more.
            self.has_doomed = True
        else:
            self._free(entry.home, name_of(entry))

    def forget(self, page: PageId, entry: ObjectEntry) -> None:
        """Let a page go whose object is gone or somebody else's; the caller holds the lock."""
        entry.status = LookupStatus.MISS
        if self.entries.get(page) is entry:
            del self.entries[page]
        home = entry.home
        if home is not None:
            if home.pack is None:
                self._space.give(home.length)
            else:
                home.pack.free(home.length)

    def moved(self, entry: ObjectEntry, old: ObjectHome, new: ObjectHome) -> None:
        """Take in that a page lies in another pack now, if it is still wanted."""
        with self.lock:
            assert new.pack is not None
            new.pack.scan = self.scan
            self.packs[new.pack.name] = new.pack
            if entry.home is old and self.entries.get(id_of(entry.header)) is entry:
                entry.home, entry.scan = new, self.scan
                self._free(old, "")
            else:
                self._free(new, "")

    def begin_look(self) -> None:
        """Take in that the bucket is being looked at from now on."""
        with self.lock:
            self.scan += 1
            self._left.clear()

    def knows_page(self, page: PageId, name: str) -> bool:
        """Say whether a page file that was seen is known, or about to go."""
        return page in self.entries or self._writer.is_leaving(name)

    def knows_pack(self, name: str) -> bool:
        """Say whether a pack that was seen is known, or about to go."""
        return name in self.packs or self._writer.is_leaving(name)

    def end_look(self, look: Look, limit_bytes: int) -> tuple[int, int]:
        """Take in what was seen, and return how many pages came and how many were gone.

        Where all is more than `limit_bytes`, the oldest go.
        """
        with self.lock:
            came = self._adopt(look.pages)
            gone = self._forget_gone(look)
            self._space.found(look.list_bytes)
            self._space.give(self._list_bytes)
            self._list_bytes = look.list_bytes
            self._shed(limit_bytes)
        return came, gone

    def listed(self, size: int) -> None:
        """Take in that a list was written whose bytes were taken."""
        with self.lock:
            self._list_bytes += size

    def check(self) -> None:
        """Assert that rows agree with each other."""
        with self.lock:
            live: dict[str, int] = dict.fromkeys(self.packs, 0)
            for entry in self.entries.values():
                entry.check()
                if entry.home is not None and entry.home.pack is not None:
                    live[entry.home.pack.name] = live.get(entry.home.pack.name, 0) + 1
            for name, pack in self.packs.items():
                assert 0 <= pack.live_bytes <= pack.size
                assert (pack.live_pages == 0) == (pack.live_bytes == 0)
                assert live[name] <= pack.live_pages

    def _free(self, home: ObjectHome, name: str) -> None:
        self._writer.free(home, name)
        pack = home.pack
        if pack is None:
            return
        if pack.is_leaving:
            self.packs.pop(pack.name, None)
        elif pack.is_half_dead:
            self.has_doomed = True
            self._compact(pack)

    def _adopt(self, pages: Iterable[FoundPage]) -> int:
        count = 0
        packs: dict[str, ObjectPack] = {}
        for header, home, _ in pages:
            if home.pack is not None and home.pack.name not in packs:
                packs[home.pack.name] = self.packs[home.pack.name] = home.pack
                home.pack.scan = self.scan
                self._space.found(home.pack.size)
            page = id_of(header)
            if page in self.entries or page in self._left:
                continue
            if home.pack is None:
                self._space.found(home.length)
            else:
                home.pack.take(home.length)
            self.entries[page] = ObjectEntry(
                header, status=LookupStatus.HIT, home=home, scan=self.scan
            )
            count += 1
        for pack in packs.values():
            self._writer.retire(pack)
            if pack.is_leaving:
                del self.packs[pack.name]
        return count

    def _forget_gone(self, look: Look) -> int:
        """Let go of pages whose objects somebody has removed."""
        for name, pack in list(self.packs.items()):
            if pack.scan < self.scan and name not in look.packs:
                pack.is_leaving = True
                self._space.give(pack.size)
                del self.packs[name]
        gone = 0
        for page, entry in list(self.entries.items()):
            home = entry.home
            if home is None or entry.scan >= self.scan or entry.status is not LookupStatus.HIT:
                continue
            if page in look.page_files if home.pack is None else not home.pack.is_leaving:
                continue
            gone += 1
            entry.status = LookupStatus.MISS
            entry.bad = MISSING
            if entry.pins:
                continue  # Its last pin takes it away.
            self.forget(page, entry)
        return gone

    def _shed(self, limit_bytes: int) -> None:
        """Let the oldest pages go until the rest is within the limit."""
        over = self._space.used_bytes - limit_bytes
        for page, entry in list(self.entries.items()):
            if over <= 0:
                return
            if entry.status is LookupStatus.HIT and entry.home is not None and not entry.pins:
                over -= entry.home.length
                self.leave(page, entry)
