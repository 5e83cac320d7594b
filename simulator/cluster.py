"""A cluster in virtual time: the router's real choice and index over mock engines.

Covers putting the parts together, and letting a trace run through. Does not cover one engine
(`pie.simulator.engine`) or what is said of it afterwards (`pie.simulator.report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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
from pie.page.key import model_root
from pie.policies.manager import RetentionManager
from pie.policies.policy_set import PolicySet
from pie.router.books import Running
from pie.router.choice import Chooser
from pie.router.metrics import RouterMetrics
from pie.router.prefix import Prefix
from pie.simulator.clock import VirtualClock
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import EngineSpec
from pie.simulator.errors import SetupError
from pie.simulator.outcome import Outcome
from pie.simulator.tier import MockTier
from pie.simulator.trace import TraceRequest
from pie.simulator.worker import PoolStores, SimulatedWorker
from pie.wire.messages import Refused, TokenDelta

MODEL = model_root(fingerprint=b"simulated", dtype="none", page_tokens=0, layout_id="simulated")
_POOL = PlaceId("pool")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What is simulated."""

    workers: int = 4
    engine: EngineSpec = field(default_factory=EngineSpec)
    cost: CostModel = field(default_factory=CostModel)
    pool_pages: int = 0
    """Pages that the pool has room for; 0 for no pool."""
    pool_stores: PoolStores = PoolStores.BEHIND
    seed: int = 0
    """Names the requests, and so the lots that decide among equals."""

    def check(self) -> None:
        """Raise `SetupError` where it cannot be simulated."""
        self.engine.check()
        self.cost.check()
        if not 1 <= self.workers <= 10_000:
            raise SetupError(f"workers must be from 1 to 10,000, not {self.workers}")
        if self.pool_pages < 0:
            raise SetupError(f"pool_pages must be at least 0, not {self.pool_pages}")


class SimulatedCluster:
    """Workers, a pool and a router over one virtual clock. For one trace.

    Args:
        spec: What it is made of.
        policies: Which ones decide.
    """

    def __init__(self, spec: ClusterSpec, policies: PolicySet) -> None:
        spec.check()
        self.spec = spec
        self.clock = VirtualClock()
        self._kept: list[_Kept] = []
        self.mirror = Mirror()
        self._chooser = Chooser(self.mirror, policies.new_routing(), RouterMetrics())
        self.pool = self._new_pool(policies) if spec.pool_pages else None
        self.workers = [self._new_worker(number, policies) for number in range(spec.workers)]
        self._ended: Callable[[], None] = lambda: None
        self._submitted = 0
        self.outcomes: list[Outcome] = []

    def run_open(self, trace: Sequence[TraceRequest], *, speed: float = 1.0) -> None:
        """Let requests arrive at the trace's times, `speed` times as fast."""
        if not (math.isfinite(speed) and speed > 0):
            raise SetupError(f"speed must be a number above 0, not {speed}")
        self._check(trace)
        coming = iter(trace)

        def arrive(request: TraceRequest) -> None:
            self._submit(request)
            plan()

        def plan() -> None:
            request = next(coming, None)
            if request is not None:
                self.clock.at(request.arrival_s / speed, lambda: arrive(request))

        plan()
        self.clock.run()

    def run_closed(self, trace: Sequence[TraceRequest], *, clients: int) -> None:
        """Let so many clients ask one request after the other, in the trace's order."""
        if clients < 1:
            raise SetupError(f"clients must be at least 1, not {clients}")
        self._check(trace)
        coming: Iterator[TraceRequest] = iter(trace)

        def next_one() -> None:
            request = next(coming, None)
            if request is not None:
                self._submit(request)

        self._ended = lambda: _soon(self.clock, next_one)
        for _ in range(clients):
            _soon(self.clock, next_one)
        self.clock.run()

    def check(self) -> None:
        """Raise `AssertionError` where parts contradict themselves or each other."""
        self.mirror.check()
        for worker in self.workers:
            worker.engine.check()
            held = self.mirror.pages(worker.books.record.place).get(Tier.DEVICE, 0)
            counts = worker.engine.table.counts()
            assert held == counts.idle + counts.in_use
        if self.pool is not None:
            self.pool.check()
            assert self.mirror.pages(_POOL).get(Tier.POOL_RAM, 0) == len(self.pool)

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
        prefix = Prefix(request.tokens())
        for worker in self.workers:
            worker.tell_load()
        chosen = self._chooser.choose(
            request_id, prefix, [worker.books for worker in self.workers], session=request.session
        )
        worker = next(w for w in self.workers if w.books is chosen.link)
        outcome = Outcome(
            number=self._submitted,
            place=chosen.link.record.place,
            arrived_s=self.clock.now_s(),
            prompt_tokens=request.prompt_tokens,
            predicted_tokens=chosen.predicted_tokens,
        )
        self.outcomes.append(outcome)
        running = Running(
            sink=_Sink(outcome, self),
            keys=chosen.keys,
            new_tokens=len(prefix.ids) - chosen.predicted_tokens,
            prompt_tokens=len(prefix.ids),
        )
        worker.submit(request_id, prefix.ids, request, MODEL, running)

    def _new_worker(self, number: int, policies: PolicySet) -> SimulatedWorker:
        engine = self.spec.engine
        record = PlaceRecord(
            place=PlaceId(f"worker-{number}"),
            epoch=Epoch(1),
            kind=PlaceKind.WORKER,
            address="",
            model_root=MODEL,
            page_tokens=engine.page_tokens,
            context_tokens=engine.pages * engine.page_tokens,
            total_pages=engine.pages,
        )
        return SimulatedWorker(
            record,
            engine,
            self.spec.cost,
            self.clock,
            publish=self._publisher(record),
            retention=RetentionManager(policies.new_retention(), name="device"),
            pool=self.pool,
            pool_stores=self.spec.pool_stores,
        )

    def _new_pool(self, policies: PolicySet) -> MockTier:
        record = PlaceRecord(place=_POOL, epoch=Epoch(1), kind=PlaceKind.POOL, address="")
        return MockTier(
            Tier.POOL_RAM,
            self.spec.pool_pages,
            page_bytes=self.spec.cost.bytes_of(self.spec.engine.page_tokens),
            retention=RetentionManager(policies.new_retention(), name="pool"),
            clock=self.clock,
            on_change=self._publisher(record),
        )

    def _publisher(self, record: PlaceRecord) -> Callable[[Sequence[PageEntry], bool], None]:
        """Return what a place says its changes through; they are known at once."""
        self.mirror.place_up(record)
        seq = 0
        kept: dict[Tier, _Kept] = {}

        def publish(entries: Sequence[PageEntry], stored: bool) -> None:
            nonlocal seq
            seq += 1
            tier = entries[0].tier
            if tier not in kept:
                kept[tier] = _Kept(tier)
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

    def ended(self) -> None:
        """Learn that a request has ended."""
        self._ended()


@dataclass(slots=True)
class _Kept:
    """How many pages a place has in a tier, over time."""

    tier: Tier
    page_seconds: float = 0.0
    pages: int = 0
    since_s: float = 0.0

    def change(self, pages: int, now_s: float) -> None:
        """Count what was there until now; from now on there are so many more."""
        self.page_seconds += self.pages * (now_s - self.since_s)
        self.pages += pages
        self.since_s = now_s


@dataclass(slots=True)
class _Sink:
    """Writes down what becomes of a request."""

    outcome: Outcome
    cluster: SimulatedCluster

    def on_delta(self, delta: TokenDelta) -> None:
        """Take new tokens."""
        now_s = self.cluster.clock.now_s()
        if delta.started is not None:
            cached = delta.started.cached
            self.outcome.first_token_s = now_s
            self.outcome.cached = {
                tier: tokens
                for tier, tokens in (
                    ("device", cached.device),
                    ("host", cached.host),
                    ("disk", cached.disk),
                    ("pool", cached.pool),
                )
                if tokens
            }
        self.outcome.output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.outcome.ended_s = now_s
            self.cluster.ended()

    def on_refused(self, refused: Refused) -> None:
        """Learn that the worker's queue is full."""
        del refused
        self.outcome.refused = True
        self.cluster.ended()

    def on_gone(self) -> None:
        """Workers stay."""


def _soon(clock: VirtualClock, call: Callable[[], None]) -> None:
    clock.at(clock.now_s(), call)
