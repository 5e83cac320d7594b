"""Frozen pages on their way to lower tiers and the pool, seen from the step thread.

Covers the bounded queue of pages to store, the batch under way, and offering again what the pool did
not take. Pure. Does not cover copying and sending (`pie.worker.storing`).

A queued page is not pinned: under pressure it may leave before its turn, and counts as dropped.
Only the batch under way is pinned, so that stores never hold more than one batch of device memory.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pie.page.events import Part
from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey
from pie.pool.tier import PageId
from pie.worker.batch import PageSlot, StateSlot
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_table import FrozenPage, PageTable
from pie.worker.state_table import StateTable
from pie.worker.working_set import WorkingSet

AGAIN_S = 5.0
"""When a page that the pool did not take is offered again; then after twice as long each time. Another
writer's promise lasts so long, unless a node's `claim_timeout_s` says otherwise."""
_MOST_OFFERS = 6
"""Of one page: the last comes two and a half minutes after the first."""


@dataclass(frozen=True, slots=True)
class PageToStore:
    """A frozen page, where it lies, and the first key of its group of pages."""

    slot: PageSlot
    page: FrozenPage
    group: PageKey
    is_state: bool = False
    """Whether it is the snapshot at the page's end, which lies in a state slot."""
    offers: int = 0
    """How often the pool did not take it."""


def batch_pages(step_pages: int, total_pages: int) -> int:
    """Return how many pages to store at a time.

    A batch begins with a step: one of fewer pages than a step fills would fall behind for ever. And
    its pages are pinned: no more than a quarter of a large memory.
    """
    return max(GROUP_PAGES, min(step_pages, total_pages // 4))


def page_to_store(working_set: WorkingSet, index: int) -> PageToStore:
    """Return a frozen page of a working set."""
    return PageToStore(
        slot=working_set.pages[index],
        page=working_set.page(index),
        group=working_set.keys[index - index % GROUP_PAGES],
    )


def snapshot_to_store(working_set: WorkingSet) -> PageToStore | None:
    """Return the snapshot that the last pass left; None where it left none."""
    index, state = working_set.new_snapshot, working_set.state
    if index is None or state is None or state.source is None:
        return None
    return PageToStore(
        slot=state.source,
        page=working_set.page(index),
        group=working_set.keys[index - index % GROUP_PAGES],
        is_state=True,
    )


class StoreQueue:
    """Pages to store, oldest first, one batch at a time.

    Args:
        table: Where the pages are frozen.
        states: Where a recurrent model's snapshots are.
        limit_pages: Most pages that wait; more are dropped.
        batch_pages: Most pages of a batch.
        clock: Seconds, going forward only.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        limit_pages: int,
        batch_pages: int,
        states: StateTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._states = states
        self._limit_pages = limit_pages
        self._batch_pages = batch_pages
        # Slots that a batch pins are missed by sequences that want to begin.
        self._batch_states = 0 if states is None else max(1, states.total // 4)
        self._clock = clock
        self._queue: deque[PageToStore] = deque()
        self._later: list[tuple[float, int, PageToStore]] = []
        """Pages that are queued again, with when and in which order: a heap."""
        self._put_off = itertools.count()
        self.in_flight: tuple[PageSlot, ...] = ()
        """Pages of the batch under way."""
        self.states_in_flight: tuple[StateSlot, ...] = ()
        """Snapshots of the batch under way."""
        self.dropped = 0
        self.stored = 0

    def __len__(self) -> int:
        return len(self._queue) + self._under_way

    @property
    def is_busy(self) -> bool:
        """Whether a batch is under way."""
        return self._under_way > 0

    @property
    def due_in_s(self) -> float | None:
        """In how many seconds a page is to be offered again; None where none is."""
        return max(0.0, self._later[0][0] - self._clock()) if self._later else None

    def put(self, page: PageToStore) -> None:
        """Queue a page, or count it as dropped."""
        if len(self._queue) + len(self._later) >= self._limit_pages:
            self.dropped += 1
            return
        self._queue.append(page)

    def next_batch(self) -> list[PageToStore]:
        """Begin the next batch and pin its pages; empty while one is under way."""
        while self.due_in_s == 0:
            self._queue.append(heapq.heappop(self._later)[-1])
        batch: list[PageToStore] = []
        states = 0
        while self._queue and not self.is_busy and len(batch) < self._batch_pages:
            if self._queue[0].is_state and states >= self._batch_states:
                break
            page = self._queue.popleft()
            table = self._table_of(page)
            if not table.holds(page.slot, page.page.key):
                self.dropped += 1
                continue
            table.acquire(page.slot)
            states += page.is_state
            batch.append(page)
        if batch:
            self.in_flight = tuple(page.slot for page in batch if not page.is_state)
            self.states_in_flight = tuple(page.slot for page in batch if page.is_state)
        return batch

    def ended(self, stored: int, there: int, again: Sequence[PageToStore] = ()) -> None:
        """End the batch under way.

        Args:
            stored: Pages that the pool has.
            there: Pages that are where they should be.
            again: Pages to offer again later.
        """
        self._table.release(self.in_flight)
        if self._states is not None:
            self._states.release(self.states_in_flight)
        self.stored += stored
        self.dropped += self._under_way - there - len(again)
        self.in_flight = self.states_in_flight = ()
        now_s = self._clock()
        for page in again:
            is_full = len(self._queue) + len(self._later) >= self._limit_pages
            if is_full or page.offers + 1 >= _MOST_OFFERS:
                self.dropped += 1
            else:
                due_s = now_s + AGAIN_S * 2**page.offers
                later = replace(page, offers=page.offers + 1)
                heapq.heappush(self._later, (due_s, next(self._put_off), later))

    @property
    def _under_way(self) -> int:
        return len(self.in_flight) + len(self.states_in_flight)

    def _table_of(self, page: PageToStore) -> PageTable:
        if not page.is_state:
            return self._table
        assert self._states is not None, "only a recurrent model has snapshots"
        return self._states.slots


class WriteBehind:
    """A `pie.worker.page_table.Below` for some parts: the queue, and the tiers that it ends in."""

    def __init__(self, stores: StoreQueue, tiers: LowerTiers, parts: Sequence[Part]) -> None:
        self._stores = stores
        self._tiers = tiers
        self._parts = parts

    @property
    def waiting(self) -> int:
        """How many pages wait to be copied."""
        return len(self._stores)

    def holds(self, key: PageKey) -> bool:
        """Say whether a lower tier has a page."""
        return self._tiers.tier_of(key, self._parts) is not None

    def demote(self, victims: Sequence[tuple[PageSlot, FrozenPage]]) -> None:
        """Copy victims to host memory that are in no lower tier yet, where there is room."""
        self._tiers.demote(victims, self._parts)

    def keep(self, uses: Mapping[PageKey, int]) -> None:
        """Let lower tiers have pages that were used, and are to outlive a restart."""
        if uses:
            self._tiers.keep(
                {PageId(key, part): count for key, count in uses.items() for part in self._parts}
            )
