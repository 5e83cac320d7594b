"""Writing to a bucket behind those who store: page files, packs of small pages, removals.

Covers the buffer that payloads wait in, the threads that send them, what is tried again, and
removing many objects with one request. Does not cover which pages are readable (`pie.pool.object`).

A payload is readable from the buffer until it is in the bucket, so a store costs no wait while
there is room in the buffer. Requests for one name are made one after another: the removal of an
object never overtakes the next one of its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from pie.page.format import page_name
from pie.page.lookup import LookupStatus
from pie.pool.folder import FRAME_BYTES, SMALL_BYTES
from pie.pool.object_entry import ObjectEntry, ObjectHome, ObjectPack
from pie.pool.object_errors import ObjectStoreError
from pie.pool.object_health import ObjectHealth
from pie.pool.object_names import pack_name
from pie.pool.object_pages import ObjectPages, SealedPage
from pie.pool.object_store import ObjectStore
from pie.pool.space import Space
from pie.pool.tier import PageId, id_of

log = logging.getLogger("pie.pool.object")

PACK_AGE_S = 1.0
"""How long a small page waits at most for others to share an object with."""
_MOST_ATTEMPTS = 5
"""Of one upload, each of several requests; then its pages are lost."""
_MOST_REMOVED = 1000


class Table(Protocol):
    """What a writer tells the tier."""

    @property
    def entries(self) -> Mapping[PageId, ObjectEntry]:
        """Which pages are wanted."""
        ...

    def uploaded(self, entry: ObjectEntry, home: ObjectHome) -> bool:
        """Take in where a page lies now; False where nobody wants it any more."""
        ...

    def dropped(self, entry: ObjectEntry) -> None:
        """Take in that a page could not be kept."""
        ...


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


@dataclass(slots=True)
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
        space: Space,
        health: ObjectHealth,
        table: Table,
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
            space: What bytes are taken from.
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
        self._space = space
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
        self._later: list[_Upload] = []
        """Uploads that failed, or that the store takes no more of now."""
        self._leaving: dict[str, int] = {}
        """Names that are to be removed, each with the bytes that it takes."""
        self._leaving_bytes = 0
        self._busy: set[str] = set()
        """Names that a request is about now."""
        self._under_way = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Payloads that are not in the bucket yet."""
        return self._held_bytes

    @property
    def leaving_bytes(self) -> int:
        """Bytes in the bucket that nobody wants any more and that are about to go."""
        return self._leaving_bytes

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

    def remove(self, name: str, size: int) -> None:
        """Remove an object soon, together with others."""
        with self._changed:
            self._leaving[name] = self._leaving.get(name, 0) + size
            self._leaving_bytes += size
            if len(self._leaving) >= _MOST_REMOVED:
                self.start(self._remove_some)

    def is_leaving(self, name: str) -> bool:
        """Say whether an object is about to go, or something else is done about it now."""
        return name in self._leaving or name in self._busy

    def free(self, home: ObjectHome, name: str) -> None:
        """Give up a page's bytes in the bucket: its object, or its slot of a pack."""
        if home.pack is None:
            self.remove(name, home.length)
            return
        with self._changed:
            home.pack.free(home.length)
            self.retire(home.pack)

    def tick(self) -> None:
        """Do what is due: send small pages that have waited, try again, remove."""
        with self._changed:
            if self._small and self._clock() - self._small_since_s >= PACK_AGE_S:
                self._send_small()
            if self._leaving and self._health.takes_stores:
                self.start(self._remove_some)
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
            if not (self._under_way or self._leaving or self._small):
                return False
            if self._small:
                self._send_small()
            asked = -1
            while True:
                # What ends may leave more to remove; what is refused is not asked for again.
                if self._leaving and not self._under_way and len(self._leaving) != asked:
                    asked = len(self._leaving)
                    if self._health.takes_stores:
                        self.start(self._remove_some)
                left_s = until_s - self._clock()
                if not self._under_way or left_s <= 0:
                    return True
                self._changed.wait(left_s)

    def close(self, limit_s: float) -> None:
        """Send what waits, within the limit; what is left is lost and counted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.settle(limit_s)
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            left, self._later = self._later, []
        for upload in left:
            self._drop(upload)

    def check(self) -> None:
        """Assert that the sums are right."""
        with self._changed:
            assert self._held_bytes >= 0
            assert self._leaving_bytes >= sum(self._leaving.values())
            assert (self._under_way > 0) or self._leaving_bytes == sum(self._leaving.values())

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

    def _send_small(self) -> None:
        entries, self._small = self._small, []
        self._small_bytes = 0
        self._send(_Upload(entries, is_pack=True))

    def _send(self, upload: _Upload) -> None:
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
        if not self._is_wanted(entry) or room is None:
            return
        data = self._pages.seal(entry.header, room).data
        name = name_of(entry)
        with self._alone(name):
            self._remove_before(name)
            if not self._store.put(name, data):
                self.counters.lost_races += 1
        self._sent(len(data))
        home = ObjectHome(len(data))
        self._settle_claim(entry, len(data))
        if not self._table.uploaded(entry, home):
            self.free(home, name)

    def _upload_pack(self, entries: list[ObjectEntry]) -> None:
        wanted = [(entry, entry.room) for entry in entries if self._is_wanted(entry)]
        files = [
            (entry, self._pages.seal(entry.header, room))
            for entry, room in wanted
            if room is not None
        ]
        if files:
            pack, homes = self.send_pack([page for _, page in files])
            tail_bytes = pack.size - sum(home.length for home in homes)
            for (entry, _), home in zip(files, homes, strict=True):
                self._settle_claim(entry, home.length + tail_bytes)
                tail_bytes = 0
            unwanted = [
                home
                for (entry, _), home in zip(files, homes, strict=True)
                if not self._table.uploaded(entry, home)
            ]
            for home in unwanted:
                self.free(home, pack.name)

    def send_pack(self, files: Sequence[SealedPage]) -> tuple[ObjectPack, list[ObjectHome]]:
        """Make a pack of page files, and return where in it they lie.

        Raises:
            ObjectStoreError: It is not there.
        """
        now_ns = time.time_ns()
        made = self._pages.pack(files, now_ns)
        pack = ObjectPack(pack_name(now_ns, os.urandom(8), made.tail_bytes), len(made.data))
        self._store.put(pack.name, made.data)
        self._sent(pack.size)
        homes = []
        at = 0
        for length in made.lengths:
            homes.append(ObjectHome(length, at, pack))
            pack.take(length)
            at += length
        return pack, homes

    def _sent(self, size: int) -> None:
        self._health.worked("store")
        with self._changed:
            self.counters.objects += 1
            self.counters.written_bytes += size

    def _settle_claim(self, entry: ObjectEntry, size: int) -> None:
        """Let the object have its bytes of what was claimed for the page."""
        claim = entry.claim
        if claim is not None:
            if not claim.spend(size):  # Never so far: a claim has room for any header.
                self._space.found(size)
            claim.close()
            entry.claim = None

    def _release(self, upload: _Upload) -> None:
        """Give back what an upload held of the buffer, and claims that nothing was made of."""
        for entry in upload.entries:
            if entry.claim is not None:
                entry.claim.close()
                entry.claim = None
        with self._changed:
            self._held_bytes -= upload.bytes
            self._changed.notify_all()

    def _drop(self, upload: _Upload) -> None:
        with self._changed:
            self.counters.dropped += sum(map(self._is_wanted, upload.entries))
        for entry in upload.entries:
            self._table.dropped(entry)
        self._release(upload)

    def _is_wanted(self, entry: ObjectEntry) -> bool:
        return (
            entry.status is LookupStatus.HIT
            and self._table.entries.get(id_of(entry.header)) is entry
        )

    def _failed(self, error: ObjectStoreError, doing: str) -> None:
        if self._health.failed(error, doing):
            self._went_off()

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Keep other requests from being about the same name."""
        with self._changed:
            # Whoever has it ends by the store's time-outs.
            self._changed.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()

    def _remove_before(self, name: str) -> None:
        """Remove an object that is to go before another one takes its name."""
        with self._changed:
            size = self._leaving.pop(name, None)
        if size is not None:
            try:
                self._store.remove([name])
            except ObjectStoreError:
                with self._changed:
                    self._leaving[name] = size
                raise
            self._removed({name: size})

    def _remove_some(self) -> None:
        with self._changed:
            some = {name: size for name, size in self._leaving.items() if name not in self._busy}
            some = dict(list(some.items())[:_MOST_REMOVED])
            if not some or self._health.is_off:
                return
            for name in some:
                del self._leaving[name]
            self._busy.update(some)
        try:
            self._store.remove(list(some))
        except ObjectStoreError as error:
            with self._changed:
                self._leaving.update(some)
            self._failed(error, "remove")
        else:
            self._removed(some)
        finally:
            with self._changed:
                self._busy.difference_update(some)

    def _removed(self, some: Mapping[str, int]) -> None:
        size = sum(some.values())
        self._space.give(size)
        with self._changed:
            self._leaving_bytes -= size
            self.counters.removed += len(some)
            self.counters.remove_requests += 1

    def retire(self, pack: ObjectPack) -> None:
        """Let a pack go, if nothing in it is alive."""
        if not pack.live_pages and not pack.is_leaving:
            pack.is_leaving = True
            self.remove(pack.name, pack.size)


def name_of(entry: ObjectEntry) -> str:
    """Return the name of a page's own object."""
    header = entry.header
    return page_name(header.model_root, header.key, header.part)
