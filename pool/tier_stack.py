"""The stack of tiers below a cache: what each is known to hold, and how a page gets from one to another.

Covers making room, eviction by the policy's word, demotion, and the record of what each tier holds,
which the index is told of. Does not cover the verbs of who uses the cache (`pie.pool.cache`).

Thread-safe. The lock guards tables only: hashing, copying and a tier's own I/O happen outside, so
what a tier holds can change between a verb and its record here. `Shelf.record` settles that.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence

from pie.index.contract import IndexWriter
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.policies.victims import HeldPage
from pie.pool.cache_counters import CacheCounters
from pie.pool.copying import copy_payload
from pie.pool.kept_uses import KeptUses
from pie.pool.shelf import Level, Shelf
from pie.pool.tier import PageId, StoredPage

_MAX_ROUNDS = 8
"""Evictions tried for one store. Each asks for twice the room of the one before: where the gaps
that victims leave do not join, the eighth asks for 128 times what is needed."""

_LEAVING_TIMEOUT_S = 1.0

_HIT = LookupStatus.HIT


class Loss(enum.Enum):
    """What may be lost for a page that gets room in a tier."""

    NOTHING = "nothing"
    """Only what another tier has too may leave."""
    BELOW = "below"
    """Victims must have gone to a lower tier, which lets go of its own for that where it is full."""
    VICTIMS = "victims"
    """What no lower tier takes is lost."""


class TierStack:
    """Tiers, the fastest first."""

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        index: IndexWriter | None,
        clock: Callable[[], float],
        uses: KeptUses,
    ) -> None:
        """Stack `levels`; the index is told what is stored and removed, from any thread."""
        self.counters = CacheCounters()
        self.tiers = [level.tier for level in levels]
        self.lock = threading.Lock()
        self.shelves = [Shelf(level, self.lock, index, clock, uses) for level in levels]
        self._clock = clock
        self._left = threading.Condition(self.lock)

    def room(
        self,
        at: int,
        header: PageHeader,
        *,
        may_lose: Loss = Loss.VICTIMS,
        may_demote: bool = True,
    ) -> memoryview | LookupStatus:
        """Prepare a store in one tier, making room for it as often as that helps."""
        tier = self.shelves[at].level.tier
        room = tier.prepare_store(header)
        if room is not LookupStatus.RETRY or header.raw_bytes > tier.budget_bytes:
            return room
        wanted = header.raw_bytes
        for _ in range(_MAX_ROUNDS):
            if not self.evict(at, wanted, may_lose=may_lose, may_demote=may_demote):
                break
            room = tier.prepare_store(header)
            if room is not LookupStatus.RETRY:
                break
            wanted *= 2
        return room

    def evict(
        self,
        at: int,
        wanted_bytes: int,
        *,
        may_lose: Loss = Loss.VICTIMS,
        may_demote: bool = True,
    ) -> int:
        """Let victims of about `wanted_bytes` leave a tier; return how many did.

        Unless it may lose them, it ends at the first one that no other tier has or takes. Unless
        it may demote them, it waits for nobody.
        """
        shelf = self.shelves[at]
        manager = shelf.level.manager
        with self.lock:
            victims = manager.victims(wanted_bytes, self._clock())
            if not victims and shelf.leaving:
                # Another thread has chosen all that may leave: its victims are ours too.
                return int(may_demote and self._left.wait(_LEAVING_TIMEOUT_S))
            for key, part in victims:
                manager.pin(key, part)
            shelf.leaving += len(victims)
        waiting = list(victims)
        gone = 0
        is_safe = True
        try:
            while waiting and (is_safe or may_lose is Loss.VICTIMS):
                page = PageId(*waiting[0])
                is_safe = (may_demote and self.demote(at, page, may_lose)) or self._is_above(
                    at, page
                )
                if (is_safe or may_lose is Loss.VICTIMS) and shelf.level.tier.remove(page):
                    gone += 1
                self.record(at, page)
                self._end_leaving(shelf, [waiting.pop(0)])
        finally:
            self._end_leaving(shelf, waiting)
        with self.lock:
            self.counters.evicted += gone
        return gone

    def _end_leaving(self, shelf: Shelf, victims: Sequence[HeldPage]) -> None:
        """Unpin victims, whether they left or not."""
        with self.lock:
            for key, part in victims:
                if shelf.level.manager.pins(key, part):
                    shelf.level.manager.unpin(key, part)
            shelf.leaving -= len(victims)
            self._left.notify_all()

    def _is_above(self, at: int, page: PageId) -> bool:
        return any(tier.lookup(page) is _HIT for tier in self.tiers[:at])

    def demote(self, at: int, page: PageId, may_lose: Loss = Loss.VICTIMS) -> bool:
        """Copy a page to the next lower tier that takes it; say whether one has it now."""
        below = range(at + 1, len(self.tiers))
        return any(self.bring(page, at, target, may_lose) for target in below)

    def bring(self, page: PageId, at: int, target: int, may_lose: Loss = Loss.VICTIMS) -> bool:
        """Copy a page to a lower tier that does not have it; say whether it has it now."""
        status = self.tiers[target].lookup(page)
        if status is not LookupStatus.MISS:
            return status is _HIT
        is_strict = may_lose is Loss.NOTHING
        header = self.copy(page, at, target, may_lose if is_strict else Loss.VICTIMS)
        if header is None:
            return False
        with self.lock:
            self.counters.demoted += 1
        self.record(target, page, header)
        return True

    def copy(self, page: PageId, source: int, target: int, may_lose: Loss) -> PageHeader | None:
        """Copy a page between tiers, and return its header if it is in the target now."""
        tier = self.tiers[source]
        stored = tier.prepare_load(page)
        if not isinstance(stored, StoredPage):
            self.record(source, page)
            return None
        try:
            room = self.room(target, stored.header, may_lose=may_lose)
            if not isinstance(room, memoryview):
                return None
            copied = False
            try:
                copy_payload(room, stored.payload)
                copied = True
            finally:
                good = self.tiers[target].complete_store(page, success=copied)
        finally:
            tier.complete_load(page)
        return stored.header if good else None

    def record(self, at: int, page: PageId, header: PageHeader | None = None) -> None:
        """Make the record of a page in one tier equal to what the tier says now.

        Args:
            at: The level.
            page: The page that may have come or gone.
            header: What to record where it has come.
        """
        self.shelves[at].record(page, header)
