"""What the object tier knows: pages, where they lie, and the bytes that they take.

Covers one table under one lock, and what changes in it by itself: uploads that end, pages that move
between packs, what a look at the bucket has found. It alone says where a page lies and what goes.
Does no I/O. Does not cover the verbs (`pie.pool.object`), when a pack goes (`pie.pool.object_packs`)
or removing objects (`pie.pool.object_writer`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from pie.page.events import Part
from pie.page.format import parse_page_name
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.object_catalogue import FoundPage, Look
from pie.pool.object_entry import MISSING, ObjectEntry, ObjectHome, ObjectPack
from pie.pool.object_packs import Packs
from pie.pool.object_removals import Removals
from pie.pool.pack_index import Left
from pie.pool.space import Space
from pie.pool.tier import PageId, id_of


class Placed(NamedTuple):
    """A page and where it lies now."""

    entry: ObjectEntry
    home: ObjectHome


class ObjectTable:
    """Rows of pages and packs. Whoever reads more than one row at a time holds `lock`."""

    def __init__(
        self,
        space: Space,
        removals: Removals,
        packs: Packs,
        on_listed: Callable[[PageHeader, int], None],
        on_left: Callable[[Left], None],
        on_changed: Callable[[], None],
    ) -> None:
        """Begin empty.

        Args:
            space: What bytes are taken from.
            removals: Takes the names of objects that are to go.
            packs: The packs that pages lie in.
            on_listed: Told of page files that are in the bucket now, with their sizes.
            on_left: Told of pages that have left packs which stay.
            on_changed: Called when pages have gone by themselves.
        """
        self.entries: dict[PageId, ObjectEntry] = {}
        self.scan = 0
        """Looks at the bucket that have begun."""
        self.has_doomed = False
        """Whether something is under way that will give bytes back."""
        self.lock = threading.RLock()
        self._space = space
        self._removals = removals
        self._packs = packs
        self._on_listed = on_listed
        self._on_left = on_left
        self._on_changed = on_changed
        self._left: set[PageId] = set()
        """Pages that have left since the last look began: it may have seen their objects still."""
        self._list_bytes = 0
        self._locked: dict[str, int] = {}
        """Sizes of objects that are encrypted with a key that is not here, the oldest first."""
        self._unlocked: set[str] = set()
        """Those that have gone since the last look began."""

    def wants(self, entry: ObjectEntry) -> bool:
        """Say whether a page that was stored is still to be kept."""
        return entry.status is LookupStatus.HIT and self.entries.get(id_of(entry.header)) is entry

    def wrote_page(self, entry: ObjectEntry, header: PageHeader, length: int) -> None:
        """Take in that a page has an object of its own; it goes again where nobody wants it any more.

        Args:
            entry: The page.
            header: What its object says of it: another node's, where that one was first.
            length: Size of the object.
        """
        with self.lock:
            _settle_claim(self._space, entry, length)
            if not self.wants(entry):
                self._removals.add(entry.own_name, length)
                return
            entry.header = header
            self._put(Placed(entry, ObjectHome(length)))
        self._on_listed(header, length)

    def wrote_pack(self, pack: ObjectPack, placed: Sequence[Placed]) -> None:
        """Take in a pack of pages; those that nobody wants any more are dead in it."""
        with self.lock:
            self._packs.came(pack, self.scan)
            list_bytes = pack.size - sum(home.length for _, home in placed)
            for entry, home in placed:
                _settle_claim(self._space, entry, home.length + list_bytes)
                list_bytes = 0
                if self.wants(entry):
                    self._put(Placed(entry, home))
            self._packs.settle(pack)
            self._tell_unwanted(placed)
            self.has_doomed |= self._packs.has_half_dead

    def moved(self, old: ObjectPack, new: ObjectPack, placed: Sequence[Placed]) -> None:
        """Take in that what was alive in a pack lies in a new one too, whose bytes are counted."""
        with self.lock:
            self._packs.came(new, self.scan)
            for entry, home in placed:
                if not self.wants(entry) or (before := entry.home) is None:
                    continue
                if before.pack is old:
                    self._put(Placed(entry, home))
                    self._packs.leave(before)
                else:
                    self._settle_copies(Placed(entry, home))
            self._packs.settle(new)
            self._tell_unwanted(placed)

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

    def leave(self, page: PageId, entry: ObjectEntry, *, with_copies: bool = True) -> None:
        """Let a page go, and its bytes in the bucket; the caller holds the lock.

        Without its copies it is found again where another pack has it too.
        """
        entry.has_left = True
        home = self._let_go(page, entry)
        self._left.add(page)
        if home is None:
            # The writer finds that nobody wants it any more.
            self.has_doomed = True
        elif home.pack is None:
            self._removals.add(entry.own_name, home.length)
        else:
            self._packs.leave(home)
            self.has_doomed |= self._packs.has_half_dead
        if home is not None:
            self._tell_left(entry, home)
        for copy in entry.copies if with_copies else ():
            self._tell_left(entry, copy)

    def forget(self, page: PageId, entry: ObjectEntry) -> None:
        """Let a page go whose object is gone or somebody else's; the caller holds the lock.

        In a pack it counts as alive, so that the pack stays as it is.
        """
        home = self._let_go(page, entry)
        self._left.add(page)
        self._give_file(home)

    def alive_in(self, pack: ObjectPack, pages: Collection[tuple[PageId, int]]) -> list[Placed]:
        """Return which of the pages that a pack's list names, with their places, belong to it."""
        alive = []
        with self.lock:
            for page, start in pages:
                entry = self.entries.get(page)
                home = None if entry is None else entry.home
                if entry is None or home is None or entry.status is not LookupStatus.HIT:
                    continue
                if home.pack is pack and home.start == start:
                    alive.append(Placed(entry, home))
        return alive

    def take_half_dead(self) -> list[ObjectPack]:
        """Return packs that are half dead, to be emptied, each once."""
        with self.lock:
            return self._packs.take_half_dead()

    def make_room(self, size: int) -> bool:
        """Let objects go that no page here needs; say whether there were any.

        These are packs that are kept for other nodes alone and, as far as `size` bytes, locked objects.
        """
        with self.lock:
            return self._packs.retire_spare(for_room=True) or self._drop_locked(size) > 0

    def replaced_locked(self, name: str) -> None:
        """Take in that a locked object is not there any more, and that a page may take its name."""
        with self.lock:
            self._unlocked.add(name)
            self._space.give(self._locked.pop(name, 0))

    def begin_look(self) -> None:
        """Take in that the bucket is being looked at from now on."""
        with self.lock:
            self.scan += 1
            self._left.clear()
            self._unlocked.clear()

    def knows_page(self, page: PageId, name: str) -> bool:
        """Say whether a page file that was seen is known, or something is done about it now."""
        with self.lock:
            entry = self.entries.get(page)
            lies_in_pack = entry is not None and entry.home is not None and entry.home.pack
            return (entry is not None and not lies_in_pack) or self._removals.is_about(name)

    def knows_pack(self, name: str) -> bool:
        """Say whether a pack that was seen is known, or something is done about it now."""
        with self.lock:
            return name in self._packs or self._removals.is_about(name)

    def has_file(self, page: PageId) -> bool:
        """Say whether a page lies in an object of its own, as far as is known."""
        entry = self.entries.get(page)
        return entry is not None and entry.home is not None and entry.home.pack is None

    def end_look(self, look: Look, limit_bytes: int) -> tuple[int, int]:
        """Take in what was seen, and return how many pages came and how many were gone.

        Where all is more than `limit_bytes`, locked objects go, and then the oldest pages.
        """
        with self.lock:
            # First, so that a page that another node has moved is taken on where it lies now.
            gone = self._forget_gone(look) + self._forget_left(look.left)
            came = self._adopt(look.pages)
            for pack in look.dead_packs:
                self._space.found(pack.size)
                self._packs.came(pack, self.scan)
                self._packs.settle(pack)
            self._space.found(look.list_bytes)
            self._space.give(self._list_bytes)
            self._list_bytes = look.list_bytes
            self._count_locked(look)
            self._packs.retire_spare()
            self._shed(limit_bytes)
        return came, gone

    def listed(self, size: int) -> None:
        """Take in that lists take so much more, or less, which is counted already."""
        with self.lock:
            self._list_bytes += size

    def check(self) -> None:
        """Assert that rows agree with each other."""
        with self.lock:
            alive: dict[str, int] = {}
            for entry in self.entries.values():
                entry.check()
                if entry.home is not None and entry.home.pack is not None:
                    alive[entry.home.pack.name] = alive.get(entry.home.pack.name, 0) + 1
            self._packs.check(alive)

    def _put(self, placed: Placed) -> None:
        entry, home = placed
        entry.home, entry.room, entry.scan = home, None, self.scan
        if home.pack is not None:
            self._packs.take(home)

    def _settle_copies(self, placed: Placed) -> None:
        """Let a page that lies in two objects belong to the one whose name sorts first."""
        entry, new = placed
        old = entry.home
        assert old is not None
        moves = entry.name_in(new) < entry.name_in(old)
        loser = old.pack if moves else new.pack
        assert loser is not None, "an object of its own sorts before all packs"
        loser.has_spares = True
        entry.copies = (*(one for one in entry.copies if not _is_gone(one)), old if moves else new)
        if moves:
            self._put(placed)
            self._packs.leave(old)

    def _tell_unwanted(self, placed: Iterable[Placed]) -> None:
        """Tell that pages have left a new pack which they were not wanted in any more."""
        for entry, home in placed:
            if entry.has_left:
                self._tell_left(entry, home)

    def _tell_left(self, entry: ObjectEntry, home: ObjectHome) -> None:
        """Tell that a page has left a pack, where that pack stays."""
        if home.pack is not None and not home.pack.is_leaving:
            self._on_left(Left(home.start, entry.header.key, home.pack.name))

    def _forget_left(self, left: Iterable[Left]) -> int:
        """Let go of pages that another node has removed from the packs in which they count here."""
        gone = 0
        for one in left:
            for part in Part:
                page = PageId(one.key, part)
                entry = self.entries.get(page)
                if entry is None or entry.status is not LookupStatus.HIT:
                    continue
                home = entry.home
                if home is None or home.pack is None or home.start != one.offset:
                    continue
                if home.pack.name != one.pack:
                    continue
                gone += 1
                if entry.pins:  # The last one takes it away, from this pack alone.
                    entry.status, entry.copies = LookupStatus.MISS, ()
                    continue
                self._let_go(page, entry)
                self._left.add(page)
                self._packs.leave(home)
        return gone

    def _let_go(self, page: PageId, entry: ObjectEntry) -> ObjectHome | None:
        entry.status = LookupStatus.MISS
        if self.entries.get(page) is entry:
            del self.entries[page]
        return entry.home

    def _give_file(self, home: ObjectHome | None) -> None:
        if home is not None and home.pack is None:
            self._space.give(home.length)

    def _adopt(self, pages: Iterable[FoundPage]) -> int:
        """Take on pages that are in the bucket, and return how many were not known."""
        pages = list(pages)
        later = self._to_be_seen_again(pages)
        count = 0
        new: dict[str, ObjectPack] = {}
        for header, home, _ in pages:
            pack = home.pack
            if pack is not None and pack.name in later:
                continue
            if pack is not None and pack.name not in new:
                new[pack.name] = pack
                self._space.found(pack.size)
                self._packs.came(pack, self.scan)
            page = id_of(header)
            entry = self.entries.get(page)
            if entry is None and page not in self._left:
                entry = self.entries[page] = ObjectEntry(header, status=LookupStatus.HIT)
                self._count_file(home)
                self._put(Placed(entry, home))
                count += 1
            elif entry is not None and entry.home is not None and _differ(entry.home, home):
                self._count_file(home)
                self._settle_copies(Placed(entry, home))
        for pack in new.values():
            self._packs.settle(pack)
        return count

    def _to_be_seen_again(self, pages: Iterable[FoundPage]) -> Collection[str]:
        """Return packs of which no one can say yet where all their pages belong.

        Some of these are being stored here, or are leaving: the next look finds the pack again.
        """
        later = set()
        for header, home, _ in pages:
            page = id_of(header)
            entry = self.entries.get(page)
            is_settled = entry is None or (
                entry.status is LookupStatus.HIT and entry.home is not None
            )
            if home.pack is not None and (page in self._left or not is_settled):
                later.add(home.pack.name)
        return later

    def _count_file(self, home: ObjectHome) -> None:
        if home.pack is None:
            self._space.found(home.length)

    def _forget_gone(self, look: Look) -> int:
        """Let go of pages whose objects somebody has removed."""
        self._packs.forget_gone(self.scan, look.packs)
        gone = 0
        for page, entry in list(self.entries.items()):
            home = entry.home
            if home is None or entry.scan >= self.scan or entry.status is not LookupStatus.HIT:
                continue
            if page in look.page_files if home.pack is None else not home.pack.is_leaving:
                continue
            gone += 1
            if entry.pins:  # The last one takes it away.
                entry.status = LookupStatus.MISS
                entry.bad = MISSING
            else:
                self._give_file(self._let_go(page, entry))
        return gone

    def _count_locked(self, look: Look) -> None:
        before = sum(self._locked.values())
        oldest_first = sorted(look.locked.values(), key=lambda one: one.stored_ns)
        self._locked = {
            one.name: one.size
            for one in oldest_first
            if one.name not in self._unlocked and not self._is_taken(one.name)
        }
        self._space.found(sum(self._locked.values()))
        self._space.give(before)

    def _is_taken(self, name: str) -> bool:
        """Say whether a page of this node has a name, or a request is about it."""
        page = parse_page_name(name)
        has_file = page is not None and self.has_file(PageId(*page[1:]))
        return has_file or self._removals.is_about(name)

    def _drop_locked(self, size: int) -> int:
        """Let locked objects of so many bytes go, the oldest first, and return what they take."""
        dropped = 0
        while dropped < size and self._locked:
            name = next(iter(self._locked))
            length = self._locked.pop(name)
            self._unlocked.add(name)
            self._removals.add(name, length)
            dropped += length
        return dropped

    def _shed(self, limit_bytes: int) -> None:
        """Let the oldest pages go until the rest is within the limit; locked objects go before them."""
        over = self._space.used_bytes - limit_bytes
        over -= self._drop_locked(over)
        for page, entry in list(self.entries.items()):
            if over <= 0:
                return
            if entry.status is LookupStatus.HIT and entry.home is not None and not entry.pins:
                over -= entry.home.length
                self.leave(page, entry)


def _is_gone(home: ObjectHome) -> bool:
    return home.pack is None or home.pack.is_leaving


def _differ(known: ObjectHome, found: ObjectHome) -> bool:
    """Say whether two places of one page are two objects: its own object has only one name."""
    return known.pack is not None or found.pack is not None


def _settle_claim(space: Space, entry: ObjectEntry, size: int) -> None:
    """Let the object have its bytes of what was claimed for the page."""
    claim = entry.claim
    if claim is not None:
        if not claim.spend(size):  # Never so far: a claim has room for any header.
            space.found(size)
        claim.close()
        entry.claim = None
