"""The object tier: pages in a bucket of any store that speaks S3, which outlive the node.

Covers the two-phase verbs, pins, checks, what the bucket holds already and what the tier does while
the store does not answer. Does not cover requests (`pie.pool.object_store`), how pages are sent
(`pie.pool.object_writer`) or fetched (`pie.pool.object_reader`), or what leaves when the tier is full
(`pie.pool.cache`).

A payload that was stored is readable from memory until it is in the bucket. A loan is a copy of its
own, fetched and checked for whoever asked. Nodes may share a bucket and a prefix: names stand for
content, so whoever writes a page first writes it for all, and each node looks at the bucket from
time to time for what others have written or removed.

While the store is off all pages are misses but those in memory: the index is told, and told again
when the store is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from pie.page.columns import PageColumns
from pie.page.errors import BadPage
from pie.page.events import Tier as TierKind
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.checksum import Checksum
from pie.pool.errors import NotPreparedError
from pie.pool.folder import FRAME_BYTES
from pie.pool.object_catalogue import Catalogue
from pie.pool.object_compaction import ObjectCompaction
from pie.pool.object_entry import LOCKED, MISSING, ObjectEntry, ObjectHome
from pie.pool.object_errors import NotAskedError, ObjectStoreError
from pie.pool.object_health import ObjectHealth, ObjectState
from pie.pool.object_keeper import ObjectKeeper
from pie.pool.object_lists import ObjectLists
from pie.pool.object_packs import Packs
from pie.pool.object_pages import ObjectPages
from pie.pool.object_reader import ObjectReader, Span
from pie.pool.object_removals import Removals
from pie.pool.object_store import ObjectStore
from pie.pool.object_table import ObjectTable
from pie.pool.object_writer import ObjectWriter, WriterCounters
from pie.pool.sealing import Sealing
from pie.pool.space import Claim, Space
from pie.pool.tier import BadPages, PageId, StoredPage, columns_of, id_of

log = logging.getLogger("pie.pool.object")

PACK_BYTES = 4 << 20
_LEAST_PACK_BYTES = 16 << 10
_SLACK_BYTES = 64 << 20
"""What was removed and is not gone yet may take so much, or a sixteenth of a small budget."""
_SPARE_LOOKS = 3
"""How long a pack stays that holds nothing but what others hold too: each node has seen these by then."""
_ROOM_ROUNDS = 4
_MOVES = 4
"""How often a page may move to another pack while one load tries to read it."""


class ObjectTier:
    """A `pie.pool.tier.Tier` in a bucket."""

    kind = TierKind.POOL_OBJECT

    def __init__(
        self,
        store: ObjectStore,
        budget_bytes: int,
        *,
        name: str = "the bucket",
        sealing: Sealing | None = None,
        threads: int = 8,
        timeout_s: float = 10.0,
        buffer_bytes: int = 64 << 20,
        look_s: float = 60.0,
        on_changed: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a tier, which is closed until `open`.

        Args:
            store: The bucket; the tier closes it.
            budget_bytes: Bytes that all objects may take together, those of other nodes included
                as far as they were seen.
            name: What log lines call it.
            sealing: How pages are packed, encrypted and keyed; not at all where None.
            threads: Requests of one kind at once.
            timeout_s: How long a load, or a store that finds the buffer full, waits at most.
            buffer_bytes: Payloads that may wait in memory until they are in the bucket.
            look_s: Seconds between two looks at what is in the bucket.
            on_changed: Called, on any thread, when pages have come or gone by themselves.
            clock: Seconds, going forward only.
        """
        self.budget_bytes = budget_bytes
        self.health = ObjectHealth(name, clock)
        self.bad_by_reason: Counter[str] = Counter()
        """Pages found bad or not at all, by reason, at a load."""
        self._name = name
        self._store = store
        self._timeout_s = timeout_s
        self._on_changed = on_changed or (lambda: None)
        self.sealing = sealing or Sealing()
        self._checksum = Checksum(self.sealing.secret)
        self._pages = ObjectPages(self.sealing)
        pack_bytes = min(PACK_BYTES, max(_LEAST_PACK_BYTES, budget_bytes // 16))
        # What is alive in a pack, half of it at most, must fit elsewhere before the pack can go.
        self._kept_back = pack_bytes * 5 // 8 + min(_SLACK_BYTES, budget_bytes // 16)
        self._space = Space(budget_bytes)
        self._lists = ObjectLists(store, self._pages, clock)
        self._removals = Removals(self._space)
        packs = Packs(self._space, self._removals, _SPARE_LOOKS * look_s, clock)
        self._table = ObjectTable(
            self._space, self._removals, packs, self._list, self._lists.add_left, self._changed
        )
        self._is_open = False
        self._bad_at_store = 0
        self._bad_at_load = 0
        self._looking = threading.Lock()
        self._reader = ObjectReader(store, threads, timeout_s, clock)
        self._writer = ObjectWriter(
            store,
            self._pages,
            self._removals,
            self.health,
            self._table,
            self._changed,
            threads=max(2, threads // 2),
            buffer_bytes=buffer_bytes,
            pack_bytes=pack_bytes,
            clock=clock,
        )
        self._compaction = ObjectCompaction(
            store, self._pages, self._space, self._writer, self._table, self._failed
        )
        self._catalogue = Catalogue(store, self._pages, self._lists, threads)
        self._keeper = ObjectKeeper(self, look_s, clock)

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects, stores in progress included, but for those about to be removed.

        With those it is never over the budget either.
        """
        return max(0, self._space.used_bytes - self._removals.bytes)

    @property
    def bad_pages(self) -> BadPages:
        """How many pages were found bad at a store or a load."""
        return BadPages(at_store=self._bad_at_store, at_load=self._bad_at_load)

    @property
    def written(self) -> WriterCounters:
        """What was written since the start."""
        return self._writer.counters

    @property
    def read_bytes(self) -> int:
        """What was read since the start."""
        return self._reader.read_bytes

    @property
    def buffered_bytes(self) -> int:
        """Payloads that are not in the bucket yet."""
        return self._writer.held_bytes

    def states(self) -> dict[str, int]:
        """Return 1 for the state that the store is in, and 0 for the others, by name."""
        state = self.health.state
        return {each.name.lower(): int(each is state) for each in ObjectState}

    def open(self) -> None:
        """Take the bucket into use and find what is in it.

        Where the store does not answer the tier is off, and finds it when it does.
        """
        with self._table.lock:
            self._is_open = True
        self._look("open")
        self._keeper.start()

    def lookup(self, page: PageId) -> LookupStatus:
        """Say what is known of a page, without pinning it."""
        entry = self._table.entries.get(page)
        if entry is None or not self._is_open:
            return LookupStatus.MISS
        if self.health.is_off and entry.status is LookupStatus.HIT and entry.room is None:
            return LookupStatus.MISS
        return entry.status

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page and return where its payload goes."""
        page = id_of(header)
        if (status := self._status_for_store(page)) is not LookupStatus.MISS:
            return status
        if not self._takes_stores():
            return LookupStatus.MISS
        claim = self._claim(header.raw_bytes + FRAME_BYTES)
        if claim is None:
            return LookupStatus.RETRY
        with self._table.lock:
            status = self._status_for_store(page)
            if self._is_open and status is LookupStatus.MISS:
                room = memoryview(bytearray(header.raw_bytes))
                self._table.entries[page] = ObjectEntry(
                    header, room=room, claim=claim, scan=self._table.scan
                )
                return room
        claim.close()
        return status

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back."""
        with self._table.lock:
            entry = self._table.entries.get(page)
            if entry is None or entry.status is not LookupStatus.PENDING or entry.is_completing:
                if not self._is_open:
                    return False
                raise NotPreparedError(f"nobody prepared a store of {page.key.hex()}")
            entry.is_completing = True
        assert entry.room is not None
        good = success and self._checksum.matches(entry.header, entry.room)
        with self._table.lock:
            self._bad_at_store += success and not good
            entry.is_completing = False
            if good and self._is_open:
                entry.status = LookupStatus.HIT
        if good and self._writer.add(entry, self._timeout_s):
            return True
        self._table.dropped(entry)
        if entry.claim is not None:
            entry.claim.close()
            entry.claim = None
        return False

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload, checked; a bad page is removed and is a `MISS`.

        Waits for the store no longer than the tier's time-out, and then is a `RETRY`.
        """
        with self._table.lock:
            status = self.lookup(page)
            entry = self._table.entries.get(page)
            if entry is None or status is not LookupStatus.HIT:
                return status
            entry.pins += 1
            header, room, home = entry.header, entry.room, entry.home
        if room is not None:
            return StoredPage(header, room.toreadonly())
        assert home is not None
        try:
            answer = self._fetch(entry, home)
        except BaseException:
            self._unpin(page, entry)
            raise
        if isinstance(answer, StoredPage):
            return StoredPage(answer.header, answer.payload.toreadonly())
        if isinstance(answer, str):
            self._found_bad(page, entry, answer)
        self._unpin(page, entry)
        return LookupStatus.RETRY if isinstance(answer, LookupStatus) else LookupStatus.MISS

    def complete_load(self, page: PageId) -> None:
        """End a loan: the pin goes."""
        with self._table.lock:
            entry = self._table.entries.get(page)
            if entry is None or not entry.pins:
                if not self._is_open:
                    return
                raise NotPreparedError(f"nobody holds a loan of {page.key.hex()}")
        self._unpin(page, entry)

    def expect(self, pages: Iterable[PageId]) -> None:
        """Begin to fetch pages that will be loaded soon, in that order."""
        if self.health.is_off or not self._is_open:
            return
        spans = []
        for page in pages:
            entry = self._table.entries.get(page)
            if entry is not None and entry.status is LookupStatus.HIT and entry.home is not None:
                spans.append(_span(entry, entry.home))
        self._reader.expect(spans)

    def remove(self, page: PageId) -> bool:
        """Remove a page unless it is pinned or being written; say whether it is gone."""
        with self._table.lock:
            entry = self._table.entries.get(page)
            if entry is None or not self._is_open:
                return entry is None
            if entry.pins or entry.status is not LookupStatus.HIT:
                return entry.status is LookupStatus.MISS and not entry.pins
            self._table.leave(page, entry)
        return True

    def keep_removed(self, limit_s: float) -> None:
        """Have a list say what has left packs; objects of one page go within moments by themselves."""
        if self._lists.has_left and self._takes_stores():
            self._writer.wait_for(self._write_list, limit_s)

    def pages(self) -> Iterator[PageHeader]:
        """List the readable pages as they were at some moment of the call, the oldest first."""
        with self._table.lock:
            entries = list(self._table.entries.items())
        return (entry.header for page, entry in entries if self.lookup(page) is LookupStatus.HIT)

    def columns(self) -> PageColumns:
        """Return the readable pages as they were at one moment of the call, each once."""
        return columns_of(self.pages())

    def flush(self, limit_s: float) -> None:
        """Wait until what was stored and removed is so in the bucket too, at most so long."""
        self._settle(limit_s)
        if self._lists.has_left and self.health.takes_stores:
            self._write_list()

    def close(self) -> None:
        """Send what waits, and let the bucket go. Loans stay valid until they end."""
        with self._table.lock:
            was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        self._keeper.close(self._timeout_s)
        self._writer.close(0.0 if self.health.is_off else self._timeout_s)
        if not self.health.is_off:
            self._write_list()
        self._reader.close()
        self._store.close()
        with self._table.lock:
            for page, entry in list(self._table.entries.items()):
                if entry.status is not LookupStatus.PENDING:
                    del self._table.entries[page]

    def check(self) -> None:
        """Assert that tables agree and that the cap holds."""
        assert 0 <= self._space.used_bytes <= self.budget_bytes
        self._table.check()
        self._removals.check()
        self._writer.check()

    def tick(self) -> None:
        """Do what is due: called by the keeper alone."""
        if self.health.begin_probe():
            error = None
            try:
                self._store.probe()
            except ObjectStoreError as failure:
                error = failure
            self.health.end_probe(error)
            if error is None:
                self._keeper.look_soon()
                self._changed()
        self._compact()
        self._writer.tick()
        self._reader.tick()
        if self._lists.is_due and self.health.takes_stores:
            self._write_list()
        if self._lists.has_many and self.health.takes_stores:
            self._merge_lists()

    def look(self) -> None:
        """Look at what is in the bucket: called by the keeper alone."""
        if not self.health.is_off:
            self._look("list")

    def _takes_stores(self) -> bool:
        return self._is_open and self.health.takes_stores

    def _status_for_store(self, page: PageId) -> LookupStatus:
        """Return what keeps a page from being stored; `MISS` where nothing does."""
        entry = self._table.entries.get(page)
        if entry is None:
            return LookupStatus.MISS
        # A page on its way out is gone in a moment.
        return self.lookup(page) or LookupStatus.PENDING

    def _claim(self, size: int) -> Claim | None:
        """Take the most bytes that a page may need; waits for all that is under way, if that helps."""
        limit = self.budget_bytes - self._kept_back
        for _ in range(_ROOM_ROUNDS):
            if self.used_bytes + size <= limit:
                claim = self._space.claim(size)
                if claim is not None:
                    return claim
            elif size > limit or not (self._table.make_room(size) or self._table.has_doomed):
                return None
            self._table.has_doomed = False
            self._settle(self._timeout_s)
        return None

    def _settle(self, limit_s: float) -> None:
        self._compact()
        self._writer.settle(limit_s)

    def _compact(self) -> None:
        for pack in self._table.take_half_dead():
            self._compaction.start(pack)

    def _fetch(self, entry: ObjectEntry, home: ObjectHome) -> StoredPage | LookupStatus | str:
        """Return a page, or a status that says why not, or what is wrong with the page."""
        for _ in range(_MOVES):
            try:
                data = self._reader.read(_span(entry, home))
            except NotAskedError:
                return LookupStatus.RETRY
            except ObjectStoreError as error:
                self._failed(error, "load")
                return LookupStatus.RETRY
            self.health.worked("load")
            if data is not None:
                try:
                    return self._pages.open(data, entry.header)
                except BadPage as error:
                    return error.reason.value
            if entry.home is home or entry.home is None:
                return MISSING
            home = entry.home
        return LookupStatus.RETRY

    def _changed(self) -> None:
        self._on_changed()

    def _failed(self, error: ObjectStoreError, doing: str) -> None:
        if self.health.failed(error, doing):
            self._changed()

    def _found_bad(self, page: PageId, entry: ObjectEntry, reason: str) -> None:
        with self._table.lock:
            if self._table.entries.get(page) is entry and entry.status is LookupStatus.HIT:
                entry.status = LookupStatus.MISS
                entry.bad = reason
                self.bad_by_reason[reason] += 1
                self._bad_at_load += reason not in {MISSING, LOCKED}

    def _unpin(self, page: PageId, entry: ObjectEntry) -> None:
        """End a loan, and take the page away if it was waiting for that."""
        with self._table.lock:
            entry.pins -= 1
            if entry.status is not LookupStatus.MISS or entry.pins or not self._is_open:
                return
            if entry.bad in {LOCKED, MISSING}:
                # Who has the key can read it; what is of that name now, another node has written.
                self._table.forget(page, entry)
            else:
                # A copy elsewhere may be good.
                self._table.leave(page, entry, with_copies=not entry.bad)

    def _look(self, doing: str) -> None:
        """Make the tables equal to what is in the bucket."""
        limit_bytes = self.budget_bytes - self._kept_back
        with self._looking:
            self._table.begin_look()
            try:
                look = self._catalogue.look(self._table.knows_page, self._table.knows_pack)
            except ObjectStoreError as error:
                self._failed(error, doing)
                return
            self.health.worked("list")
            came, gone = self._table.end_look(look, limit_bytes)
        if look.unread:
            self._keeper.look_soon()
        if self._space.used_bytes > limit_bytes:
            self._settle(self._timeout_s)
        if came or gone:
            log.info("%s: %d pages came and %d went by themselves", self._name, came, gone)
            self._changed()

    def _list(self, header: PageHeader, length: int) -> None:
        self._lists.add(header, length, self._pages.key_id)

    def _write_list(self) -> None:
        # A look reads lists and counts them.
        if not self._looking.acquire(timeout=self._timeout_s):
            return
        try:
            self._table.listed(self._lists.flush(self._space, self._table.knows_pack))
        except ObjectStoreError as error:
            self._failed(error, "store")
        finally:
            self._looking.release()

    def _merge_lists(self) -> None:
        with self._looking:
            before = self._lists.taken_bytes
            try:
                self._lists.merge(self._space, self._table.has_file, self._table.knows_pack)
            except ObjectStoreError as error:
                self._failed(error, "store")
            finally:
                self._table.listed(self._lists.taken_bytes - before)


def _span(entry: ObjectEntry, home: ObjectHome) -> Span:
    """Return which bytes of which object a page is."""
    if home.pack is None:
        return Span(entry.own_name, 0, home.length, is_whole=True)
    return Span(home.pack.name, home.start, home.length)
