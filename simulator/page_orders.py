"""Orders about pages, carried out by a simulated worker: stored in the pool, brought near, let go.

Covers one order at a time, 32 pages after the other, within the limits that `pie.worker.orders` keeps to, at
the cost model's speed; and handing on what a worker has that leaves. Does not cover who orders
(`pie.simulator.conductor`).

A page that leaves device memory before its turn is over counts as left: nothing is pinned here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey
from pie.policies.cluster_policy import LetGo, StorePages
from pie.policies.order_checks import PageOrder
from pie.policies.order_limits import BYTES_PER_S, MOST_WAITING, ORDER_S
from pie.pool.pace import Pace
from pie.simulator.clock import Clock
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import MockEngine
from pie.simulator.pool import SimulatedPool
from pie.simulator.tier import MockTier
from pie.worker.handing_on import in_order
from pie.worker.load_choice import LoadTier
from pie.worker.page_table import FrozenPage


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of an order."""

    pages: int
    """Stored, brought near or let go."""
    left: int
    """Pages that stayed where they were."""
    moved: int = 0
    """Pages that were sent for it."""


Ended = Callable[[Moved | None], None]
"""Told what became of an order; None where it is refused, because too many wait."""


@dataclass(eq=False, slots=True)
class _Order:
    order: PageOrder
    ended: Ended
    until_s: float = 0.0
    at: int = 0
    done: int = 0
    left: int = 0
    moved: int = 0


class WorkerOrders:
    """What one worker does about orders.

    Args:
        engine: Device memory.
        host: Host memory; None where there is none.
        pool: Its pool; None where there is none.
        cost: How long transfers take.
        page_tokens: Tokens in a page.
        clock: The time.
    """

    def __init__(
        self,
        engine: MockEngine,
        host: MockTier | None,
        pool: SimulatedPool | None,
        cost: CostModel,
        *,
        page_tokens: int,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._host = host
        self._pool = pool
        self._cost = cost
        self._page_tokens = page_tokens
        self._clock = clock
        self._pace = Pace(BYTES_PER_S, 0.0)
        self._waiting: deque[_Order] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether any order is not over yet."""
        return bool(self._waiting)

    def carry_out(self, order: PageOrder, ended: Ended) -> None:
        """Carry an order out once those before it are."""
        if len(self._waiting) >= MOST_WAITING:
            ended(None)
            return
        self._waiting.append(_Order(order, ended))
        if len(self._waiting) == 1:
            self._begin()

    def page(self, key: PageKey) -> FrozenPage | None:
        """Return what names a page that is here, in any tier; None where it is not."""
        table = self._engine.table
        slot = table.slot_of(key)
        if slot is not None:
            return table.frozen(slot)
        return None if self._host is None else self._host.page(key)

    def hand_on(self, until_s: float, ended: Callable[[], None]) -> None:
        """Store in the pool what it lacks of all that is here, as far as that goes in time."""
        pool = self._pool
        pages = self._alone() if pool is not None else []
        at = 0

        def next_some() -> None:
            nonlocal at
            some = pages[at : at + GROUP_PAGES]
            if not some or self._clock.now_s() >= until_s:
                ended()
                return
            at += len(some)

            def stored() -> None:
                self._put(some)
                next_some()

            seconds = self._cost.load_s(LoadTier.POOL, len(some) * self._page_tokens)
            self._clock.at(self._clock.now_s() + seconds, stored)

        next_some()

    def alone(self) -> int:
        """Return how many pages are here and nowhere in the pool."""
        return sum(1 for page in self._here() if self._pool is None or not self._pool.has(page.key))

    def _here(self) -> Iterable[FrozenPage]:
        pages = {} if self._host is None else {page.key: page for page in self._host.pages()}
        pages.update((page.key, page) for page in self._engine.table.frozen_pages())
        return pages.values()

    def _alone(self) -> list[tuple[PageKey, PageKey]]:
        assert self._pool is not None
        return [one for one in in_order(self._here()) if not self._pool.has(one[0])]

    def _begin(self) -> None:
        first = self._waiting[0]
        first.until_s = self._clock.now_s() + ORDER_S
        # Not from within the call that ordered it.
        self._clock.at(self._clock.now_s(), self._go_on)

    def _go_on(self) -> None:
        """Take the next pages of the order whose turn it is."""
        one, now_s = self._waiting[0], self._clock.now_s()
        order = one.order
        if isinstance(order, LetGo):
            self._let_go(one, order)
            return
        wanted = self._to_store(one) if isinstance(order, StorePages) else self._to_fetch(one)
        if not wanted or now_s >= one.until_s:
            self._end(one)
            return
        tokens = len(wanted) * self._page_tokens
        size = len(wanted) * self._cost.bytes_of(self._page_tokens)
        start_s = now_s + self._pace.delay_s(size, now_s)
        pool = self._pool
        assert pool is not None
        if isinstance(order, StorePages):
            ready_s = start_s + self._cost.load_s(LoadTier.POOL, tokens)
            self._clock.at(ready_s, lambda: self._stored(one, wanted))
        else:
            reading, ready_s = pool.begin(wanted, start_s)

            def fetched() -> None:
                came = [page for key in wanted if (page := pool.page(key)) is not None]
                pool.end(reading)
                self._fetched(one, wanted, came)

            self._clock.at(ready_s, fetched)

    def _to_store(self, one: _Order) -> list[PageKey]:
        """Return the next pages that are here and not in the pool."""
        pool, pages = self._pool, one.order.pages
        while pool is not None and one.at < len(pages):
            some = [
                key
                for key in pages[one.at : one.at + GROUP_PAGES]
                if not pool.has(key) and self.page(key) is not None
            ]
            one.at += GROUP_PAGES
            if some:
                return some
        return []

    def _stored(self, one: _Order, keys: Sequence[PageKey]) -> None:
        groups = one.order.pages
        at = {key: number for number, key in enumerate(groups)}
        done = self._put([(key, groups[at[key] - at[key] % GROUP_PAGES]) for key in keys])
        one.done += done
        one.moved += done
        one.left += len(keys) - done
        self._go_on()

    def _put(self, pages: Sequence[tuple[PageKey, PageKey]]) -> int:
        """Put pages that are still here into the pool; return how many it has now."""
        assert self._pool is not None
        here = [(page, group) for key, group in pages if (page := self.page(key)) is not None]
        self._pool.put(here)
        return sum(self._pool.has(page.key) for page, _ in here)

    def _to_fetch(self, one: _Order) -> list[PageKey]:
        """Return the next pages that are in the pool and not here, up to the first that is in neither."""
        pool, pages = self._pool, one.order.pages
        if pool is None or self._host is None:
            return []
        while one.at < len(pages):
            some: list[PageKey] = []
            for key in pages[one.at : one.at + GROUP_PAGES]:
                if self.page(key) is not None:
                    continue
                if not pool.has(key):
                    # What comes after a hole is of no use.
                    one.left += 1
                    one.at = len(pages)
                    break
                some.append(key)
            one.at += GROUP_PAGES
            if some:
                return some
        return []

    def _fetched(self, one: _Order, keys: Sequence[PageKey], came: list[FrozenPage]) -> None:
        assert self._host is not None
        self._host.put(came)
        done = sum(self._host.has(key) for key in keys)
        one.done += done
        one.moved += len(came)
        one.left += len(keys) - done
        if done < len(keys):
            self._end(one)
        else:
            self._go_on()

    def _let_go(self, one: _Order, order: LetGo) -> None:
        pages = order.pages[order.start :]
        here = [key for key in pages if self.page(key) is not None]
        pool = self._pool
        if not order.also_last:
            pages = [key for key in pages if pool is not None and pool.has(key)]
        going = self._engine.let_go(pages)
        if self._host is not None:
            self._host.drop([key for key in pages if key in going])
        one.done = sum(self.page(key) is None for key in here)
        one.left = len(here) - one.done
        self._end(one)

    def _end(self, one: _Order) -> None:
        self._waiting.popleft()
        one.ended(Moved(one.done, one.left, one.moved))
        if self._waiting:
            self._begin()
