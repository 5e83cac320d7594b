"""The disk tier: pages in files, which outlive the process.

Covers the two-phase verbs, pins, checks and what an earlier process left. Does not cover how pages
lie in a folder (`pie.pool.folder`), or what leaves when the tier is full (`pie.pool.cache`).

A payload waits in memory until its store is complete; then it is checked and written as a whole. A
loan is a map of the file, checked before it is lent, so that a warm page costs no read. Reading,
writing and hashing happen outside the lock. What the lock guards is one table: a page that leaves
keeps its place in the table until its file is gone, so that nobody writes the same name meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pie.page.columns import PageColumns
from pie.page.errors import BadPageReason
from pie.page.events import Tier as TierKind
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.checksum import Checksum
from pie.pool.compaction import Compaction
from pie.pool.disk_entry import MISSING, UNREADABLE, DiskEntry
from pie.pool.disk_table import DiskTable
from pie.pool.errors import NotPreparedError
from pie.pool.files import Files
from pie.pool.folder import FRAME_BYTES, Folder
from pie.pool.folders import Folders
from pie.pool.packs import PACK_BYTES
from pie.pool.sealing import Sealing
from pie.pool.settings import Durability
from pie.pool.space import Claim, Space
from pie.pool.staging import Staging
from pie.pool.tier import BadPages, PageId, StoredPage, id_of

log = logging.getLogger("pie.pool.disk")

_CLOSE_TIMEOUT_S = 10.0
_LEAST_PACK_BYTES = 64 << 10
_EXPECTED_BYTES = 16 << 20
"""Read ahead at most, of what will be loaded soon."""


class DiskTier:
    """A `pie.pool.tier.Tier` on disk; `kind` says whose."""

    def __init__(
        self,
        folders: Sequence[Path],
        budget_bytes: int,
        *,
        kind: TierKind = TierKind.POOL_DISK,
        sealing: Sealing | None = None,
        durability: Durability = Durability.BATCH,
        keep_bad_pages: bool = False,
        on_lost: Callable[[], None] | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a tier, which is closed until `open`.

        Args:
            folders: Where pages go, spread by key; no other process may use them.
            budget_bytes: Physical bytes that all that lies in them may take together.
            kind: `POOL_DISK` on a node, `DISK` on a worker.
            sealing: How page files are made and read; as they are, without a secret, where None.
            durability: When a page is on the disk for sure.
            keep_bad_pages: Set bad pages aside instead of removing them.
            on_lost: Called, on any thread, when a folder has stopped to answer and its pages are
                gone.
            files: Makes the system calls.
            clock: Seconds, going forward only.
        """
        self.kind = kind
        self.sealing = sealing or Sealing()
        self.budget_bytes = budget_bytes
        pack_bytes = min(PACK_BYTES, max(_LEAST_PACK_BYTES, budget_bytes // 16))
        # What is alive in a pack, half of it at most, must fit elsewhere before the pack can go.
        self._kept_back = pack_bytes * 5 // 8 + 4 * 4096
        self._space = Space(budget_bytes, self._kept_back)
        self._folders = Folders(
            Folder(
                path,
                self._space,
                files=files or Files(),
                sealing=self.sealing,
                durability=durability,
                keep_bad_pages=keep_bad_pages,
                pack_bytes=pack_bytes,
                failed=self._failed,
                clock=clock,
            )
            for path in folders
        )
        self._checksum = Checksum(self.sealing.secret)
        self._staging = Staging()
        self._on_lost = on_lost
        self._table = DiskTable()
        self._locked: dict[PageId, None] = {}
        """Pages whose key is not here, the oldest first: they stay until their room is needed."""
        self._stuck: dict[PageId, DiskEntry] = {}
        """Unreadable pages that their disk did not let go of."""
        self._bad_at_store = 0
        self._bad_at_load = 0
        self._is_open = False
        self._active = 0
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._compaction = Compaction(
            self._folders, self._space, self._table, self._lock, self._failed
        )

    @property
    def used_bytes(self) -> int:
        """Physical bytes of all that lies in the folders, stores in progress included."""
        return self._space.used_bytes

    @property
    def bad_pages(self) -> BadPages:
        """How many pages were found bad at a store or a load."""
        return BadPages(at_store=self._bad_at_store, at_load=self._bad_at_load)

    @property
    def bad_by_reason(self) -> Counter[str]:
        """How many pages were found bad or not at all, by reason, at the start or at a load."""
        return self._folders.bad_by_reason

    @property
    def errors(self) -> Counter[str]:
        """How often the disk refused something, by reason."""
        return self._folders.errors

    def folder_states(self) -> Counter[str]:
        """Return how many folders are in which state."""
        return self._folders.states()

    def open(self, lock_timeout_s: float = 0.0) -> None:
        """Take the folders into use and find what is in them, by headers alone.

        A folder that cannot be used is off, and the tier does without it. Where there is more than
        the budget allows, what was stored first goes.

        Raises:
            FolderInUseError: Another process uses a folder, and still does after `lock_timeout_s`.
        """
        for other in self._table.adopt_all(self._folders.open(lock_timeout_s)):
            self._take_away(other)
        for folder in self._folders:
            if folder.health.is_off:
                self._table.lose(folder)
        self._locked = dict.fromkeys(self._table.locked())
        self._shed()
        if bad := self.bad_by_reason:
            log.warning("bad pages on disk were taken away at the start: %s", dict(bad))
        with self._lock:
            self._is_open = True

    def turn_off(self, error: OSError) -> None:
        """Show all folders as off, because the tier that could not be opened stays closed."""
        for folder in self._folders:
            folder.health.failed(error, "open")

    def lookup(self, page: PageId) -> LookupStatus:
        """Say what is known of a page, without pinning it."""
        with self._lock:
            return self._table.status(page)

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page and return where its payload goes."""
        page = id_of(header)
        if self._stuck:
            self._take_stuck_away()
        if page in self._locked:
            self._drop_locked(page)
        status = self._status_for_store(page)
        if status is not LookupStatus.MISS:
            return status
        with self._busy() as is_open:
            claim = self._claim(header) if is_open else LookupStatus.MISS
        if not isinstance(claim, Claim):
            return claim
        room = self._staging.lend(header.raw_bytes)
        with self._lock:
            if self._is_open and page not in self._table:
                self._table.put(page, DiskEntry(header, room=room, claim=claim))
                return room
        claim.close()
        self._staging.give_back(room)
        return self._status_for_store(page)

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back."""
        with self._lock:
            entry = self._table.look(page)
            if entry is None or entry.status is not LookupStatus.PENDING or entry.is_completing:
                if not self._is_open:
                    return False
                raise NotPreparedError(f"nobody prepared a store of {page.key.hex()}")
            entry.is_completing = True
        assert entry.room is not None
        assert entry.claim is not None
        try:
            with self._busy() as is_open:
                good = success and self._checksum.matches(entry.header, entry.room)
                home = None
                if good and is_open:
                    home = self._folders.store(
                        entry.header, entry.room, entry.claim, self._kept_back, self._failed
                    )
        finally:
            self._staging.give_back(entry.room)
            entry.claim.close()
            entry.room = entry.claim = None
        with self._lock:
            self._bad_at_store += success and not good
            if home is not None:
                entry.home = home
                if self._is_open and not home.folder.health.is_off:
                    entry.status = LookupStatus.HIT
                    self._table.rest(page, entry)
                    return True
            self._table.remove(page)
            return False

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload, checked; a bad page is removed and is a `MISS`."""
        with self._lock:
            if (status := self._table.status(page)) is not LookupStatus.HIT:
                return status
            entry = self._table.wake(page)
            assert entry is not None
            entry.pins += 1
        with self._busy() as is_open:
            try:
                payload = self._folders.load(entry, self._failed) if is_open else LookupStatus.MISS
            except BaseException:
                self._unpin(page, entry)
                raise
            if isinstance(payload, memoryview):
                return StoredPage(entry.header, payload.toreadonly())
            if isinstance(payload, LookupStatus):
                self._unpin(page, entry)
                return payload
            with self._lock:
                if entry.status is LookupStatus.HIT:
                    entry.status = LookupStatus.MISS
                    entry.bad = payload
                    if entry.is_locked:
                        self._locked[page] = None
                    else:
                        self._count_bad(entry)
            self._unpin(page, entry)
        return LookupStatus.MISS

    def complete_load(self, page: PageId) -> None:
        """End a loan: the pin goes."""
        with self._lock:
            entry = self._table.look(page)
            if entry is None or not entry.pins:
                raise NotPreparedError(f"nobody holds a loan of {page.key.hex()}")
        self._unpin(page, entry)

    def expect(self, pages: Iterable[PageId]) -> None:
        """Let the disk begin to read pages that will be loaded soon, in that order."""
        left = _EXPECTED_BYTES
        for page in pages:
            with self._lock:
                entry = self._table.look(page)
            if entry is None or entry.home is None or entry.status is not LookupStatus.HIT:
                continue
            left -= entry.header.raw_bytes
            if left < 0:
                break
            entry.home.folder.expect(entry.header, entry.home)

    def remove(self, page: PageId) -> bool:
        """Remove a page unless it is pinned or being written; say whether it is gone."""
        return self._leave(page)

    def keep_removed(self, limit_s: float) -> None:
        """Do nothing: a file is gone, and a pack's list says what left, when `remove` returns."""

    def discard(self, page: PageId, reason: BadPageReason) -> bool:
        """Remove a page as a bad one, because its owner finds it so; say whether it is gone."""
        return self._leave(page, reason)

    def keep_uses(self, uses: Mapping[PageId, int]) -> None:
        """Keep how often pages were used, in place of what was kept before; not where there is no room."""
        with self._busy() as is_open:
            if is_open:
                self._folders.keep_uses(uses, self._failed)

    def kept_uses(self) -> dict[PageId, int]:
        """Return what was kept last; nothing where that is damaged."""
        return self._folders.kept_uses(self._failed)

    def _leave(self, page: PageId, reason: BadPageReason | None = None) -> bool:
        with self._lock:
            entry = self._table.look(page)
            if entry is None or not self._is_open:
                return entry is None
            if entry.pins or entry.status is not LookupStatus.HIT:
                # One that is on its way out is gone for all who ask.
                return entry.status is LookupStatus.MISS and not entry.pins
            self._table.wake(page, entry)
            entry.status = LookupStatus.MISS
            if reason is not None:
                entry.bad = reason.value
        with self._busy():
            if self._take_away(entry):
                if reason is not None:
                    self._count_bad(entry)
                self._forget(page, entry)
                self._compact_where_due(entry)
                return True
        with self._lock:
            entry.status, entry.bad = LookupStatus.HIT, ""
            self._table.rest(page, entry)
        return False

    def pages(self) -> Iterator[PageHeader]:
        """List the readable pages as they were at some moment of the call, the oldest first."""
        return self._table.headers(self._lock)

    def columns(self) -> PageColumns:
        """Return the readable pages as they were at one moment of the call, each once."""
        with self._lock:
            return self._table.columns()

    def close(self) -> None:
        """Wait for what is being written, bring it to the disk, and let the folders go.

        Loans stay valid until they end.
        """
        with self._lock:
            was_open, self._is_open = self._is_open, False
            self._quiet.wait_for(lambda: not self._active, _CLOSE_TIMEOUT_S)
            self._locked.clear()
            self._table.clear()
        if was_open:
            self._folders.close()

    def check(self) -> None:
        """Assert that tables agree and that the cap holds. Only while nobody uses the tier."""
        with self._lock:
            assert 0 <= self.used_bytes <= self.budget_bytes
            self._table.check()
            packed = self._table.packed()
            # What a folder that is off still has in its packs, nobody knows any more.
            if self._is_open and not self._folders.any_off:
                assert packed == sum(folder.packs.live_pages for folder in self._folders)
        for folder in self._folders:
            folder.packs.check()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[bool]:
        """Keep the folders from being let go of; gives whether the tier is open."""
        with self._lock:
            is_open = self._is_open
            self._active += 1
        try:
            yield is_open
        finally:
            with self._lock:
                self._active -= 1
                self._quiet.notify_all()

    def _status_for_store(self, page: PageId) -> LookupStatus:
        """Return what keeps a page from being stored; `MISS` where nothing does."""
        with self._lock:
            if page not in self._table:
                return LookupStatus.MISS
            # A page on its way out is gone in a moment.
            return self._table.status(page) or LookupStatus.PENDING

    def _claim(self, header: PageHeader) -> Claim | LookupStatus:
        """Take the most bytes that a page may need, new directories included."""
        folders = self._folders.takers()
        if not folders:
            return LookupStatus.MISS
        size = header.raw_bytes + FRAME_BYTES + 4 * max(f.block_bytes for f in folders)
        while not any(folder.has_room(size + self._kept_back) for folder in folders):
            if not self._drop_locked():
                return LookupStatus.RETRY
        claim = self._space.claim(size)
        while claim is None and (self._compaction.step() or self._drop_locked()):
            claim = self._space.claim(size)
        return LookupStatus.RETRY if claim is None else claim

    def _count_bad(self, entry: DiskEntry) -> None:
        assert entry.home is not None
        entry.home.folder.bad_pages[entry.bad] += 1
        self._bad_at_load += entry.bad not in {MISSING, UNREADABLE}

    def _unpin(self, page: PageId, entry: DiskEntry) -> None:
        """End a loan, and take the page away if it was waiting for that."""
        with self._lock:
            entry.pins -= 1
            if entry.status is not LookupStatus.MISS or entry.pins:
                self._table.rest(page, entry)
                return
            if not self._is_open:
                self._table.remove(page)
                return
            if entry.is_locked:
                return
        with self._busy() as is_open:
            # What the disk does not let go of stays in the table, as unreadable.
            if is_open and self._take_away(entry):
                self._forget(page, entry)
            elif is_open:
                self._stuck[page] = entry

    def _take_stuck_away(self) -> None:
        """Let pages go that a disk did not let go of before, where it works again."""
        for page, entry in list(self._stuck.items()):
            is_worth_a_try = entry.home is not None and entry.home.folder.health.takes_stores
            if is_worth_a_try and self._stuck.pop(page, None) is not None:
                if self._take_away(entry):
                    self._forget(page, entry)
                else:
                    self._stuck[page] = entry

    def _forget(self, page: PageId, entry: DiskEntry) -> None:
        with self._lock:
            # A folder that went off meanwhile took it along, and it may have come anew elsewhere.
            known = self._table.look(page)
            if known is entry or (known is not None and known.home == entry.home):
                self._table.remove(page)

    def _take_away(self, entry: DiskEntry) -> bool:
        """Remove a page from its folder; say whether it is gone."""
        home = entry.home
        assert home is not None
        if home.folder.health.is_off:
            return True
        try:
            if entry.bad_reason is not None:
                home.folder.discard(entry.header, home, entry.bad_reason)
            else:
                home.folder.remove(entry.header, home)
        except OSError as error:
            self._failed(home.folder, error, "remove")
            return home.folder.health.is_off
        return True

    def _failed(self, folder: Folder, error: OSError, doing: str) -> None:
        if error.errno == errno.ENOENT and doing != "load" and not folder.is_there:
            error = OSError(errno.ENODEV, "somebody has removed the folder")
        if not folder.health.failed(error, doing):
            return
        # All that lies there is lost; its bytes stay counted, because nobody can say.
        with self._lock:
            for page in self._table.lose(folder):
                self._locked.pop(page, None)
                self._stuck.pop(page, None)
        if self._on_lost is not None:
            self._on_lost()

    def _drop_locked(self, page: PageId | None = None) -> bool:
        """Let a page go whose key is not here, the oldest where none is named; say whether one did."""
        with self._lock:
            page = page or next(iter(self._locked), None)
            entry = None if page is None else self._table.look(page)
            if page is None or entry is None or not entry.is_locked:
                return False
            self._locked.pop(page, None)
            entry.bad = ""
        if not self._take_away(entry):
            return False
        self._forget(page, entry)
        self._compact_where_due(entry)
        return True

    def _shed(self) -> None:
        """Let pages go until the rest is within the budget: first locked ones, then the oldest."""
        while self._space.used_bytes > self.budget_bytes and self._drop_locked():
            pass
        for page in self._table.oldest():
            if self._space.used_bytes <= self.budget_bytes:
                break
            entry = self._table.look(page)
            if entry is not None and self._take_away(entry):
                self._forget(page, entry)
            while self._space.used_bytes > self.budget_bytes and self._compaction.step():
                pass

    def _compact_where_due(self, entry: DiskEntry) -> None:
        """Compact if the removal of a packed page has made its pack half dead."""
        slot = None if entry.home is None else entry.home.slot
        if slot is not None and slot.pack.is_half_dead and not slot.pack.is_deleted:
            self._compaction.step()
