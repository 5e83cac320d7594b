"""Lists: objects that say what the page files in a bucket are, so that a start need not read each.

They also say which pages have left packs, since a pack never changes: a page that was removed, or
found bad, would be back at the next start.

Covers gathering records, writing them as one object, and merging many lists into few. Does not
cover finding what is in a bucket (`pie.pool.object_catalogue`).

A name says key, part and size of a page, and a listing gives a thousand names at once; parent, place
in the sequence and tenant tag are in the header alone. A page whose list was not written, because
its process was killed, is found by its own header.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pie.page.header import PageHeader
from pie.pool.object_names import list_name
from pie.pool.object_pages import ObjectPages
from pie.pool.object_store import ObjectStore
from pie.pool.pack_index import Came, Left, Record
from pie.pool.space import Space
from pie.pool.tier import PageId

LIST_AGE_S = 10.0
"""How long a header waits at most for others to share a list with."""
_LIST_PAGES = 512
_MERGED_PAGES = 8192
"""Of 350 bytes each: a list of 3 MB."""
MANY_LISTS = 64
"""So many are merged, and twice as many as the merging before has made."""


class ObjectLists:
    """Lists of one bucket, and records that none has yet.

    `add`, `add_left` and `left_in` are thread-safe; all else is for one thread at a time.
    """

    def __init__(self, store: ObjectStore, pages: ObjectPages, clock: Callable[[], float]) -> None:
        self._store = store
        self._pages = pages
        self._clock = clock
        self._waiting: list[Record] = []
        self._since_s = 0.0
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        """Lists that were read or written here."""
        self._own: set[str] = set()
        """Those that this node merges: which it has written, or found at its start."""
        self._merge_at: int | None = None
        self._packs: Collection[str] = ()
        """Packs that the last look has seen."""
        self._left: dict[str, set[int]] = {}
        """Where in packs pages lay that have left."""

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def taken_bytes(self) -> int:
        """What lists take that are known."""
        return sum(self._sizes.values())

    @property
    def has_many(self) -> bool:
        """Whether lists should be merged now."""
        return self._merge_at is not None and len(self._own) > self._merge_at

    def seen(
        self,
        sizes: Mapping[str, int],
        page_files: int,
        packs: Collection[str],
        knows_pack: Callable[[str], bool],
    ) -> None:
        """Take in which lists are there, all of them read, how many page files, and which packs.

        Args:
            sizes: Of lists, by name.
            page_files: How many there are.
            packs: Names of packs that were seen.
            knows_pack: Whether there is a pack that may have come since.
        """
        self._sizes = dict(sizes)
        self._packs = packs
        gone = [name for name in list(self._left) if not self._has_pack(name, knows_pack)]
        with self._lock:
            for name in gone:
                del self._left[name]
        if self._merge_at is None:
            self._own.update(sizes)
            self._merge_next(page_files // _MERGED_PAGES)
        self._own.intersection_update(sizes)

    def add(self, header: PageHeader, length: int, key_id: bytes | None = None) -> None:
        """Put a page file's header into the next list; `key_id` says what it is encrypted with."""
        with self._lock:
            self._add(Came(0, length, time.time_ns(), header, key_id))

    def add_left(self, left: Left) -> None:
        """Put into the next list that a page has left a pack."""
        with self._lock:
            self._add(left)
            self._left.setdefault(left.pack, set()).add(left.offset)

    def read_left(self, left: Iterable[Left]) -> None:
        """Take in what a list says of pages that have left packs."""
        with self._lock:
            for one in left:
                self._left.setdefault(one.pack, set()).add(one.offset)

    def left_in(self, pack: str) -> Collection[int]:
        """Return where in a pack pages lay that have left."""
        with self._lock:
            return frozenset(self._left.get(pack, ()))

    @property
    def has_left(self) -> bool:
        """Whether no list says yet of some page that it has left."""
        with self._lock:
            return any(isinstance(record, Left) for record in self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a list should be written now."""
        waiting = len(self._waiting)
        return waiting >= _LIST_PAGES or (
            waiting > 0 and self._clock() - self._since_s >= LIST_AGE_S
        )

    def flush(self, space: Space, knows_pack: Callable[[str], bool]) -> int:
        """Write what waits, and return the bytes that it takes: none where there was no room.

        Args:
            space: What its bytes are taken from.
            knows_pack: Whether a pack is known: what has left a pack that is gone is not written.

        Raises:
            ObjectStoreError: It may not be there, and what waits does so on.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        records = [one for one in waiting if isinstance(one, Came) or knows_pack(one.pack)]
        if not records:
            return 0
        try:
            return self._write(records, space)
        except BaseException:
            with self._lock:
                # What cannot be written for long is found by its own header.
                self._waiting = [*waiting, *self._waiting][-_MERGED_PAGES:]
                self._since_s = self._clock()
            raise

    def merge(
        self,
        space: Space,
        is_there: Callable[[PageId], bool],
        knows_pack: Callable[[str], bool],
    ) -> None:
        """Write few lists in the place of many, of the page files and packs that are still there.

        Where there is no room for that, it is tried again when there are more.

        Args:
            space: What bytes are taken from and given back to.
            is_there: Whether a page file is known.
            knows_pack: Whether a pack is known that may have come since the last look.

        Raises:
            ObjectStoreError: Some lists of both kinds are there, which does no harm.
        """
        old = sorted(self._own)
        self._merge_next(len(old))
        made = 0
        kept: dict[PageId | tuple[str, int], Record] = {}
        for name in old:
            data = self._store.get(name)
            listed = self._pages.read_list(data or b"")
            for came in listed.came:
                page = PageId(came.header.key, came.header.part)
                if is_there(page):
                    kept[page] = came
            for left in listed.left:
                if self._has_pack(left.pack, knows_pack):
                    kept[left.pack, left.offset] = left
            if len(kept) < _MERGED_PAGES:
                continue
            if not self._write(list(kept.values()), space):
                return
            made += 1
            kept = {}
        if kept and not self._write(list(kept.values()), space):
            return
        self._store.remove(old)
        space.give(sum(self._sizes.pop(name, 0) for name in old))
        self._own.difference_update(old)
        self._merge_next(made)

    def _add(self, record: Record) -> None:
        if not self._waiting:
            self._since_s = self._clock()
        self._waiting.append(record)

    def _has_pack(self, name: str, knows_pack: Callable[[str], bool]) -> bool:
        return name in self._packs or knows_pack(name)

    def _merge_next(self, lists: int) -> None:
        self._merge_at = MANY_LISTS + 2 * lists

    def _write(self, records: Sequence[Record], space: Space) -> int:
        name, data = self._make(records)
        if not space.take(len(data)):
            return 0
        try:
            self._store.put(name, data)
        except BaseException:
            space.give(len(data))
            raise
        self._sizes[name] = len(data)
        self._own.add(name)
        return len(data)

    def _make(self, records: Sequence[Record]) -> tuple[str, bytes]:
        return list_name(time.time_ns(), os.urandom(8)), self._pages.listed(records)
