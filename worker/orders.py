"""Orders about pages, carried out by a worker: stored in the pool, brought near, let go.

Covers one order at a time, bounded in pages, bytes a second and time, beside the steps and never in one.
Does not cover who orders (`pie.router.conductor`) or what workers do by themselves (`pie.worker.offload`).

Whatever goes wrong with a page costs that page alone: it counts as left. Pages that this worker does not know
are passed over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pie.page.groups import GROUP_PAGES, group_keys
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.policies.order_limits import MOST_PAGES, MOST_WAITING, ORDER_S
from pie.pool.pace import Pace
from pie.pool.tier import PageId, StoredPage
from pie.wire.errors import RefusedError
from pie.wire.messages import PutStatus, RefusalCode
from pie.wire.place_orders import BringNear, LetGoOf, PagesMoved, StoreInPool
from pie.worker.between import between
from pie.worker.commands import Between
from pie.worker.engine_thread import EngineThread
from pie.worker.handing_on import PageAndPlace, in_order
from pie.worker.lending import Lending
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import PageCopies, Piece
from pie.worker.page_pool import PagePool
from pie.worker.stores import PageToStore
from pie.worker.storing import Storing

log = logging.getLogger("pie.worker.orders")

_CLOSE_S = 5.0
_LAST_S = 1.0
"""How long handing on may take beyond its time: the pages under way."""
_THERE = frozenset({PutStatus.STORED, PutStatus.HELD})

_Pages = Sequence[tuple[PageKey, PageKey]]
"""Keys, each with the first key of its group."""


@dataclass(slots=True)
class OrderCounters:
    """What became of orders."""

    stored: int = 0
    """Pages that the pool took because of an order, or because this worker leaves."""
    fetched: int = 0
    """Pages that were brought into host memory because of an order."""
    let_go: int = 0
    left: int = 0
    """Pages that an order was about and that stayed where they were."""
    refused: int = 0
    """Orders that came while too many waited, or about too many pages."""


@dataclass(slots=True)
class Stored:
    """How far storing pages in the pool has come."""

    left: int
    """Pages that the pool lacks, or may lack: it has not been asked for them yet."""
    done: int = 0
    """Pages that it took."""
    size: int = 0
    """Bytes that went there."""


class PageOrders:
    """What one worker does about orders. For one event loop.

    Args:
        copies: What copies pages out, and names them.
        storing: What stores pages that lie in device memory.
        lending: Lends those.
        thread: The step thread.
        bytes_per_s: How fast pages move for orders.
        pool: The pool, where there is one.
        tiers: Host memory and disk, where there are any.
    """

    def __init__(
        self,
        copies: PageCopies,
        storing: Storing,
        lending: Lending,
        thread: EngineThread,
        bytes_per_s: int,
        *,
        pool: PagePool | None,
        tiers: LowerTiers | None,
    ) -> None:
        self.counters = OrderCounters()
        self._copies = copies
        self._storing = storing
        self._lending = lending
        self._thread = thread
        self._pool = pool
        self._tiers = tiers
        self._layout = copies.names.layout
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[tuple[int, int, int]]] = set()
        self._closed = False
        self._pace = Pace(bytes_per_s, time.monotonic())

    def figures(self) -> dict[str, object]:
        """Return the fields of `WorkerStatus` that tell of orders."""
        counters = self.counters
        return {
            "pages_ordered_stored": counters.stored,
            "pages_ordered_fetched": counters.fetched,
            "pages_ordered_let_go": counters.let_go,
            "pages_ordered_left": counters.left,
            "orders_refused": counters.refused,
        }

    async def carry_out(self, order: StoreInPool | BringNear | LetGoOf) -> PagesMoved:
        """Carry an order out once those before it are.

        Raises:
            RefusedError: Too many wait, or it is about too many pages.
        """
        if self._closed:
            raise RefusedError(RefusalCode.DRAINING, "the worker is closed", 1.0)
        if len(order.pages) > MOST_PAGES:
            self.counters.refused += 1
            text = f"an order is about {MOST_PAGES} pages at most, not {len(order.pages)}"
            raise RefusedError(RefusalCode.BAD_MESSAGE, text)
        if len(self._tasks) >= MOST_WAITING:
            self.counters.refused += 1
            raise RefusedError(RefusalCode.OVERLOADED, "too many orders about pages wait", 1.0)
        task = asyncio.create_task(self._carry_out(order), name="pie-order")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            # Whoever asked may leave: it goes on.
            done, left, size = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise RefusedError(RefusalCode.DRAINING, "the worker leaves", 1.0) from None
        return PagesMoved(order.request_id, done, left, size)

    async def close(self) -> None:
        """Give up what is under way. The step thread must still run: it gets its pages back."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    async def _carry_out(self, order: StoreInPool | BringNear | LetGoOf) -> tuple[int, int, int]:
        async with self._turn:
            until_s = time.monotonic() + ORDER_S
            pages = list(zip(order.pages, group_keys(order.pages), strict=True))
            if isinstance(order, StoreInPool):
                into = Stored(len(pages))
                await self._store(pages, until_s, into)
                done, left, size = into.done, into.left, into.size
                self.counters.stored += done
            elif isinstance(order, BringNear):
                done, left, size = await self._fetch(pages, until_s)
                self.counters.fetched += done
            else:
                some, size = pages[max(0, order.start) :], 0
                done, left = await self._let_go(some, until_s, also_last=order.also_last)
                self.counters.let_go += done
            self.counters.left += left
            return done, left, size

    async def hand_on(self, held: Iterable[PageAndPlace], limit_s: float) -> tuple[int, int]:
        """Store in the pool what it lacks of pages that are held here, as far as that goes in time.

        Orders that wait or are under way are given up for it. Returns how many pages it took, and how many
        are here alone as far as is known, which in a cluster without a pool is all.
        """
        for task in self._tasks:
            task.cancel()
        pages = in_order(held)
        stored = Stored(len(pages))
        try:
            # A step that is under way for long, or an engine that is over, keeps nobody from leaving.
            async with asyncio.timeout(max(0.0, limit_s) + _LAST_S), self._turn:
                await self._store(pages, time.monotonic() + limit_s, stored, in_a_hurry=True)
        except Exception:
            log.exception("pages could not be handed on")
        self.counters.stored += stored.done
        return stored.done, stored.left

    async def _store(
        self, pages: _Pages, until_s: float, stored: Stored, *, in_a_hurry: bool = False
    ) -> None:
        """Store pages in the pool, and keep `stored` true at every moment: this may be given up."""
        if self._pool is None:
            return
        for at in range(0, len(pages), GROUP_PAGES):
            some = pages[at : at + GROUP_PAGES]
            if time.monotonic() >= until_s:
                break
            missing = await self._missing(some, until_s)
            here = [page for page in missing if self._tiers_have(page[0])]
            lent = await self._lend(missing)
            try:
                in_device = {one.page.key for one in lent}
                parts = sum(self._size(one) for one in lent)
                below = [page for page in here if page[0] not in in_device]
                parts += len(below) * self._layout.page_bytes
                if not in_a_hurry:
                    await asyncio.sleep(self._pace.delay_s(parts, time.monotonic()))
                if lent:
                    await self._storing.run(lent, max(0.1, until_s - time.monotonic()))
            finally:
                await self._take_back(lent)
            await self._store_below(below, until_s)
            known = [page for page in missing if page[0] in in_device or page in below]
            still = await self._missing(known, until_s)
            stored.done += len(known) - len(still)
            # What was let go meanwhile is not here any more.
            stored.left -= len(some) - len(still)
            stored.size += parts

    async def _lend(self, pages: _Pages) -> list[PageToStore]:
        lent: list[PageToStore] = []

        def lend() -> None:
            lent.extend(self._lending.lend(pages))

        try:
            await between(self._thread, lend)
        except BaseException:
            # It may be done all the same, later: then it is undone right after.
            self._thread.put(Between(lambda: self._lending.take_back(lent)))
            raise
        return lent

    async def _take_back(self, lent: Sequence[PageToStore]) -> None:
        await between(self._thread, lambda: self._lending.take_back(lent))

    async def _missing(self, pages: _Pages, until_s: float) -> list[tuple[PageKey, PageKey]]:
        """Return the pages of which the pool lacks an attention part, or a snapshot where they have those alone.

        Without a pool those are all.
        """
        if self._pool is None:
            return list(pages)
        parts = self._layout.attention_parts or self._layout.parts
        asked = [(PageId(key, part), group) for key, group in pages for part in parts]
        if not asked:
            return []
        statuses = iter(
            await self._pool.lookup(
                [page for page, _ in asked],
                groups=[group for _, group in asked],
                deadline_s=max(0.0, until_s - time.monotonic()),
            )
        )
        return [
            page
            for page in pages
            if any(s is not LookupStatus.HIT for s in list(itertools.islice(statuses, len(parts))))
        ]

    async def _store_below(self, pages: _Pages, until_s: float) -> None:
        """Store in the pool what lies in host memory or on disk."""
        tiers, pool = self._tiers, self._pool
        if tiers is None or pool is None or not pages:
            return
        found: list[StoredPage] = []
        groups: list[PageKey] = []

        def read() -> None:
            for key, group in pages:
                if time.monotonic() >= until_s:
                    return
                for part in self._layout.parts:
                    if not tiers.has(PageId(key, part)):
                        continue

                    def keep(parts: Sequence[StoredPage]) -> bool:
                        # What is lent is valid only in here.
                        found.extend(
                            StoredPage(one.header, memoryview(bytes(one.payload))) for one in parts
                        )
                        return True

                    if tiers.load([Piece(PageId(key, part), 0)], keep):
                        groups.append(group)

        await asyncio.to_thread(read)
        if found:
            statuses = await pool.store(
                [one.header for one in found],
                [one.payload for one in found],
                groups=groups,
                deadline_s=max(0.0, until_s - time.monotonic()),
            )
            tiers.in_pool.note(
                PageId(one.header.key, one.header.part)
                for one, status in zip(found, statuses, strict=True)
                if status in _THERE
            )

    async def _fetch(self, pages: _Pages, until_s: float) -> tuple[int, int, int]:
        """Return how many pages came into host memory, how many did not, and how many bytes that were."""
        tiers, pool = self._tiers, self._pool
        if tiers is None or pool is None:
            return 0, len(pages), 0
        parts, done, size = self._layout.parts, 0, 0
        in_device = await between(self._thread, lambda: self._lending.held(pages))
        missing = [one for one in pages if one[0] not in in_device and not self._tiers_have(one[0])]
        for at in range(0, len(missing), GROUP_PAGES):
            some = missing[at : at + GROUP_PAGES]
            if time.monotonic() >= until_s:
                break
            await asyncio.sleep(
                self._pace.delay_s(len(some) * self._layout.page_bytes, time.monotonic())
            )
            came = await pool.load(
                [PageId(key, part) for key, _ in some for part in parts],
                groups=[group for _, group in some for _ in parts],
                deadline_s=max(0.0, until_s - time.monotonic()),
            )
            kept, moved = await asyncio.to_thread(self._keep, len(some), came)
            done += kept
            size += moved
            if kept < len(some):
                # What comes after a hole is of no use.
                break
        return done, len(missing) - done, size

    def _keep(self, pages: int, came: Sequence[StoredPage | None]) -> tuple[int, int]:
        """Put pages that came whole into host memory, up to the first that did not; blocks."""
        assert self._tiers is not None
        kept = size = 0
        each = iter(came)
        for _ in range(pages):
            parts = [one for one in itertools.islice(each, len(self._layout.parts)) if one]
            has = {one.header.part for one in parts}
            # Only some pages have a snapshot.
            whole = has >= set(self._layout.attention_parts) and all(map(self._copies.fits, parts))
            if not whole or not self._tiers.put_fetched([(p.header, p.payload) for p in parts]):
                break
            self._tiers.in_pool.note(PageId(one.header.key, one.header.part) for one in parts)
            kept += 1
            size += sum(one.payload.nbytes for one in parts)
        return kept, size

    async def _let_go(self, pages: _Pages, until_s: float, *, also_last: bool) -> tuple[int, int]:
        """Return how many pages are not here any more, and how many are."""
        lacking = set() if also_last else {key for key, _ in await self._missing(pages, until_s)}
        going = [key for key, _ in pages if key not in lacking]
        here = await between(self._thread, lambda: self._lending.held(pages))
        gone = await between(self._thread, lambda: self._lending.let_go(going))
        tiers = self._tiers
        if tiers is not None:
            here |= {key for key, _ in pages if self._tiers_have(key)}
            await asyncio.to_thread(tiers.remove, [key for key in going if key in gone])
        done = len(here & gone)
        return done, len(here) - done

    def _tiers_have(self, key: PageKey) -> bool:
        parts = self._layout.attention_parts or self._layout.parts
        return self._tiers is not None and all(self._tiers.has(PageId(key, part)) for part in parts)

    def _size(self, one: PageToStore) -> int:
        return self._layout.state_bytes if one.is_state else self._layout.page_bytes
