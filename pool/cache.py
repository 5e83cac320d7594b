"""The tiered cache: tiers stacked from fast to large, as one store.

Covers two-phase verbs over the stack and what is asked of it beside them. Does not cover how pages
get from tier to tier (`pie.pool.tier_stack`), what a policy wants (`pie.policies`) or who asks
(`pie.pool.node`).

A new page goes into the first tier. A tier without room asks its retention manager for victims; a
victim goes to the next tier that takes it, or away from the last one. A page is served from the tier that holds
it. Where there is a mover (`pie.pool.mover`), a page that was used in a lower tier is copied to the
first one soon after, and the first tier is kept from becoming quite full, so that a new page
seldom has to wait for a victim to be written elsewhere.

Thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from typing import NamedTuple, Protocol

from pie.index.contract import IndexWriter
from pie.page.columns import PageMasks, together
from pie.page.events import PageEntry
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.policies.retention import RetentionPolicy
from pie.policies.victims import ManagerCounts, counted_together
from pie.pool.kept_uses import KeepsUses, KeptUses
from pie.pool.shelf import Level, Shelf
from pie.pool.side_threads import CLOSE_S, SideThreads
from pie.pool.tier import BadPages, PageId, StoredPage, Tier, TierKind, id_of
from pie.pool.tier_stack import Loss, TierStack

__all__ = ["Level", "Loan", "Moves", "TieredCache"]

_HIT = LookupStatus.HIT
"""A name of its own: look-ups of thousands of pages spend a third of their time on members."""


class Moves(Protocol):
    """What moves pages between tiers beside those who use them; see `pie.pool.mover`."""

    def promote_soon(self, page: PageId) -> None:
        """Copy a page that was used in a lower tier to the first one."""

    def look(self) -> None:
        """Look whether the first tier is too full."""

    def write_through_soon(self, page: PageId, *, is_persistent: bool) -> None:
        """Copy a page to the last tier, where that is wanted."""


class Loan(NamedTuple):
    """A page on loan, and the level that lent it."""

    page: StoredPage
    level: int
    is_counted: bool
    """Whether the manager knows of the pin; it does not where the page is not on record yet."""


class TieredCache:
    """A stack of tiers that answers as one store."""

    def __init__(
        self,
        levels: Sequence[Level],
        *,
        index: IndexWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stack `levels`, the fastest first.

        Args:
            levels: At least one.
            index: Told what is stored and removed, from any thread.
            clock: Seconds, going forward only.
        """
        if not levels:
            raise ValueError("a cache has at least one tier")
        tiers = [level.tier for level in levels]
        self._uses = KeptUses(next((tier for tier in tiers if isinstance(tier, KeepsUses)), None))
        self._stack = TierStack(levels, index=index, clock=clock, uses=self._uses)
        self.counters = self._stack.counters
        self._shelves = self._stack.shelves
        self._tiers = self._stack.tiers
        self._clock = clock
        self._writing: dict[PageId, PageHeader] = {}
        self._moves: Moves | None = None
        self._lock = self._stack.lock

    def move_with(self, moves: Moves | None) -> None:
        """Tell `moves` from now on what it may want to do; None ends that."""
        self._moves = moves

    def adopt(self) -> int:
        """Take on what the tiers hold at the start, before anybody uses them; return how many pages.

        The index is not told: what is held at the start is announced as a whole.
        """
        self._uses.load()
        return sum(shelf.adopt() for shelf in self._shelves)

    @property
    def has_new_uses(self) -> bool:
        """Whether pages were used that rules keep for their uses, and the disk does not know how often."""
        return self._uses.is_new

    def keep_uses(self) -> None:
        """Have it on disk how often pages were used that rules keep for that."""
        self._uses.keep()

    @property
    def tiers(self) -> list[TierKind]:
        """The kinds of its tiers, the fastest first."""
        return [tier.kind for tier in self._tiers]

    @property
    def is_tiered(self) -> bool:
        """Whether there is a tier below the first, so that a store or a load may wait for it."""
        return len(self._shelves) > 1

    def level_of(self, page: PageId) -> int:
        """Return the level of the first tier that has a page; 0 where none has."""
        levels = range(len(self._tiers))
        return next((at for at in levels if self._tiers[at].lookup(page) is _HIT), 0)

    @property
    def used_bytes(self) -> int:
        """Bytes taken in all tiers."""
        return sum(shelf.level.tier.used_bytes for shelf in self._shelves)

    @property
    def budget_bytes(self) -> int:
        """Bytes that all tiers may take."""
        return sum(shelf.level.tier.budget_bytes for shelf in self._shelves)

    @property
    def bad_pages(self) -> BadPages:
        """Pages found bad in any tier."""
        each = [shelf.level.tier.bad_pages for shelf in self._shelves]
        return BadPages(sum(b.at_store for b in each), sum(b.at_load for b in each))

    @property
    def policy_counts(self) -> ManagerCounts:
        """What was seen of the retention policies of all tiers."""
        return counted_together(shelf.level.manager.counts for shelf in self._shelves)

    def lookup(self, page: PageId) -> LookupStatus:
        """Say what is known of a page; not a use of it."""
        best = LookupStatus.MISS
        for tier in self._tiers:
            status = tier.lookup(page)
            if status is _HIT:
                return status
            if status:
                best = status
        return best

    def lookups(self, pages: Sequence[PageId]) -> list[LookupStatus]:
        """Return what `lookup` says of each page, in a quarter of the time for those that the first tier has."""
        found = list(map(self._tiers[0].lookup, pages))
        if self.is_tiered:
            found = [s if s is _HIT else self.lookup(p) for s, p in zip(found, pages, strict=True)]
        return found

    def payload_bytes(self, page: PageId) -> int:
        """Return the size of a held page's payload, or 0."""
        for shelf in self._shelves:
            size = shelf.size(page)
            if size:
                return size
        return 0

    def prepare_store(
        self, header: PageHeader, *, may_evict: bool = True, may_demote: bool = True
    ) -> memoryview | LookupStatus:
        """Reserve room for a page, evicting where the policy says, and return it.

        Returns `HIT` or `PENDING` where some tier has the page or it is being written, `RETRY`
        where no room can be made, `MISS` where the cache is closed. A caller who must not wait for
        a victim to be written to a lower tier says that nothing may be evicted, and then `RETRY`
        is not counted; or that nothing may be demoted, and then victims that no lower tier has
        are lost.
        """
        page = id_of(header)
        status = self.lookup(page)
        if status is not LookupStatus.MISS:
            return status
        if not may_evict:
            room = self._tiers[0].prepare_store(header)
            if room is LookupStatus.RETRY:
                return room
        else:
            room = self._stack.room(0, header, may_demote=may_demote)
        if isinstance(room, memoryview):
            with self._lock:
                self._writing[page] = header
        elif room is LookupStatus.RETRY:
            with self._lock:
                self.counters.no_room += 1
        return room

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back; say whether it is readable."""
        with self._lock:
            header = self._writing.pop(page, None)
        good = self._shelves[0].level.tier.complete_store(page, success=success)
        if good and header is not None:
            with self._lock:
                self.counters.stored += 1
            self._stack.record(0, page, header)
            if self._moves is not None:
                self._moves.look()
                self._moves.write_through_soon(page, is_persistent=self._is_persistent(page))
        return good

    def prepare_load(
        self, page: PageId, *, is_use: bool = True, levels: int | None = None
    ) -> Loan | LookupStatus:
        """Lend a page, checked, from the first tier that has it.

        Counts as a use of it, unless it is only copied elsewhere. A caller who must not wait for all
        tiers says how many `levels` may be asked; where one below has the page, the answer is
        `RETRY`, and that is not counted.
        """
        best = LookupStatus.MISS
        for at, shelf in enumerate(self._shelves):
            if levels is not None and at >= levels:
                status = self._tiers[at].lookup(page)
                if status is _HIT:
                    return LookupStatus.RETRY
                best = status or best
                continue
            stored = shelf.level.tier.prepare_load(page)
            if isinstance(stored, StoredPage):
                with self._lock:
                    if is_use:
                        self.counters.hits += 1
                        self._note(page, self._hit(shelf, page))
                    is_counted = shelf.level.manager.pin(page.key, page.part)
                if is_use and self._moves is not None:
                    if at:
                        self._moves.promote_soon(page)
                    elif self._is_persistent(page):
                        self._moves.write_through_soon(page, is_persistent=True)
                return Loan(stored, at, is_counted)
            if stored is not LookupStatus.MISS:
                best = stored
            elif page in shelf:
                self._stack.record(at, page)  # Found bad just now, and removed.
        with self._lock:
            if best is LookupStatus.MISS:
                self.counters.misses += 1
            else:
                self.counters.pending += 1
        return best

    def to_preload(self) -> list[PageId]:
        """Return what rules want to outlive restarts and lower tiers alone hold, in order of place."""
        with self._lock:
            first, *lower = (shelf.level.manager for shelf in self._shelves)
            wanted = {PageId(*page): None for one in lower for page in one.persistent()}
            if lower and first.has_persistent:
                wanted |= dict.fromkeys(self._uses.pages())
        return [page for page in wanted if self._tiers[0].lookup(page) is not _HIT]

    def to_keep(self) -> list[PageId]:
        """Return what rules want to outlive restarts, and the first tier holds."""
        with self._lock:
            wanted = self._shelves[0].level.manager.persistent() if self.is_tiered else []
        return [PageId(*page) for page in wanted]

    def used_above(self, page: PageId) -> None:
        """Learn that a page was used above all these tiers, and has left there now."""
        with self._lock:
            for shelf in self._shelves:
                shelf.level.manager.used_above(page.key, page.part, self._clock())

    def count_use(self, page: PageId, uses: int = 0) -> None:
        """Count a use of a page, which was made above all these tiers, in each of them.

        Args:
            page: The page.
            uses: How often it was used there, where it is to outlive a restart for that.
        """
        with self._lock:
            self._note(page, max(uses, *(self._hit(shelf, page) for shelf in self._shelves)))

    def _hit(self, shelf: Shelf, page: PageId) -> int:
        """Count a use in one tier; return how many there were, if rules want the page to outlive a restart for them."""
        manager = shelf.level.manager
        manager.hit(page.key, page.part, self._clock())
        return manager.uses_to_keep(page.key, page.part) or 0 if manager.has_persistent else 0

    def _note(self, page: PageId, uses: int) -> None:
        if uses:
            self._uses.note(page, uses)

    def expect(self, pages: Sequence[PageId]) -> None:
        """Let lower tiers prepare for loads of pages that will come soon, in that order."""
        first, *lower = self._tiers
        wanted = [page for page in pages if first.lookup(page) is not _HIT] if lower else []
        for tier in lower:
            tier.expect(wanted)
            if tier is not lower[-1]:
                wanted = [page for page in wanted if tier.lookup(page) is not _HIT]

    def is_leaving(self, loan: Loan) -> bool:
        """Say whether a lent page leaves with its last loan, whose end may wait for the tier."""
        return self._tiers[loan.level].lookup(id_of(loan.page.header)) is not _HIT

    def complete_load(self, loan: Loan) -> None:
        """End a loan."""
        page = id_of(loan.page.header)
        shelf = self._shelves[loan.level]
        manager = shelf.level.manager
        with self._lock:
            # A page that was found bad meanwhile has left the manager with all its pins.
            if loan.is_counted and manager.pins(page.key, page.part):
                manager.unpin(page.key, page.part)
        shelf.level.tier.complete_load(page)

    def remove(self, page: PageId, kinds: Collection[TierKind] | None = None) -> bool:
        """Remove a page from all tiers, or those of some kinds, unless it is pinned; say whether it went."""
        gone = True
        for at, shelf in enumerate(self._shelves):
            if kinds is not None and shelf.level.tier.kind not in kinds:
                continue
            gone = shelf.level.tier.remove(page) and gone
            self._stack.record(at, page)
        return gone

    def keep_removed(self, limit_s: float) -> None:
        """Wait, at most so long for each tier, until pages that were removed would stay so after a restart."""
        for tier in self._tiers:
            tier.keep_removed(limit_s)

    def promote(self, page: PageId) -> bool:
        """Copy a page from a lower tier to the first; say whether it came to be there so.

        Nothing is lost for it: it gives up where the last copy of a page would have to leave.
        """
        if self._tiers[0].lookup(page) is not LookupStatus.MISS:
            return False
        for at in range(1, len(self._shelves)):
            header = self._stack.copy(page, at, 0, Loss.NOTHING)
            if header is not None:
                with self._lock:
                    self.counters.promoted += 1
                self._stack.record(0, page, header)
                return True
        return False

    def write_through(self, page: PageId) -> bool:
        """Copy a page from whichever tier has it to the last one; say whether it waits for that still.

        It does where it is there and the last tier takes nothing now.
        """
        last = len(self._shelves) - 1
        held = [at for at in range(last) if self._tiers[at].lookup(page) is _HIT]
        return bool(held) and not any(self._stack.bring(page, at, last) for at in held)

    def missing_below(self) -> Iterator[PageId]:
        """List the pages that the last tier does not have."""
        *upper, last = self._tiers
        for tier in upper:
            for header in tier.pages():
                page = id_of(header)
                if last.lookup(page) is LookupStatus.MISS:
                    yield page

    def is_fuller_than(self, share: float) -> bool:
        """Say whether more than a share of the first tier is taken."""
        tier = self._tiers[0]
        return tier.used_bytes > share * tier.budget_bytes

    def relieve(self, full_above: float, full_to: float) -> None:
        """Move victims of the first tier down, if more than a share of it is taken.

        It ends where no lower tier takes more. One that is full takes a page by letting its own
        victim go, as it does for a page that has to leave.

        Args:
            full_above: Share of the budget above which it is too full.
            full_to: Share of the budget that may stay taken.
        """
        tier = self._tiers[0]
        if self.is_tiered and self.is_fuller_than(full_above):
            excess = tier.used_bytes - int(full_to * tier.budget_bytes)
            self._stack.evict(0, excess, may_lose=Loss.BELOW)

    def save(self, until_s: float) -> None:
        """Copy what only the first tier holds to the next one that takes it, until the clock says `until_s`."""
        if not self.is_tiered:
            return
        pages = list(map(id_of, self._tiers[0].pages()))
        # What came last is used last, so it is what is wanted first after a restart.
        for page in reversed(pages):
            if self._clock() >= until_s:
                break
            self._stack.demote(0, page)

    def reconcile(self) -> None:
        """Make all records equal to what the tiers say, where a tier has lost or found pages by itself."""
        for shelf in self._shelves:
            shelf.reconcile()

    def entries(self) -> list[PageEntry]:
        """Return every page on record, once for each tier, without its tenant."""
        return [entry for shelf in self._shelves for entry in shelf.entries()]

    def masks(self) -> PageMasks:
        """Return what the index should know: every page on record, with its tiers."""
        return together([shelf.masks() for shelf in self._shelves])

    def headers(self, kinds: Collection[TierKind]) -> Iterator[PageHeader]:
        """List the pages that tiers of these kinds hold, each once."""
        before: list[Tier] = []
        for tier in self._tiers:
            if tier.kind not in kinds:
                continue
            for header in tier.pages():
                page = id_of(header)
                if not any(other.lookup(page) is _HIT for other in before):
                    yield header
            before.append(tier)

    def _is_persistent(self, page: PageId) -> bool:
        """Say whether rules want a page of the first tier to outlive a restart."""
        manager = self._shelves[0].level.manager
        if not self.is_tiered or not manager.has_persistent:
            return False
        with self._lock:
            return manager.is_persistent(page.key, page.part)

    def bytes_by_tier(self) -> dict[str, int]:
        """Return how many bytes each tier has taken, by the tier's name."""
        return {tier.kind.name.lower(): tier.used_bytes for tier in self._tiers}

    def budgets_by_tier(self) -> dict[str, int]:
        """Return how many bytes each tier may take, by the tier's name."""
        return {tier.kind.name.lower(): tier.budget_bytes for tier in self._tiers}

    def pages_by_tier(self) -> dict[str, int]:
        """Return how many pages each tier holds, by the tier's name."""
        return {s.level.tier.kind.name.lower(): len(s.manager) for s in self._shelves}

    def replace_policies(self, new_policy: Callable[[], RetentionPolicy]) -> None:
        """Let other policies choose victims, one for each tier, while pages come and go."""
        # All of them are made before the first is changed: what makes them may be a user's code.
        new = [new_policy() for _ in self._shelves]
        for shelf, policy in zip(self._shelves, new, strict=True):
            shelf.replace_policy(policy)

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """Close all tiers at once; say whether they did within `limit_s`.

        A tier that hangs keeps no other one from closing and is left behind. The index is told
        nothing: a place that closes is withdrawn.
        """
        threads = SideThreads("pie-pool-close", len(self._tiers))
        closing = [threads.submit(tier.close) for tier in self._tiers]
        done, hanging = wait(closing, limit_s)
        threads.close(0.0 if hanging else CLOSE_S)
        for shelf in self._shelves:
            shelf.forget()
        for each in done:
            each.result()
        return not hanging

    def check(self) -> None:
        """Assert that records, tiers and managers agree. Only while nobody uses the cache."""
        for shelf in self._shelves:
            shelf.check()
