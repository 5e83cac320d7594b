"""Pages in a bucket, looked at from outside: listed, read and removed without a node.

Covers objects of one page, packs, and what the bucket's own lists say of them. Does not cover the tier,
which has a node's view of the bucket (`pie.pool.object`), or who asks (`pie.cluster.pages`).

Nodes may use the bucket meanwhile and find out by themselves what was removed. A pack never changes: a
page of it is removed by writing the others into a new one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pie.page.format import HEAD_BYTES, page_name, parse_page_name
from pie.pool.at_rest import PageAtRest, described
from pie.pool.object_errors import ObjectStoreError
from pie.pool.object_names import is_list, pack_name, prefix_of, tail_bytes
from pie.pool.object_pages import ObjectPages, SealedPage
from pie.pool.object_store import FoundObject, ObjectStore
from pie.pool.pack_index import Came
from pie.pool.sealing import Sealing

_AHEAD = 64
"""Objects that are asked for before what came of the first is taken."""


class BucketSource:
    """A `pie.pool.at_rest.Source` in a bucket."""

    tier = "object"

    def __init__(
        self, store: ObjectStore, name: str, sealing: Sealing, *, threads: int = 8
    ) -> None:
        """Look at a bucket.

        Args:
            store: The bucket; the source closes it.
            name: What it is called, such as `s3://bucket/prefix`.
            sealing: Reads headers and lists.
            threads: Requests at once.
        """
        self.name = name
        self._store = store
        self._sealing = sealing
        self._pages = ObjectPages(sealing)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pie-bucket")
        self._left: dict[str, set[int]] = {}
        """Where in packs pages lay that have left, as lists say."""
        self._pack: tuple[str, bytes] = ("", b"")
        """The pack that was read last: its pages are asked for one after another."""

    def pages(self) -> Iterator[PageAtRest]:
        """List the pages, those in packs first; one that a list tells of costs no request."""
        try:
            found = list(self._store.found())
            told, damaged = self._told([one for one in found if is_list(one.name)])
            yield from self._packed([one for one in found if tail_bytes(one.name) is not None])
            files = [one for one in found if parse_page_name(one.name) is not None]
            if not files and not any(tail_bytes(one.name) is not None for one in found):
                self._refuse_if_above(found)
            for one in files:
                if (came := told.get(one.name)) is not None:
                    yield PageAtRest(one.name, 0, one.size, one.stored_ns, came.header, came.key_id)
            yield from self._files([one for one in files if one.name not in told])
            yield from damaged
        except ObjectStoreError as error:
            raise OSError(str(error)) from error

    def read(self, page: PageAtRest) -> bytes:
        """Return a page's whole file."""
        if "@" not in page.where:
            return self._get(page.path, 0, page.file_bytes)
        if self._pack[0] != page.path:
            self._pack = page.path, self._get(page.path)
        return self._pack[1][page.offset : page.offset + page.file_bytes]

    def remove(self, pages: Sequence[PageAtRest]) -> None:
        """Remove pages: their objects, or their packs, which are written anew without them."""
        from_packs: dict[str, set[int]] = {}
        for page in pages:
            if "@" in page.where:
                from_packs.setdefault(page.path, set()).add(page.offset)
        try:
            for name, offsets in from_packs.items():
                self._write_without(name, offsets)
            # Of a pack that cannot be read all goes: nobody finds a page in it.
            whole = [page.path for page in pages if "@" not in page.where]
            self._store.remove([*whole, *from_packs])
        except ObjectStoreError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Let go of the connections."""
        self._threads.shutdown(cancel_futures=True)
        self._store.close()

    def _refuse_if_above(self, found: Sequence[FoundObject]) -> None:
        """See whether all pages lie further down: then the end of the prefix was forgotten.

        Raises:
            OSError: They do.
        """
        below = {prefix for one in found if (prefix := prefix_of(one.name)) is not None}
        if below:
            some = " or ".join(f"{self.name.rstrip('/')}/{prefix}" for prefix in sorted(below)[:3])
            raise OSError(f"no page lies right here, but further down: name {some}")

    def _packed(self, packs: Sequence[FoundObject]) -> Iterator[PageAtRest]:
        def tail(one: FoundObject) -> bytes | None:
            size = tail_bytes(one.name) or 0
            return self._store.get(one.name, max(0, one.size - size), size)

        for one, data in self._fetched(packs, tail):
            came, _, is_whole = self._pages.read_list(data)
            left = self._left.get(one.name, ())
            for each in came:
                if each.offset in left:
                    continue
                where = f"{one.name}@{each.offset}"
                yield PageAtRest(
                    where, each.offset, each.length, each.stored_ns, each.header, each.key_id
                )
            if not came or not is_whole:
                yield _damaged(one)

    def _told(self, lists: Sequence[FoundObject]) -> tuple[dict[str, Came], list[PageAtRest]]:
        """Return what lists say of page files, by name, and which lists are damaged."""
        told: dict[str, Came] = {}
        damaged = []
        for one, data in self._fetched(lists, lambda one: self._store.get(one.name)):
            came, left, is_whole = self._pages.read_list(data)
            for gone in left:
                self._left.setdefault(gone.pack, set()).add(gone.offset)
            for each in came:
                header = each.header
                told[page_name(header.model_root, header.key, header.part)] = each
            if not is_whole:
                damaged.append(_damaged(one))
        return told, damaged

    def _files(self, files: Sequence[FoundObject]) -> Iterator[PageAtRest]:
        """Describe objects by their own headers."""

        def head(one: FoundObject) -> bytes | None:
            return self._store.get(one.name, 0, min(HEAD_BYTES, one.size)) if one.size else b""

        for one, data in self._fetched(files, head):
            yield described(one.name, data, one.size, one.stored_ns, self._sealing)

    def _fetched(
        self, objects: Sequence[FoundObject], fetch: Callable[[FoundObject], bytes | None]
    ) -> Iterator[tuple[FoundObject, bytes]]:
        """Fetch something of each object, many at once; those that have left are passed over."""
        for at in range(0, len(objects), _AHEAD):
            some = objects[at : at + _AHEAD]
            for one, data in zip(some, self._threads.map(fetch, some), strict=True):
                if data is not None:
                    yield one, data

    def _get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            data = self._store.get(name, start, length) if length != 0 else b""
        except ObjectStoreError as error:
            raise OSError(str(error)) from error
        if data is None:
            raise OSError("it has left")
        return data

    def _write_without(self, name: str, offsets: set[int]) -> None:
        """Write what else is in a pack into a new one."""
        data = self._get(name)
        size = tail_bytes(name) or 0
        came = self._pages.read_list(data[max(0, len(data) - size) :]).came
        offsets = offsets | self._left.get(name, set())
        kept = [
            SealedPage(each.header, data[each.offset : each.offset + each.length], each.key_id)
            for each in came
            if each.offset not in offsets
        ]
        if kept:
            now_ns = time.time_ns()
            made = self._pages.pack(kept, now_ns)
            self._store.put(pack_name(now_ns, os.urandom(8), made.tail_bytes), made.data)


def _damaged(one: FoundObject) -> PageAtRest:
    """Return what stands for pages that a list should tell of."""
    problem = "bad_list: some of it is damaged, or was written with another secret"
    return PageAtRest(one.name, 0, one.size, one.stored_ns, None, None, problem)
