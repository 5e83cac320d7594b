"""Writing to a bucket behind those who store: page files, packs of small pages, removals.

Covers the buffer that payloads wait in, the threads that send them, what is tried again, and
removing many objects with one request. Does not cover which pages are readable (`pie.pool.object`).

A payload is readable from the buffer until it is in the bucket, so a store costs no wait while
there is room in the buffer. A name that a request is about is said to be so (`Removals.alone`) until
the table knows what came of it, so that no look at the bucket takes it for somebody else's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from pie.page.format import HEAD_BYTES
from pie.page.header import PageHeader
from pie.pool.folder import FRAME_BYTES, SMALL_BYTES
from pie.pool.object_entry import ObjectEntry, ObjectHome, ObjectPack
from pie.pool.object_errors import ObjectStoreError, StoreFailure
from pie.pool.object_health import ObjectHealth
from pie.pool.object_names import earlier_pack_name, pack_name
from pie.pool.object_pages import ObjectPages, SealedPage
from pie.pool.object_removals import Removals
from pie.pool.object_store import ObjectStore
from pie.pool.object_table import ObjectTable, Placed

log = logging.getLogger("pie.pool.object")

PACK_AGE_S = 1.0
"""How long a small page waits at most for others to share an object with."""
_MOST_ATTEMPTS = 5
"""Of one upload, each of several requests; then its pages are lost."""
_MOST_REMOVED = 1000


@dataclass(slots=True)
class WriterCounters:
    """What was written since the start."""

    objects: int = 0
    """Objects made: page files and packs."""
    written_bytes: int = 0
    lost_races: int = 0
    """Page files that another node had written already."""
    removed: int = 0
    """Objects removed."""
    remove_requests: int = 0
    dropped: int = 0
    """Pages that were taken and could not be kept."""


class SentPack(NamedTuple):
    """A pack that is in the bucket, and where in it pages lie."""

    pack: ObjectPack
    homes: list[ObjectHome]


@dataclass(slots=True, eq=False)
class _Upload:
    entries: list[ObjectEntry]
    is_pack: bool = False
    attempts: int = 0
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = sum(entry.header.raw_bytes for entry in self.entries)


class ObjectWriter:
    """Sends pages of one tier. Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        pages: ObjectPages,
        removals: Removals,
        health: ObjectHealth,
        table: ObjectTable,
        went_off: Callable[[], None],
        *,
        threads: int,
        buffer_bytes: int,
        pack_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Prepare.

        Args:
            store: Where objects go.
            pages: Makes their bytes.
            removals: What is to go.
            health: Whether the store takes anything.
            table: Told what became of pages.
            went_off: Called when the store does not answer any more.
            threads: Requests at once.
            buffer_bytes: Payloads that may wait.
            pack_bytes: A pack of this size is sent.
            clock: Seconds, going forward only.
        """
        self.counters = WriterCounters()
        self._store = store
        self._pages = pages
        self._removals = removals
        self._health = health
        self._table = table
        self._went_off = went_off
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pie-object-write")
        self._buffer_bytes = buffer_bytes
        self._pack_bytes = pack_bytes
        self._clock = clock
        self._is_closed = False
        self._held_bytes = 0
        self._small: list[ObjectEntry] = []
        self._small_bytes = 0
        self._small_since_s = 0.0
        self._uploads: set[_Upload] = set()
        """Those whose pages are neither in the bucket nor given up."""
        self._later: list[_Upload] = []
        """Uploads that failed, or that the store takes no more of now."""
        self._under_way = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Payloads that are not in the bucket yet."""
        return self._held_bytes

    def add(self, entry: ObjectEntry, limit_s: float) -> bool:
        """Take a page, waiting for room in the buffer at most so long; False where there is none."""
        size = entry.header.raw_bytes

        def has_room() -> bool:
            return (
                self._is_closed
                or not self._held_bytes
                or self._held_bytes + size <= self._buffer_bytes
            )

        with self._changed:
            if not self._changed.wait_for(has_room, limit_s) or self._is_closed:
                return False
            self._held_bytes += size
            if size >= SMALL_BYTES:
                self._send(_Upload([entry]))
                return True
            if not self._small:
                self._small_since_s = self._clock()
            self._small.append(entry)
            self._small_bytes += size + FRAME_BYTES
            if self._small_bytes >= self._pack_bytes:
                self._send_small()
            return True

    def tick(self) -> None:
        """Do what is due: send small pages that have waited, try again, remove."""
        with self._changed:
            if self._small and self._clock() - self._small_since_s >= PACK_AGE_S:
                self._send_small()
            if len(self._removals) and self._health.takes_stores:
                self.start(self._remove_all)
            if self._later and self._health.takes_stores:
                later, self._later = self._later, []
                for upload in later:
                    self._send(upload)

    def settle(self, limit_s: float) -> bool:
        """Finish what is under way, as far as the limit lasts, and say whether there was anything.

        Afterwards what was removed takes no bytes any more.
        """
        until_s = self._clock() + limit_s
        with self._changed:
            if not (self._under_way or len(self._removals) or self._small):
                return False
            if self._small:
                self._send_small()
            asked = -1
            while True:
                # What ends may leave more to remove; what is refused is not asked for again.
                left = len(self._removals)
                if left and not self._under_way and left != asked:
                    asked = left
                    if self._health.takes_stores:
                        self.start(self._remove_all)
                left_s = until_s - self._clock()
                if not self._under_way or left_s <= 0:
                    return True
                self._changed.wait(left_s)

    def close(self, limit_s: float) -> None:
        """Send what waits, within the limit; what may not be there then is lost and counted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.settle(limit_s)
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            left, self._uploads = self._uploads, set()
            self._later = []
        for upload in left:
            self._lose(upload.entries)

    def check(self) -> None:
        """Assert that the sums are right."""
        with self._changed:
            assert self._held_bytes >= 0

    def start(self, work: Callable[[], None]) -> None:
        """Let a thread do something beside the others; `settle` waits for it too."""

        def run() -> None:
            try:
                work()
            except Exception:
                log.exception("an object could not be written")
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()

        with self._changed, contextlib.suppress(RuntimeError):  # Closed.
            self._threads.submit(run)
            self._under_way += 1

    def wait_for(self, work: Callable[[], None], limit_s: float) -> None:
        """Let a thread do something, and wait for its end at most so long."""
        ended = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                ended.set()

        self.start(run)
        ended.wait(limit_s)

    def _send_small(self) -> None:
        entries, self._small = self._small, []
        self._small_bytes = 0
        self._send(_Upload(entries, is_pack=True))

    def _send(self, upload: _Upload) -> None:
        self._uploads.add(upload)
        if self._health.takes_stores:
            self.start(lambda: self._upload(upload))
        else:
            self._later.append(upload)

    def _upload(self, upload: _Upload) -> None:
        upload.attempts += 1
        try:
            if upload.is_pack:
                self._upload_pack(upload.entries)
            else:
                self._upload_page(upload.entries[0])
        except ObjectStoreError as error:
            self._failed(error, "store")
            if upload.attempts < _MOST_ATTEMPTS or self._health.is_off:
                with self._changed:
                    self._later.append(upload)
                return
            self._drop(upload)
            return
        except BaseException:
            self._drop(upload)
            raise
        self._release(upload)

    def _upload_page(self, entry: ObjectEntry) -> None:
        room = entry.room
        if not self._table.wants(entry) or room is None:
            return
        page = self._pages.seal(entry.header, room)
        name = entry.own_name
        with self._removals.alone(name):
            with self._removals.before(name) as is_there:
                if is_there:
                    self._store.remove([name])
                    self._removed(1)
            there = self._put_page(name, page)
            if there is not None:
                self._table.wrote_page(entry, *there)
        if there is None:
            log.warning("%s is taken by what is no page of this cluster", name)
            self._lose([entry])

    def _put_page(self, name: str, page: SealedPage) -> tuple[PageHeader, int] | None:
        """Send a page file, and return what is there then, whose size it has; None if it is strange.

        Another node may have been first. What it computed may have other bits.
        """
        for _ in range(_MOST_ATTEMPTS):
            if self._store.put(name, page.data):
                self._sent(len(page.data))
                return page.header, len(page.data)
            found = self._store.get_start(name, HEAD_BYTES)
            if found is None:
                continue
            self._health.worked("store")
            if self._pages.is_locked_page(found, page.header):
                # Nobody may ever read it again. What another node puts there first is this page too.
                self._store.remove([name])
                self._removed(1)
                self._table.replaced_locked(name)
                continue
            with self._changed:
                self.counters.lost_races += 1
            return self._pages.header_of(found, page.header)
        raise ObjectStoreError(StoreFailure.STRANGE, f"{name} is there and is not there")

    def _upload_pack(self, entries: list[ObjectEntry]) -> None:
        wanted = [(entry, entry.room) for entry in entries if self._table.wants(entry)]
        files = [
            (entry, self._pages.seal(entry.header, room))
            for entry, room in wanted
            if room is not None
        ]
        if files:
            with self.pack_sent([page for _, page in files]) as (pack, homes):
                placed = [
                    Placed(entry, home) for (entry, _), home in zip(files, homes, strict=True)
                ]
                self._table.wrote_pack(pack, placed)

    @contextlib.contextmanager
    def pack_sent(
        self, files: Sequence[SealedPage], *, before: ObjectPack | None = None
    ) -> Iterator[SentPack]:
        """Make a pack of page files; inside, the table is told of it.

        Args:
            files: The pages.
            before: The name sorts before that of this pack, whose pages these were.

        Raises:
            ObjectStoreError: It may not be there; a later look at the bucket finds it if it is.
        """
        now_ns = time.time_ns()
        made = self._pages.pack(files, now_ns)
        chance = os.urandom(8)
        if before is None:
            name = pack_name(now_ns, chance, made.tail_bytes)
        else:
            name = earlier_pack_name(before.name, chance, made.tail_bytes)
        pack = ObjectPack(name, len(made.data))
        homes = []
        at = 0
        for length in made.lengths:
            homes.append(ObjectHome(length, at, pack))
            at += length
        with self._removals.alone(name):
            # Where one of that name is there, an answer was lost: nobody else has it by chance.
            self._store.put(name, made.data)
            self._sent(pack.size)
            yield SentPack(pack, homes)

    def _sent(self, size: int) -> None:
        self._health.worked("store")
        with self._changed:
            self.counters.objects += 1
            self.counters.written_bytes += size

    def _release(self, upload: _Upload) -> None:
        """Give back what an upload held of the buffer, and claims that nothing was made of."""
        for entry in upload.entries:
            if entry.claim is not None:
                entry.claim.close()
                entry.claim = None
        with self._changed:
            self._uploads.discard(upload)
            self._held_bytes -= upload.bytes
            self._changed.notify_all()

    def _drop(self, upload: _Upload) -> None:
        self._lose(upload.entries)
        self._release(upload)

    def _lose(self, entries: Sequence[ObjectEntry]) -> None:
        with self._changed:
            self.counters.dropped += sum(map(self._table.wants, entries))
        for entry in entries:
            self._table.dropped(entry)

    def _failed(self, error: ObjectStoreError, doing: str) -> None:
        if self._health.failed(error, doing):
            self._went_off()

    def _remove_all(self) -> None:
        while not self._health.is_off:
            try:
                with self._removals.due(_MOST_REMOVED) as some:
                    if not some:
                        return
                    self._store.remove(list(some))
            except ObjectStoreError as error:
                self._failed(error, "remove")
                return
            self._removed(len(some))

    def _removed(self, count: int) -> None:
        with self._changed:
            self.counters.removed += count
            self.counters.remove_requests += 1
