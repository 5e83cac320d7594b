"""One simulated worker: a mock engine, what it publishes, and what the router knows of it.

Covers putting those together. Does not cover the engine (`pie.simulator.engine`) or a mock worker that
is a process of its own (`pie.simulator.mock_worker`).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence as Many

from pie.index.contract import PlaceRecord
from pie.page.events import PageEntry, Part, Tier
from pie.page.key import PageKey, RootKey
from pie.policies.manager import RetentionManager
from pie.policies.retention import NO_ROOT
from pie.router.books import Running, WorkerBooks
from pie.simulator.clock import Clock
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import EngineSpec, Job, MockEngine
from pie.simulator.errors import SetupError
from pie.simulator.loads import Loads, Local, Source
from pie.simulator.page_orders import WorkerOrders
from pie.simulator.pool import SimulatedPool
from pie.simulator.tier import MockTier, OnChange
from pie.simulator.trace import TraceRequest
from pie.wire.messages import Load, RefusalCode, Refused, TokenDelta
from pie.worker.batch import PageSlot
from pie.worker.load_choice import LoadTier
from pie.worker.page_table import Below, Change, FrozenPage
from pie.worker.sequence import Sequence


class PoolStores(enum.StrEnum):
    """When a page is brought to the pool."""

    BEHIND = "behind"
    """When it has been computed."""
    SPILL = "spill"
    """When it leaves the worker; what a worker loads leaves the pool, so that no page takes room twice."""


def pool_stores_named(name: str) -> PoolStores:
    """Return what a name stands for.

    Raises:
        SetupError: Nothing.
    """
    try:
        return PoolStores(name)
    except ValueError:
        allowed = " or ".join(f"`{one}`" for one in PoolStores)
        raise SetupError(f"pool_stores must be {allowed}, not {name!r}") from None


class SimulatedWorker:
    """A worker on a virtual clock.

    Args:
        record: What it says of itself.
        spec: What its engine has.
        cost: How long that takes.
        clock: The time.
        publish: Told what it stores and removes.
        retention: Chooses victims.
        host: Host memory, where what leaves device memory goes; None where there is none.
        pool: Where pages can be loaded from; None where there is none.
        pool_stores: When a page is brought there; None for never, but by orders.
        on_steps: Told, with the worker, when `next_tells_s` has become another time.
    """

    def __init__(
        self,
        record: PlaceRecord,
        spec: EngineSpec,
        cost: CostModel,
        clock: Clock,
        *,
        publish: OnChange,
        retention: RetentionManager,
        host: MockTier | None = None,
        pool: SimulatedPool | None = None,
        pool_stores: PoolStores | None = PoolStores.BEHIND,
        on_steps: Callable[[SimulatedWorker], None] = lambda _: None,
    ) -> None:
        self.books = WorkerBooks(record, clock=clock.now_s)
        self._publish = publish
        self._page_bytes = cost.bytes_of(spec.page_tokens)
        self._pool = pool
        self._clock = clock
        self.host = host
        spills = pool_stores is PoolStores.SPILL
        sources: dict[LoadTier, Source] = {}
        if host is not None:
            sources[LoadTier.HOST] = Local(LoadTier.HOST, host, cost, spec.page_tokens)
        if pool is not None:
            sources[LoadTier.POOL] = pool
        self.loads = Loads(
            sources,
            page_tokens=spec.page_tokens,
            clock=clock,
            exclusive=(LoadTier.POOL,) if spills else (),
        )
        below: Below | None = None
        if host is not None:
            below = _Demote(host)
        elif spills and pool is not None:
            below = _Spill(pool)
        stores = pool is not None and pool_stores is PoolStores.BEHIND
        self.engine = MockEngine(
            spec,
            cost,
            clock,
            retention=retention,
            on_report=self._reported,
            on_changes=self._changed,
            loads=self.loads,
            on_frozen=self._frozen if stores else None,
            below=below,
            model=record.model_root or NO_ROOT,
            on_steps=lambda: on_steps(self),
        )
        self.orders = WorkerOrders(
            self.engine, host, pool, cost, page_tokens=spec.page_tokens, clock=clock
        )
        self._when_idle: Callable[[], None] | None = None

    def leave(self, timeout_s: float, share: float, gone: Callable[[], None]) -> None:
        """End: hand on to the pool what only this worker has, and go when the last request is over.

        Args:
            timeout_s: How long it has.
            share: How much of that goes to handing on at most, while requests run and again after them.
            gone: Called when all of it is done.
        """

        def requests_over() -> None:
            self.orders.hand_on(self._clock.now_s() + share * timeout_s, gone)

        def handed() -> None:
            if self.engine.is_idle:
                requests_over()
            else:
                self._when_idle = requests_over

        self.orders.hand_on(self._clock.now_s() + share * timeout_s, handed)

    def submit(
        self,
        request_id: str,
        tokens: array[int],
        request: TraceRequest,
        root: RootKey,
        running: Running,
    ) -> None:
        """Send a request here; its sink is told what comes of it."""
        self.books.sent(request_id, running)
        job = Job(
            request_id,
            root,
            tokens,
            request.output_tokens,
            request.answer,
            tenant_tag=request.tenant,
            session_tag=request.session or "",
        )
        if not self.engine.submit(job):
            self.books.ended(request_id)
            running.sink.on_refused(
                Refused(request_id, RefusalCode.OVERLOADED, "the queue is full", None)
            )

    def tell_load(self) -> None:
        """Tell the router what a worker would have told it by now, with the tokens of its latest step."""
        load = self.engine.take_load()
        if load is not None:
            self.books.told_load(load)

    def next_tells_s(self) -> float | None:
        """Return when there is something new to tell; one that leaves takes nothing, and is not asked."""
        return None if self.books.record.draining else self.engine.next_load_s

    def _reported(self, deltas: Many[TokenDelta], load: Load) -> None:
        self.books.told_load(load)
        for delta in deltas:
            running = self.books.told(delta)
            if running is not None:
                running.sink.on_delta(delta)
        if self._when_idle is not None and self.engine.is_idle:
            then, self._when_idle = self._when_idle, None
            then()

    def _changed(self, changes: Many[Change]) -> None:
        at = 0
        while at < len(changes):
            stored, end = changes[at].stored, at
            while end < len(changes) and changes[end].stored is stored:
                end += 1
            pages = (change.page for change in changes[at:end])
            self._publish([device_entry(page, self._page_bytes) for page in pages], stored)
            at = end

    def _frozen(self, sequence: Sequence, new: list[int]) -> None:
        assert self._pool is not None
        working_set = sequence.working_set
        self._pool.put_some([working_set.page(index) for index in new], working_set.keys)


def device_entry(page: FrozenPage, page_bytes: int) -> PageEntry:
    """Return what the index is told of a page in device memory."""
    return PageEntry(
        page.key,
        page.parent,
        page.index,
        Part.FULL,
        Tier.DEVICE,
        page_bytes,
        page.tenant_tag,
    )


class _Demote:
    """A `pie.worker.page_table.Below` that brings to host memory what leaves device memory."""

    def __init__(self, host: MockTier) -> None:
        self._host = host

    @property
    def waiting(self) -> int:
        """Nothing waits: what leaves is there at once."""
        return 0

    def holds(self, key: PageKey) -> bool:
        """Say whether host memory has a page."""
        return self._host.has(key)

    def demote(self, victims: Many[tuple[PageSlot, FrozenPage]]) -> None:
        """Take what leaves: a sequence's end leaves first, and has to leave host memory first too."""
        self._host.put([page for _, page in reversed(victims)])

    def keep(self, uses: Mapping[PageKey, int]) -> None:
        """Do nothing: there is no disk here."""


class _Spill:
    """The same for a pool of one node."""

    def __init__(self, pool: SimulatedPool) -> None:
        self._pool = pool

    @property
    def waiting(self) -> int:
        """Nothing waits: what leaves is there at once."""
        return 0

    def holds(self, key: PageKey) -> bool:
        """Say whether the pool has a page."""
        return self._pool.has(key)

    def demote(self, victims: Many[tuple[PageSlot, FrozenPage]]) -> None:
        """Take what leaves, as `_Demote` does."""
        # Groups mean nothing to one node alone.
        self._pool.put((page, page.key) for _, page in reversed(victims))

    def keep(self, uses: Mapping[PageKey, int]) -> None:
        """Do nothing, as `_Demote` does."""
