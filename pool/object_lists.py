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
from collections.abc import Callable, Sequence

from pie.page.format import PageHeader
from pie.pool.object_names import list_name
from pie.pool.object_pages import ObjectPages
from pie.pool.object_store import ObjectStore
from pie.pool.pack_index import Came
from pie.pool.space import Space

LIST_AGE_S = 10.0
"""How long a header waits at most for others to share a list with."""
_LIST_PAGES = 512
_MERGED_PAGES = 8192
"""Of 350 bytes each: a list of 3 MB."""
MANY_LISTS = 64
"""More are merged at a start."""


class ObjectLists:
    """Headers of page files that no list has yet. Thread-safe."""

    def __init__(self, store: ObjectStore, pages: ObjectPages, clock: Callable[[], float]) -> None:
        self._store = store
        self._pages = pages
        self._clock = clock
        self._waiting: list[Came] = []
        self._since_s = 0.0
        self._lock = threading.Lock()

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

    def flush(self, space: Space) -> tuple[str, int] | None:
        """Write what waits, and return name and size of the list; None where none was written.

        Args:
            space: What its bytes are taken from.

        Raises:
            ObjectStoreError: It may not be there, and what waits does so on.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        try:
            name, data = self._make(waiting)
            if not space.take(len(data)):
                return None
            try:
                self._store.put(name, data)
            except BaseException:
                space.give(len(data))
                raise
            return name, len(data)
        except BaseException:
            with self._lock:
                # What cannot be written for long is found by its own header.
                self._waiting = [*waiting, *self._waiting][-_MERGED_PAGES:]
                self._since_s = self._clock()
            raise

    def merge(self, pages: Sequence[Came], lists: Sequence[str]) -> dict[str, int]:
        """Write few lists in the place of many, and return names and sizes of the new ones.

        Args:
            pages: Page files that are there.
            lists: Names of lists that say no more than that.

        Raises:
            ObjectStoreError: Some lists of both kinds are there, which does no harm.
        """
        made = {}
        for at in range(0, len(pages), _MERGED_PAGES):
            name, data = self._make(pages[at : at + _MERGED_PAGES])
            self._store.put(name, data)
            made[name] = len(data)
        self._store.remove(lists)
        return made

    def _make(self, pages: Sequence[Came]) -> tuple[str, bytes]:
        return list_name(time.time_ns(), os.urandom(8)), self._pages.listed(pages)
