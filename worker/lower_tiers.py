"""A worker's tiers below device memory: host memory, and disk below it.

Covers which pages lie there, storing them and lending them, and what an earlier start left on
disk. Does not cover when pages move (`pie.worker.offload`) or how a tier keeps them (`pie.pool`).
Thread-safe.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from pie.index.contract import IndexWriter
from pie.page.errors import BadPageReason
from pie.page.events import PageEntry, Part, PartMask, PlaceId, Tier as TierKind, part_bit
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.policies.manager import RetentionManager
from pie.policies.retention import RetentionPolicy
from pie.pool.cache import Level, Loan, TieredCache
from pie.pool.checksum import Checksum
from pie.pool.copying import copy_payload
from pie.pool.disk import DiskTier
from pie.pool.errors import FolderInUseError, NoArenaError
from pie.pool.files import Files
from pie.pool.mover import Mover
from pie.pool.ram import RamTier
from pie.pool.tier import PageId, StoredPage, id_of
from pie.worker.batch import PageSlot
from pie.worker.load_choice import LoadTier, Run
from pie.worker.page_copies import CopiedPart, PageCopies, Piece
from pie.worker.page_table import FrozenPage

log = logging.getLogger("pie.worker.lower_tiers")

_LOCK_TIMEOUT_S = 10.0
"""How long a process that was told to end, or is being killed, may still hold the folder."""
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
        """Pages that left device memory for nowhere, because there was no room here."""

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

    def lost_pages(self) -> None:
        """Learn that a tier has lost pages by itself."""
        self._mover.reconcile_soon()

    def tier_of(self, key: PageKey, parts: Sequence[Part]) -> LoadTier | None:
        """Return the lowest tier that parts of a page are to be loaded from; None where some are not here."""
        pages = [PageId(key, part) for part in parts]
        for tier in self._tiers:
            pages = [page for page in pages if tier.lookup(page) is not LookupStatus.HIT]
            if not pages:
                return _NAMES[tier.kind]
        return None

    def runs(self, keys: Sequence[PageKey], *, held: int) -> list[Run]:
        """Return the longest leading run of `keys` that can be used from here, tier by tier.

        Args:
            keys: Pages wanted, after `held` pages that device memory holds.
            held: Pages of the sequence before them.
        """
        masks = [self._every] * held
        tiers: list[LoadTier] = []
        for key in keys:
            # Not every page has a snapshot of recurrent layers: only a run's last one needs it.
            tier = self.tier_of(key, self._copies.names.layout.attention_parts)
            if tier is None:
                break
            tiers.append(tier)
            has_all = Part.STATE not in self._parts or self.tier_of(key, (Part.STATE,))
            masks.append(self._every if has_all else _mask(set(self._parts) - {Part.STATE}))
        usable = self._copies.names.layout.usable(masks) - held
        runs: list[Run] = []
        for tier in tiers[: max(usable, 0)]:
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
        kept = all(self._put(part, may_evict=may_evict) for part in page)
        self.stored += kept
        return kept

    def keep(self, victims: Sequence[tuple[PageSlot, FrozenPage]], parts: Sequence[Part]) -> None:
        """Copy parts of pages that leave device memory, where host memory has room for them.

        Never waits for the disk, since a step waits for it: 0.15 ms for a page of 360 KiB, of which
        0.12 ms are its checksums.
        """
        for slot, page in victims:
            if self.tier_of(page.key, parts) is not None:
                continue
            if self._has_room_now(parts) and self._put_now(self._copies.copy(slot, page, parts)):
                self.copied_late += 1
            else:
                self.lost += 1

    def entries(self) -> list[PageEntry]:
        """Return what the index should know."""
        return self._cache.entries()

    def figures(self) -> dict[str, object]:
        """Return the fields of `WorkerStatus` that tell of these tiers."""
        counters, disk, bad = self._cache.counters, self._disk, self._cache.bad_pages
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
        }

    def save(self, until_s: float) -> None:
        """Copy what only host memory holds to disk, until the monotonic clock says `until_s`."""
        self._cache.save(until_s)

    def close(self) -> None:
        """Let go of memory and files; what is on disk stays there."""
        self._mover.close()
        self._cache.close()

    def check(self) -> None:
        """Assert that all tables agree. Only while nobody moves pages."""
        self._cache.check()

    def _put_now(self, page: Sequence[CopiedPart]) -> bool:
        # Where there is no disk, what leaves host memory for this page just goes.
        may_evict = not self._has_disk
        return all(self._put(part, may_evict=may_evict) for part in page)

    def _has_room_now(self, parts: Sequence[Part]) -> bool:
        """Say whether `_put_now` may find room for these parts of a page."""
        if not self._has_host:
            return False
        host, layout = self._tiers[0], self._copies.names.layout
        size = sum(layout.part_bytes(part) for part in parts)
        return not self._has_disk or host.used_bytes + size <= host.budget_bytes

    def _put(self, part: CopiedPart, *, may_evict: bool) -> bool:
        header, payload = part
        room = self._cache.prepare_store(header, may_evict=may_evict)
        if not isinstance(room, memoryview):
            return room is LookupStatus.HIT
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
    secret: bytes | None = None,
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

    def lost() -> None:
        for tiers in opened:
            tiers.lost_pages()

    disk: DiskTier | None = None
    if disk_bytes:
        disk = DiskTier(
            [disk_path.expanduser() / quote(place, safe="")],
            disk_bytes,
            kind=TierKind.DISK,
            secret=secret,
            keep_bad_pages=keep_bad_pages,
            on_lost=lost,
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
