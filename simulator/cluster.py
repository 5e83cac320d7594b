"""A cluster in virtual time: the router's real choice and index over mock engines.

Covers putting the parts together, and letting a trace run through. Does not cover one engine
(`pie.simulator.engine`) or what is said of it afterwards (`pie.simulator.report`).
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pie.index.contract import PlaceRecord
from pie.index.mirror import Mirror
from pie.page.events import (
    Epoch,
    PageEntry,
    PageRemoved,
    PageStored,
    PlaceId,
    PlaceKind,
    Tier,
)
from pie.page.key import RootKey, tenant_root
from pie.policies.manager import RetentionManager
from pie.policies.policy_set import PolicySet
from pie.router.books import Running, WorkerBooks
from pie.router.choice import Chooser
from pie.router.metrics import RouterMetrics
from pie.router.overview import Overview
from pie.router.prefix import Prefix
from pie.simulator.clock import VirtualClock
from pie.simulator.conductor import Conductor
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import MOST_PAGES, EngineSpec
from pie.simulator.errors import SetupError, within
from pie.simulator.kept import Kept
from pie.simulator.leave import Leave, check_leaves
from pie.simulator.meant import MODEL
from pie.simulator.not_simulated import not_simulated
from pie.simulator.outcome import Outcome
from pie.simulator.outcomes import Outcomes
from pie.simulator.page_orders import WorkerOrders
from pie.simulator.pool import SimulatedPool
from pie.simulator.rounds import EVERY_S, Rounds
from pie.simulator.sink import Sink
from pie.simulator.telling import Telling
from pie.simulator.tier import MockTier, OnChange
from pie.simulator.trace import MOST_S, TraceRequest
from pie.simulator.watch import LIMIT_S, Watch
from pie.simulator.worker import PoolStores, SimulatedWorker

LEAVE_S = 30.0
"""What a worker that leaves has to end."""
_LINGER_S = 60.0
"""How long pool nodes go on handing pages to each other after the last request."""
_SLOWEST, _FASTEST = 0.01, 1_000_000
_MOST_CLIENTS = 1_000_000
_MOST_STORED_PAGES = 1_000_000_000
"""Pages of host memory or a pool, which take memory here only once they are there."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What is simulated."""

    workers: int = 4
    engine: EngineSpec = field(default_factory=EngineSpec)
    cost: CostModel = field(default_factory=CostModel)
    host_pages: int = 0
    """Pages that each worker's host memory has room for; 0 for none."""
    pool_pages: int = 0
    """Pages that the pool has room for, all nodes together; 0 for no pool."""
    pool_nodes: int = 1
    pool_stores: PoolStores = PoolStores.BEHIND
    leaves: tuple[Leave, ...] = ()
    """Workers and pool nodes that are told to leave."""
    seed: int = 0
    """Names the requests, and so the lots that decide among equals."""

    def check(self) -> None:
        """Raise `SetupError` where it cannot be simulated."""
        self.engine.check()
        self.cost.check()
        within("workers", self.workers, 1, 10_000)
        if (pages := self.workers * self.engine.pages) > MOST_PAGES:
            raise SetupError(
                f"{self.workers:,} workers of {self.engine.pages:,} pages have {pages:,}, and there is memory here "
                f"for {MOST_PAGES:,}: fewer workers, fewer pages, or larger ones (page_tokens)"
            )
        within("host_pages", self.host_pages, 0, _MOST_STORED_PAGES)
        within("pool_pages", self.pool_pages, 0, _MOST_STORED_PAGES)
        within("pool_nodes", self.pool_nodes, 1, 1_000)
        if 0 < self.pool_pages < self.pool_nodes:
            raise SetupError(
                f"{self.pool_pages} pool_pages are too few for {self.pool_nodes} nodes"
            )
        if self.pool_stores is PoolStores.SPILL and (self.host_pages or self.pool_nodes > 1):
            raise SetupError("pool_stores `spill` goes with one pool node and no host memory")
        check_leaves(self.leaves, self.worker_places(), self.node_places())

    def worker_places(self) -> list[PlaceId]:
        """Return what the workers are called."""
        return [PlaceId(f"worker-{number}") for number in range(self.workers)]

    def node_places(self) -> list[PlaceId]:
        """Return what the pool nodes are called."""
        nodes = self.pool_nodes if self.pool_pages else 0
        return [PlaceId(f"pool-{number}") for number in range(nodes)]


class SimulatedCluster:
    """Workers, a pool and a router over one virtual clock. For one trace.

    Args:
        spec: What it is made of.
        policies: Which ones decide.
        limit_s: What a user's policy may take for one answer, in real time.
        model: The root of the model that all workers are said to have.
        unknown: Why pages of prefixes that the policies name are not known, by name.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        policies: PolicySet,
        *,
        limit_s: float = LIMIT_S,
        model: RootKey = MODEL,
        unknown: Mapping[str, str] | None = None,
    ) -> None:
        spec.check()
        self._model = model
        self._watch = Watch(limit_s)
        self.policy_failures = self._watch.failures
        self.answer_times = self._watch.times
        self.spec = spec
        self.clock = VirtualClock()
        self._kept: list[Kept] = []
        self.mirror = Mirror()
        routing = self._watch.routing(policies.routing.name, policies.new_routing())
        self._chooser = Chooser(self.mirror, routing, RouterMetrics(), clock=self.clock.now_s)
        self._moves = policies.worker_moves()
        self.not_simulated = not_simulated(
            policies, unknown or {}, has_host=spec.host_pages > 0, has_pool=spec.pool_pages > 0
        )
        """What the policies say and nobody does here; all that they order is carried out."""
        self.pool = self._new_pool(policies) if spec.pool_pages else None
        self._telling = Telling()
        self._takers: list[WorkerBooks] | None = None
        """Those that take requests; None where that is to be found out."""
        self.workers = [self._new_worker(place, policies) for place in spec.worker_places()]
        self._up = {worker.books.record.place: worker for worker in self.workers}
        overview = Overview(
            self.mirror,
            lambda: {place: worker.books for place, worker in self._up.items()},
            self._chooser.demand,
            self._chooser.conversations,
        )
        self.conductor = Conductor(
            [(name, self._watch.cluster(name, one)) for name, one in policies.new_cluster()],
            overview,
            self,
            self.pool,
            policies.prefixes,
        )
        self.lost = 0
        """Pages that workers had alone when they left."""
        self._ended: Callable[[], None] = lambda: None
        self._submitted = self._over = 0
        self._rounds = Rounds()
        self._changes = 0
        """Grows with all that orders and places that leave change."""
        self._coming_s = math.inf
        """When the next request arrives; infinite where none does."""
        self._over_s = 0.0
        self.outcomes = Outcomes()
        for leave in spec.leaves:
            self.clock.at(leave.at_s, functools.partial(self._leave, leave.place))
        if self.conductor.may_order or spec.leaves:
            self.clock.at(EVERY_S, self._tick)

    def run_open(self, trace: Sequence[TraceRequest], *, speed: float = 1.0) -> None:
        """Let requests arrive at the trace's times, `speed` times as fast.

        Raises:
            SetupError: The trace cannot be carried, or not so fast.
            StalledError: A user's policy has not come back.
        """
        if not _SLOWEST <= speed <= _FASTEST:
            raise SetupError(f"speed must be from {_SLOWEST} to {_FASTEST:,}, not {speed}")
        self._check(trace)
        last_s = max((request.arrival_s for request in trace), default=0.0) / speed
        if not last_s <= MOST_S:
            raise SetupError(
                f"the trace takes {last_s:,.0f} s, and no more than {MOST_S:,.0f} can be simulated"
            )
        coming = iter(trace)

        def arrive(request: TraceRequest) -> None:
            self._submit(request)
            plan()

        def plan() -> None:
            request = next(coming, None)
            self._coming_s = math.inf if request is None else request.arrival_s / speed
            if request is not None:
                self.clock.at(self._coming_s, lambda: arrive(request))

        plan()
        self._run()

    def run_closed(self, trace: Sequence[TraceRequest], *, clients: int) -> None:
        """Let so many clients ask one request after the other, in the trace's order."""
        within("clients", clients, 1, _MOST_CLIENTS)
        self._check(trace)
        coming: Iterator[TraceRequest] = iter(trace)

        def next_one() -> None:
            request = next(coming, None)
            if request is not None:
                self._submit(request)

        self._ended = lambda: _soon(self.clock, next_one)
        for _ in range(clients):
            _soon(self.clock, next_one)
        self._run()

    def check(self) -> None:
        """Raise `AssertionError` where parts contradict themselves or each other."""
        self.mirror.check()
        for place, worker in self._up.items():
            worker.engine.check()
            held = self.mirror.pages(place)
            counts = worker.engine.table.counts()
            assert held.get(Tier.DEVICE, 0) == counts.idle + counts.in_use
            if worker.host is not None:
                worker.host.check()
                assert held.get(Tier.HOST, 0) == len(worker.host)
        if self.pool is not None:
            self.pool.check()
            for place, node in self.pool.nodes.items():
                assert self.mirror.pages(place).get(Tier.POOL_RAM, 0) == len(node.tier)

    def orders_of(self, place: PlaceId) -> WorkerOrders | None:
        """Return what carries a worker's orders out; None where there is no such worker."""
        worker = self._up.get(place)
        return None if worker is None else worker.orders

    def _run(self) -> None:
        with self._watch:
            self.clock.run()

    def _retention(self, policies: PolicySet, name: str) -> RetentionManager:
        policy = self._watch.retention(policies.retention.name, policies.new_retention())
        return RetentionManager(policy, name=name)

    def _check(self, trace: Sequence[TraceRequest]) -> None:
        context = self.spec.engine.pages * self.spec.engine.page_tokens
        for number, request in enumerate(trace, start=1):
            length = request.prompt_tokens + request.output_tokens
            if length > context:
                raise SetupError(
                    f"request {number} has {length:,} tokens, and a worker's {self.spec.engine.pages:,} "
                    f"pages of {self.spec.engine.page_tokens} have room for {context:,}"
                )

    def _submit(self, request: TraceRequest) -> None:
        self._submitted += 1
        request_id = f"{self.spec.seed}/{self._submitted}"
        prefix = Prefix(request.tokens(), request.salt)
        self._telling.tell(self.clock.now_s())
        if self._takers is None:
            self._takers = [one.books for one in self._up.values() if not one.books.record.draining]
        chosen = self._chooser.choose(request_id, prefix, self._takers, session=request.session)
        place, now_s = chosen.link.record.place, self.clock.now_s()
        worker = self._up[place]
        outcome = Outcome(
            number=self._submitted,
            place=place,
            arrived_s=now_s,
            prompt_tokens=request.prompt_tokens,
            predicted_tokens=chosen.predicted_tokens,
        )
        self.outcomes.began(outcome)
        session, root = request.session, tenant_root(self._model, salt=request.salt)
        if self.conductor.may_order:
            self._chooser.demand.held_by(
                chosen.keys,
                now_s,
                model_root=self._model,
                tenant_tag=request.tenant,
                session_tag=session or "",
                root=root,
            )
        if session is not None:
            self._chooser.conversations.named((request.salt, session), session, request.tenant)
        running = Running(
            sink=Sink(outcome, self.clock, functools.partial(self._went, request, outcome)),
            keys=chosen.keys,
            new_tokens=len(prefix.ids) - chosen.predicted_tokens,
            prompt_tokens=len(prefix.ids),
        )
        worker.submit(request_id, prefix.ids, request, root, running)

    def _tick(self) -> None:
        """Do what is done once a second, or more seldom, as long as there is anything to do."""
        now_s = self.clock.now_s()
        self.conductor.round(now_s)
        if self.pool is not None:
            self.pool.look()
        leaving = any(worker.books.record.draining for worker in self._up.values())
        unsettled = self.pool is not None and not self.pool.is_settled
        coming_s = [leave.at_s for leave in self.spec.leaves if leave.at_s >= now_s]
        event_s = min([self._coming_s, *coming_s])
        is_busy = self._over < self._submitted or leaving
        before, pool = self._changes, self.pool
        self._changes = self.conductor.changes + (0 if pool is None else pool.copied + pool.dropped)
        if is_busy or math.isfinite(event_s) or (unsettled and now_s < self._over_s + _LINGER_S):
            moving = any(worker.orders.is_busy for worker in self._up.values())
            changed = moving or self._changes != before
            next_s = self._rounds.next_s(now_s, is_busy=is_busy, changed=changed, event_s=event_s)
            self.clock.at(next_s, self._tick)

    def _leave(self, place: PlaceId) -> None:
        """Let a place leave."""
        worker = self._up.get(place)
        if worker is None:
            assert self.pool is not None
            self.pool.leave(place)
            return

        def gone() -> None:
            self.lost += worker.orders.alone()
            del self._up[place]
            self._takers = None
            self._gone(place)

        self._takers = None
        worker.books.record = msgspec.structs.replace(worker.books.record, draining=True)
        self._changed(worker.books.record)
        worker.leave(LEAVE_S, self._moves.drain_share, gone)

    def _changed(self, record: PlaceRecord) -> None:
        self.mirror.place_up(record)

    def _gone(self, place: PlaceId) -> None:
        self.mirror.place_down(place)
        for kept in self._kept:
            if kept.place == place:
                kept.change(-kept.pages, self.clock.now_s())

    def _new_worker(self, place: PlaceId, policies: PolicySet) -> SimulatedWorker:
        engine, spec = self.spec.engine, self.spec
        page_bytes = spec.cost.bytes_of(engine.page_tokens)
        record = PlaceRecord(
            place=place,
            epoch=Epoch(1),
            kind=PlaceKind.WORKER,
            address="",
            model_root=self._model,
            model_name="simulated",
            page_tokens=engine.page_tokens,
            context_tokens=engine.pages * engine.page_tokens,
            tiers=(Tier.DEVICE, Tier.HOST) if spec.host_pages else (Tier.DEVICE,),
            total_pages=engine.pages,
            page_bytes=page_bytes,
        )
        publish = self._publisher(record)
        host = None
        if spec.host_pages:
            host = MockTier(
                Tier.HOST,
                spec.host_pages,
                page_bytes=page_bytes,
                retention=self._retention(policies, "host"),
                clock=self.clock,
                on_change=publish,
                model=self._model,
                page_tokens=self.spec.engine.page_tokens,
            )
        stores: PoolStores | None = spec.pool_stores
        if stores is PoolStores.BEHIND and not self._moves.stores_as_made:
            stores = None
        return SimulatedWorker(
            record,
            engine,
            spec.cost,
            self.clock,
            publish=publish,
            retention=self._retention(policies, "device"),
            host=host,
            pool=self.pool,
            pool_stores=stores,
            on_steps=self._telling.later,
        )

    def _new_pool(self, policies: PolicySet) -> SimulatedPool:
        page_tokens = self.spec.engine.page_tokens
        page_bytes = self.spec.cost.bytes_of(page_tokens)
        pages = self.spec.pool_pages // self.spec.pool_nodes

        def new_tier(record: PlaceRecord, on_change: OnChange) -> MockTier:
            publish = self._publisher(record)

            def changed(entries: Sequence[PageEntry], stored: bool) -> None:
                on_change(entries, stored)
                publish(entries, stored)

            return MockTier(
                Tier.POOL_RAM,
                pages,
                page_bytes=page_bytes,
                retention=self._retention(policies, record.place),
                clock=self.clock,
                on_change=changed,
                model=self._model,
                page_tokens=self.spec.engine.page_tokens,
            )

        return SimulatedPool(
            [
                PlaceRecord(
                    place=place,
                    epoch=Epoch(1),
                    kind=PlaceKind.POOL,
                    address="",
                    capacity_bytes=pages * page_bytes,
                )
                for place in self.spec.node_places()
            ],
            new_tier,
            self.spec.cost,
            page_tokens=page_tokens,
            clock=self.clock,
            on_record=self._changed,
            on_gone=self._gone,
        )

    def _publisher(self, record: PlaceRecord) -> Callable[[Sequence[PageEntry], bool], None]:
        """Return what a place says its changes through; they are known at once."""
        self.mirror.place_up(record)
        seq = 0
        kept: dict[Tier, Kept] = {}

        def publish(entries: Sequence[PageEntry], stored: bool) -> None:
            nonlocal seq
            seq += 1
            tier = entries[0].tier
            if tier not in kept:
                kept[tier] = Kept(record.place, tier)
                self._kept.append(kept[tier])
            kept[tier].change(len(entries) if stored else -len(entries), self.clock.now_s())
            event = PageStored if stored else PageRemoved
            self.mirror.apply(event(record.place, record.epoch, seq, tuple(entries)))

        return publish

    def page_seconds(self) -> dict[Tier, float]:
        """Return pages times the seconds that they were kept, by tier."""
        total: dict[Tier, float] = {}
        for kept in self._kept:
            kept.change(0, self.clock.now_s())
            total[kept.tier] = total.get(kept.tier, 0.0) + kept.page_seconds
        return total

    def _went(self, request: TraceRequest, outcome: Outcome) -> None:
        """Learn that a request is over, and which pages its conversation has then."""
        self.outcomes.over(outcome)
        if request.session is not None:
            # Made anew: kept while a request waits, the tokens of all would take gigabytes.
            prefix = Prefix(request.tokens(), request.salt)
            # The last token was drawn, and what it would add to a page is not computed.
            answer = array("I", (request.answer,)) * (request.output_tokens - 1)
            keys = prefix.longer(answer).keys(self._model, self.spec.engine.page_tokens)
            conversation = (request.salt, request.session)
            self._chooser.conversations.ended(conversation, keys, self.clock.now_s())
        self._over += 1
        self._over_s = self.clock.now_s()
        self._ended()


def _soon(clock: VirtualClock, call: Callable[[], None]) -> None:
    clock.at(clock.now_s(), call)
