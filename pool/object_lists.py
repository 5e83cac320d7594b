"""Lists: objects that say what the page files in a bucket are, so that a start need not read each.

Covers gathering headers, writing them as one object, and merging many lists into few. Does not
cover finding what is in a bucket (`pie.pool.object_catalogue`).

A name says key, part and size of a page, and a listing gives a thousand names at once; parent, place
in the sequence and tenant tag are in the header alone. A page whose list was not written, because
its process was killed, is found by its own header.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pie.page.format import PageHeader
from pie.pool.object_names import list_name
from pie.pool.object_pages import ObjectPages
from pie.pool.object_store import ObjectStore
from pie.pool.pack_index import Came
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
    """Lists of one bucket, and headers of page files that none has yet.

    `add` is thread-safe; all else is for one thread at a time.
    """

    def __init__(self, store: ObjectStore, pages: ObjectPages, clock: Callable[[], float]) -> None:
        self._store = store
        self._pages = pages
        self._clock = clock
        self._waiting: list[Came] = []
        self._since_s = 0.0
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        """Lists that were read or written here."""
        self._own: set[str] = set()
        """Those that this node merges: which it has written, or found at its start."""
        self._merge_at: int | None = None

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

    def seen(self, sizes: Mapping[str, int], page_files: int) -> None:
        """Take in which lists are there, all of them read, and how many page files."""
        self._sizes = dict(sizes)
        if self._merge_at is None:
            self._own.update(sizes)
            self._merge_next(page_files // _MERGED_PAGES)
        self._own.intersection_update(sizes)

    def add(self, header: PageHeader, length: int, key_id: bytes | None = None) -> None:
        """Put a page file's header into the next list; `key_id` says what it is encrypted with."""
        with self._lock:
            if not self._waiting:
                self._since_s = self._clock()
            self._waiting.append(Came(0, length, time.time_ns(), header, key_id))

    @property
    def is_due(self) -> bool:
        """Whether a list should be written now."""
        waiting = len(self._waiting)
        return waiting >= _LIST_PAGES or (
            waiting > 0 and self._clock() - self._since_s >= LIST_AGE_S
        )

    def flush(self, space: Space) -> int:
        """Write what waits, and return the bytes that it takes: none where there was no room.

        Args:
            space: What its bytes are taken from.

        Raises:
            ObjectStoreError: It may not be there, and what waits does so on.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if not waiting:
            return 0
        try:
            return self._write(waiting, space)
        except BaseException:
            with self._lock:
                # What cannot be written for long is found by its own header.
                self._waiting = [*waiting, *self._waiting][-_MERGED_PAGES:]
                self._since_s = self._clock()
            raise

    def merge(self, space: Space, is_there: Callable[[PageId], bool]) -> None:
        """Write few lists in the place of many, of the page files that are still there.

        Where there is no room for that, it is tried again when there are more.

        Args:
            space: What bytes are taken from and given back to.
            is_there: Whether a page file is known.

        Raises:
            ObjectStoreError: Some lists of both kinds are there, which does no harm.
        """
        old = sorted(self._own)
        self._merge_next(len(old))
        made = 0
        pages: dict[PageId, Came] = {}
        for name in old:
            data = self._store.get(name)
            for came in () if data is None else self._pages.read_list(data)[0]:
                page = PageId(came.header.key, came.header.part)
                if is_there(page):
                    pages[page] = came
                if len(pages) < _MERGED_PAGES:
                    continue
                if not self._write(list(pages.values()), space):
                    return
                made += 1
                pages = {}
        if pages and not self._write(list(pages.values()), space):
            return
        self._store.remove(old)
        space.give(sum(self._sizes.pop(name, 0) for name in old))
        self._own.difference_update(old)
        self._merge_next(made)

    def _merge_next(self, lists: int) -> None:
        self._merge_at = MANY_LISTS + 2 * lists

    def _write(self, pages: Sequence[Came], space: Space) -> int:
        name, data = self._make(pages)
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

    def _make(self, pages: Sequence[Came]) -> tuple[str, bytes]:
        return list_name(time.time_ns(), os.urandom(8)), self._pages.listed(pages)
