"""A worker's tiers below device memory: host memory, and disk below it.

Covers which pages lie there, storing them and lending them, and what an earlier start left on
disk. Does not cover when pages move (`pie.worker.offload`) or how a tier keeps them (`pie.pool`).
Thread-safe.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from pie.index.contract import IndexWriter
from pie.page.columns import PageMasks
from pie.page.errors import BadPageReason
from pie.page.events import PageEntry, Part, PartMask, PlaceId, Tier as TierKind, part_bit
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.policies.manager import RetentionManager
from pie.policies.retention import RetentionPolicy
from pie.policies.victims import ManagerCounts
from pie.pool.cache import Level, Loan, TieredCache
from pie.pool.checksum import Checksum
from pie.pool.copying import copy_payload
from pie.pool.disk import DiskTier
from pie.pool.errors import FolderInUseError, NoArenaError
from pie.pool.files import Files
from pie.pool.mover import Mover
from pie.pool.ram import RamTier
from pie.pool.sealing import Sealing, SealingCounters
from pie.pool.settings import Compression
from pie.pool.side_threads import within
from pie.pool.tier import PageId, StoredPage, id_of
from pie.worker.batch import PageSlot
from pie.worker.in_pool import InPool
from pie.worker.load_choice import LoadTier, Run
from pie.worker.page_copies import CopiedPart, PageCopies, Piece
from pie.worker.page_table import FrozenPage

log = logging.getLogger("pie.worker.lower_tiers")

_LOCK_TIMEOUT_S = 10.0
"""How long a process that was told to end, or is being killed, may still hold the folder."""
_CLOSE_S = 10.0
"""How long closing waits for what a disk is doing."""
_LAST_PAGE_S = 1.0
"""How long saving may take beyond its time: the page under way."""
_HIT = LookupStatus.HIT
_NAMES = {TierKind.HOST: LoadTier.HOST, TierKind.DISK: LoadTier.DISK}


class LowerTiers:
    """The tiers of one worker, as one store.

    Args:
        levels: Host memory, disk, or both in this order; at least one.
        copies: What names this worker's pages.
        index: Told what comes and goes, from any thread.
    """

    def __init__(
        self, levels: Sequence[Level], copies: PageCopies, *, index: IndexWriter | None = None
    ) -> None:
        self._tiers = [level.tier for level in levels]
        self._copies = copies
        self._cache = TieredCache(levels, index=index)
        self._mover = Mover(self._cache)
        self._disk: DiskTier | None = None
        self._parts = copies.names.layout.parts
        self._every = _mask(self._parts)
        self._has_host = self._tiers[0].kind is TierKind.HOST
        self.stored = 0
        """Pages that were copied here on their way, before they had to leave."""
        self.copied_late = 0
        """Pages that were copied here when they had to leave."""
        self.lost = 0
        """Pages that left device memory for nowhere: no room here, and the pool did not take them."""
        self.in_pool = InPool()
        """What the pool has besides: it may leave here and is not lost."""

    @property
    def _has_disk(self) -> bool:
        """Whether the disk takes what leaves host memory, so that eviction may wait for it."""
        if self._disk is None:
            return self._cache.is_tiered
        return self._disk.folder_states()["ok"] > 0

    @property
    def kinds(self) -> list[TierKind]:
        """Which tiers there are, the nearest first."""
        return self._cache.tiers

    def start(self, disk: DiskTier | None = None) -> None:
        """Take on what `disk`, which is open, holds of this model, and begin to move pages."""
        self._disk = disk
        if disk is not None:
            root = self._copies.names.model_root
            for header in list(disk.pages()):
                if header.model_root != root:
                    disk.discard(id_of(header), BadPageReason.OTHER_MODEL)
        self._cache.adopt()
        self._mover.start()

    def on_lost(self) -> None:
        """Learn that a tier has lost pages by itself."""
        self._mover.reconcile_soon()

    def tier_of(self, key: PageKey, parts: Sequence[Part]) -> LoadTier | None:
        """Return the lowest tier that has parts of a page; None where some are nowhere.

        That is the pool where they are not all here, and it took them.
        """
        tier = self._tier_here(key, parts)
        if tier is None and self.in_pool.has(key, parts):
            return LoadTier.POOL
        return tier

    def _tier_here(self, key: PageKey, parts: Sequence[Part]) -> LoadTier | None:
        """Return the lowest of these tiers that parts of a page are to be loaded from."""
        pages = [PageId(key, part) for part in parts]
        for tier in self._tiers:
            pages = [page for page in pages if tier.lookup(page) is not _HIT]
            if not pages:
                return _NAMES[tier.kind]
        return None

    def runs(self, keys: Sequence[PageKey], *, held: int) -> list[Run]:
        """Return the longest leading run of `keys` that can be used from here, tier by tier.

        Args:
            keys: Pages wanted, after `held` pages that device memory holds.
            held: Pages of the sequence before them.
        """
        layout = self._copies.names.layout
        masks = [self._every] * held
        tiers: list[LoadTier] = []
        for key in keys:
            # Not every page has a snapshot of recurrent layers: only a run's last one needs it.
            tier = self._tier_here(key, layout.attention_parts)
            if tier is None:
                break
            tiers.append(tier)
            has_all = Part.STATE not in self._parts or self._tier_here(key, (Part.STATE,))
            masks.append(self._every if has_all else _mask(set(self._parts) - {Part.STATE}))
        usable = max(0, layout.usable(masks) - held)
        if usable and Part.STATE in self._parts:
            last = self._tier_here(keys[usable - 1], self._parts)
            if last is None:
                return []  # It left just now.
            tiers[usable - 1] = last
            if not layout.attention_parts:
                # Nothing of the pages before the snapshot is loaded.
                tiers[:usable] = [last] * usable
        runs: list[Run] = []
        for tier in tiers[:usable]:
            if runs and runs[-1].tier is tier:
                runs[-1] = Run(tier, runs[-1].pages + 1)
            else:
                runs.append(Run(tier, 1))
        return runs

    def expect(self, pages: Sequence[PageId]) -> None:
        """Prepare for loads of pages, in that order."""
        self._cache.expect(pages)

    def load(self, pieces: Sequence[Piece], write: Callable[[Sequence[StoredPage]], bool]) -> bool:
        """Lend the parts of a page to `write`, all of them or none; return what that says."""
        loans: list[Loan] = []
        try:
            for piece in pieces:
                loan = self._cache.prepare_load(piece.page)
                if not isinstance(loan, Loan):
                    return False
                loans.append(loan)
                if not self._copies.fits(loan.page):
                    break
            else:
                return write([loan.page for loan in loans])
        finally:
            for loan in loans:
                self._cache.complete_load(loan)
        self._discard(pieces[len(loans) - 1].page)
        return False

    def put(self, page: Sequence[CopiedPart]) -> bool:
        """Store all parts of a page; say whether they are here. May wait for the disk."""
        # A page that device memory still holds must not displace one that nothing else holds.
        may_evict = self._has_disk or not self._has_host
        missing = [part for part in page if self._cache.lookup(id_of(part[0])) is not _HIT]
        kept = all(self._put(part, may_evict=may_evict) for part in missing)
        self.stored += kept and bool(missing)
        return kept

    def has(self, page: PageId) -> bool:
        """Say whether a part of a page is here."""
        return self._cache.lookup(page) is _HIT

    def has_host_room(self, size: int) -> bool:
        """Say whether host memory takes so many bytes more without letting anything go."""
        host = self._tiers[0]
        return self._has_host and host.used_bytes + size <= host.budget_bytes

    def put_ahead(self, parts: Sequence[CopiedPart]) -> int:
        """Store parts of pages in host memory while it has room; return how many are here."""
        count = 0
        while count < len(parts) and self._put(parts[count], may_evict=False):
            count += 1
        return count

    def put_fetched(self, page: Sequence[CopiedPart]) -> bool:
        """Store parts of a page that an order brought; others leave for them where there is no room."""
        return all(self._put(part, may_evict=True) for part in page)

    def remove(self, keys: Sequence[PageKey]) -> None:
        """Let go of pages that nobody is loading. May wait for the disk."""
        for key in keys:
            for part in self._parts:
                self._cache.remove(PageId(key, part))

    def demote(self, victims: Sequence[tuple[PageSlot, FrozenPage]], parts: Sequence[Part]) -> None:
        """Copy parts of pages that leave device memory, where host memory has room for them.

        Never waits for the disk, since a step waits for it: 0.15 ms for a page of 360 KiB, of which
        0.12 ms are its checksums. What goes wrong is logged and costs the page.
        """
        for slot, page in victims:
            where = self.tier_of(page.key, parts)
            if where is not None and where is not LoadTier.POOL:
                for part in parts:
                    self._cache.used_above(PageId(page.key, part))
                continue
            if self._has_room_now(parts) and self._copy_now(slot, page, parts):
                self.copied_late += 1
            elif where is None:
                self.lost += 1

    def keep(self, uses: Mapping[PageId, int]) -> None:
        """Count uses of pages in device memory that are to outlive a restart, and have them on disk. Waits for nothing.

        With how often each was used there, where that is why; 0 where it is not.
        """
        self._mover.keep_soon(uses)

    def entries(self) -> list[PageEntry]:
        """Return what the index should know."""
        return self._cache.entries()

    def masks(self) -> PageMasks:
        """Return what the index should know, as columns."""
        return self._cache.masks()

    @property
    def policy_counts(self) -> ManagerCounts:
        """What was seen of the retention policies of these tiers."""
        return self._cache.policy_counts

    def figures(self) -> dict[str, object]:
        """Return the fields of `WorkerStatus` that tell of these tiers."""
        counters, disk, bad = self._cache.counters, self._disk, self._cache.bad_pages
        sealed = SealingCounters() if disk is None else disk.sealing.counters
        return {
            "tier_pages": self._cache.pages_by_tier(),
            "tier_used_bytes": self._cache.bytes_by_tier(),
            "tier_budget_bytes": self._cache.budgets_by_tier(),
            "tier_bad_pages": {"at_store": bad.at_store, "at_load": bad.at_load},
            "pages_written_behind": self.stored,
            "pages_copied_late": self.copied_late,
            "pages_lost": self.lost,
            "pages_demoted": counters.demoted,
            "pages_promoted": counters.promoted,
            "pages_tier_evicted": counters.evicted,
            "disk_folders": {} if disk is None else dict(disk.folder_states()),
            "disk_errors": {} if disk is None else dict(disk.errors),
            "disk_bad_pages": {} if disk is None else dict(disk.bad_by_reason),
            "disk_raw_bytes": sealed.raw_bytes,
            "disk_packed_bytes": sealed.packed_bytes,
            "disk_opened_bytes": sealed.opened_bytes,
            "disk_packed_pages": {} if disk is None else dict(disk.sealing.pages_by_codec),
            "disk_seal_s": sealed.seal_s,
            "disk_open_s": sealed.open_s,
            "disk_locked_pages": sealed.locked,
        }

    def replace_policies(self, new_policy: Callable[[], RetentionPolicy]) -> None:
        """Let other policies choose victims, one for each tier."""
        self._cache.replace_policies(new_policy)
        self._mover.preload()

    def save(self, until_s: float) -> None:
        """Copy what only host memory holds to disk, until the monotonic clock says `until_s`."""
        limit_s = until_s - time.monotonic() + _LAST_PAGE_S
        if not within(limit_s, "pie-save", lambda: self._cache.save(until_s)):
            log.warning("a page is not on disk yet; no more are saved")

    def stop_moving(self, limit_s: float = _CLOSE_S) -> bool:
        """Move no more pages between the tiers, for good; say whether that ended within `limit_s`."""
        return self._mover.close(limit_s)

    def close(self, limit_s: float = _CLOSE_S) -> None:
        """Let go of memory and files; what is on disk stays there.

        Each of the mover and the tiers is left behind after `limit_s`.
        """
        self.stop_moving(limit_s)
        if not self._cache.close(limit_s):
            log.warning("the lower tiers do not close within %g s and are left behind", limit_s)

    def check(self) -> None:
        """Assert that all tables agree. Only while nobody moves pages, the mover included."""
        self._cache.check()

    def _copy_now(self, slot: PageSlot, page: FrozenPage, parts: Sequence[Part]) -> bool:
        # Where the disk takes nothing, what leaves host memory for this page just goes.
        may_evict = not self._has_disk
        try:
            copied = self._copies.copy(slot, page, parts)
            return all(self._put(part, may_evict=may_evict, may_demote=False) for part in copied)
        except Exception:
            log.exception("a page that leaves device memory could not be copied")
            return False

    def _has_room_now(self, parts: Sequence[Part]) -> bool:
        """Say whether `_copy_now` may find room for these parts of a page."""
        if not self._has_host:
            return False
        layout = self._copies.names.layout
        return not self._has_disk or self.has_host_room(sum(map(layout.part_bytes, parts)))

    def _put(self, part: CopiedPart, *, may_evict: bool, may_demote: bool = True) -> bool:
        header, payload = part
        room = self._cache.prepare_store(header, may_evict=may_evict, may_demote=may_demote)
        if not isinstance(room, memoryview):
            return room is _HIT
        copied = False
        try:
            copy_payload(room, payload)
            copied = True
        finally:
            good = self._cache.complete_store(id_of(header), success=copied)
        return good

    def _discard(self, page: PageId) -> None:
        """Take a page away that is not one of this model's."""
        if self._disk is not None:
            self._disk.discard(page, BadPageReason.OTHER_MODEL)
        self._cache.remove(page)


def open_tiers(
    place: PlaceId,
    copies: PageCopies,
    *,
    host_bytes: int,
    disk_bytes: int,
    disk_path: Path,
    keep_bad_pages: bool = False,
    compression: Compression = Compression.NONE,
    secret: bytes | None = None,
    encryption_keys: Sequence[bytes] = (),
    retention: Callable[[], RetentionPolicy] | None = None,
    index: IndexWriter | None = None,
    files: Files | None = None,
    lock_timeout_s: float = _LOCK_TIMEOUT_S,
) -> LowerTiers | None:
    """Open a worker's tiers, and find what an earlier start left on disk; None where all are off.

    A tier that cannot be had is off, with a line in the log: serving goes on.
    """
    levels: list[Level] = []

    def manager(name: str) -> RetentionManager:
        return RetentionManager(None if retention is None else retention(), name=f"{place} {name}")

    if host_bytes:
        try:
            host = RamTier(host_bytes, kind=TierKind.HOST, checksum=Checksum(secret))
        except NoArenaError as error:
            log.warning("%s: its host tier is off: %s", place, error)
        else:
            levels.append(Level(host, manager("host")))
    opened: list[LowerTiers] = []

    def on_lost() -> None:
        for tiers in opened:
            tiers.on_lost()

    disk: DiskTier | None = None
    if disk_bytes:
        disk = DiskTier(
            [disk_path.expanduser() / quote(place, safe="")],
            disk_bytes,
            kind=TierKind.DISK,
            sealing=Sealing(
                secret, compression=compression, keys=encryption_keys, name=f"{place} disk"
            ),
            keep_bad_pages=keep_bad_pages,
            on_lost=on_lost,
            files=files,
        )
        levels.append(Level(disk, manager("disk")))
        _open_disk(disk, place, lock_timeout_s)
    if not levels:
        return None
    tiers = LowerTiers(levels, copies, index=index)
    opened.append(tiers)
    tiers.start(disk)
    return tiers


def _open_disk(disk: DiskTier, place: PlaceId, lock_timeout_s: float) -> None:
    """Open a tier, or leave it closed and off."""
    began_s = time.monotonic()
    try:
        disk.open(lock_timeout_s)
    except FolderInUseError as error:
        log.warning("%s: its disk tier is off: %s", place, error)
        disk.turn_off(OSError(errno.EBUSY, str(error)))
    else:
        found = sum(1 for _ in disk.pages())
        log.info("%s found %d pages on disk in %.1f s", place, found, time.monotonic() - began_s)


def _mask(parts: Iterable[Part]) -> PartMask:
    """Return the mask of a page that has these parts."""
    mask = 0
    for part in parts:
        mask |= part_bit(part, TierKind.HOST)
    return PartMask(mask)
