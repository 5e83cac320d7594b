"""Finding what is in a bucket: by listing it, and by reading what lists and packs say.

Covers one look at the bucket, and what is new since the one before. Does not cover what the tier
makes of it (`pie.pool.object`) or writing lists (`pie.pool.object_lists`).

A million small pages are some thousand packs, and a million page files a thousand requests for
their names and some hundred lists: neither takes a request a page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pie.page.errors import BadPage
from pie.page.format import HEAD_BYTES, FileHeader, parse_page_name
from pie.page.header import PageHeader
from pie.pool.object_entry import ObjectHome, ObjectPack
from pie.pool.object_lists import ObjectLists
from pie.pool.object_names import is_list, tail_bytes
from pie.pool.object_pages import ObjectPages
from pie.pool.object_store import FoundObject, ObjectStore
from pie.pool.pack_index import Came, Left
from pie.pool.tier import PageId

log = logging.getLogger("pie.pool.object")

_MOST_HEADS = 1024
"""Headers read one by one in one look; the next look reads more."""
_MOST_STRANGE = 100_000

T = TypeVar("T")


class FoundPage(NamedTuple):
    """A page that is in the bucket."""

    header: PageHeader
    home: ObjectHome
    stored_ns: int


@dataclass(slots=True)
class Look:
    """What one look at a bucket has seen."""

    pages: list[FoundPage] = field(default_factory=list)
    """Those that were not known, the oldest first."""
    page_files: set[PageId] = field(default_factory=set)
    """All that lie in objects of their own."""
    packs: set[str] = field(default_factory=set)
    locked: dict[str, FoundObject] = field(default_factory=dict)
    """This cluster's objects that are encrypted with a key that is not here."""
    dead_packs: list[ObjectPack] = field(default_factory=list)
    """Those that were not known and that all pages have left."""
    left: list[Left] = field(default_factory=list)
    """What lists that were not read before say of pages that have left packs."""
    list_bytes: int = 0
    unread: int = 0
    """Page files whose headers the next look will read."""


class Catalogue:
    """Looks at one bucket again and again. For one thread at a time."""

    def __init__(
        self, store: ObjectStore, pages: ObjectPages, lists: ObjectLists, threads: int
    ) -> None:
        self._store = store
        self._pages = pages
        self._lists = lists
        self._threads = threads
        self._strange: set[str] = set()
        """Objects that are not this cluster's; they are left alone."""
        self._locked: dict[str, FoundObject] = {}
        """What the look before found locked: not read again unless it was written anew."""

    def look(
        self, knows_page: Callable[[PageId, str], bool], knows_pack: Callable[[str], bool]
    ) -> Look:
        """List the bucket and read what says what is new.

        Raises:
            ObjectStoreError: The store does not answer; what was seen is forgotten.
        """
        look = Look()
        files: dict[PageId, FoundObject] = {}
        packs: list[FoundObject] = []
        lists: dict[str, int] = {}
        for one in self._store.found():
            if self._locked.get(one.name) == one:
                look.locked[one.name] = one
            elif (name := parse_page_name(one.name)) is not None:
                page = PageId(*name[1:])
                look.page_files.add(page)
                if not knows_page(page, one.name) and one.name not in self._strange:
                    files[page] = one
            elif tail_bytes(one.name) is not None:
                look.packs.add(one.name)
                if not knows_pack(one.name) and one.name not in self._strange:
                    packs.append(one)
            elif is_list(one.name):
                lists[one.name] = one.size
        with ThreadPoolExecutor(self._threads, thread_name_prefix="pie-object-look") as threads:
            told = self._read_lists(look, lists, threads)
            self._look_at_packs(look, packs, threads)
            self._look_at_files(look, files, told, threads)
        # Only now: what a look that failed has read is read again.
        self._lists.seen(lists, len(look.page_files), look.packs, knows_pack)
        self._locked = look.locked
        look.list_bytes = self._lists.taken_bytes
        look.pages.sort(key=lambda page: page.stored_ns)
        return look

    def _look_at_packs(
        self, look: Look, packs: list[FoundObject], threads: ThreadPoolExecutor
    ) -> None:
        def tail(one: FoundObject) -> bytes | None:
            size = tail_bytes(one.name) or 0
            return self._store.get(one.name, max(0, one.size - size), size)

        for one, data in zip(packs, threads.map(tail, packs), strict=True):
            if data is None:
                look.packs.discard(one.name)
                continue
            came, _, is_whole = self._pages.read_list(data)
            if not came:
                self._leave_alone(one.name, "a pack whose list is not of this cluster")
                continue
            if any(self._pages.is_locked(each.key_id) for each in came):
                look.locked[one.name] = one
                continue
            if not is_whole:
                log.warning("%s: a part of its list is not readable", one.name)
            pack = ObjectPack(one.name, one.size)
            left = self._lists.left_in(one.name)
            staying = [each for each in came if each.offset not in left]
            if is_whole and not staying:
                look.dead_packs.append(pack)
            for each in staying:
                home = ObjectHome(each.length, each.offset, pack)
                look.pages.append(FoundPage(each.header, home, each.stored_ns))

    def _look_at_files(
        self,
        look: Look,
        files: dict[PageId, FoundObject],
        told: dict[PageId, Came],
        threads: ThreadPoolExecutor,
    ) -> None:
        found: list[tuple[FoundObject, Came]] = []
        unknown: list[FoundObject] = []
        for page, one in files.items():
            came = told.get(page)
            if came is None:
                unknown.append(one)
            elif self._pages.is_locked(came.key_id):
                look.locked[one.name] = one
            else:
                found.append((one, came))
        # The newest are those that no list had the time to take in.
        unknown.sort(key=lambda one: one.stored_ns, reverse=True)
        look.unread = max(0, len(unknown) - _MOST_HEADS)
        read = [*_both(unknown[:_MOST_HEADS], threads.map(self._head, unknown[:_MOST_HEADS]))]
        headers = [(one, came.header) for one, came in found]
        for one, head in read:
            if self._pages.is_locked(head.key_id):
                look.locked[one.name] = one
            else:
                self._lists.add(head.header, one.size, head.key_id)
                headers.append((one, head.header))
        for one, header in headers:
            look.pages.append(FoundPage(header, ObjectHome(one.size), one.stored_ns))

    def _read_lists(
        self, look: Look, lists: dict[str, int], threads: ThreadPoolExecutor
    ) -> dict[PageId, Came]:
        """Return what lists say of page files that were not read before, and take in what has left."""
        new = [name for name in lists if name not in self._lists]
        told: dict[PageId, Came] = {}
        for name, data in zip(new, threads.map(self._store.get, new), strict=True):
            if data is None:
                del lists[name]
                continue
            listed = self._pages.read_list(data)
            for came in listed.came:
                told[PageId(came.header.key, came.header.part)] = came
            look.left.extend(listed.left)
        self._lists.read_left(look.left)
        return told

    def _head(self, one: FoundObject) -> FileHeader | None:
        data = self._store.get(one.name, 0, min(HEAD_BYTES, one.size) or 1)
        if data is None:
            return None
        try:
            head = self._pages.open_head(data, one.size)
        except BadPage as error:
            self._leave_alone(one.name, str(error))
            return None
        header = head.header
        if parse_page_name(one.name) != (header.model_root, header.key, header.part):
            self._leave_alone(one.name, "it is another page than its name says")
            return None
        return head

    def _leave_alone(self, name: str, why: str) -> None:
        if not self._strange:
            log.warning("%s is left alone, and others like it: %s", name, why)
        if len(self._strange) < _MOST_STRANGE:
            self._strange.add(name)


def _both(
    objects: Iterable[FoundObject], headers: Iterable[T | None]
) -> Iterable[tuple[FoundObject, T]]:
    for one, header in zip(objects, headers, strict=True):
        if header is not None:
            yield one, header
