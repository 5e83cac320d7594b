"""One worker as a service: wire server, engine, index publisher and pool client in one process.

Covers starting, draining and closing them in order, and carrying messages between routers and the
step thread. Does not cover who starts the process and watches it (`pie.cluster`).

A router is sent its worker's load with every step that brings it tokens, and in any case once a
second: what other routers have sent is part of it, whether or not it brought tokens yet.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from pie.index.contract import PlaceRecord
from pie.index.errors import PlaceFencedError
from pie.index.policy_follower import PolicyFollower
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.policy_set import PolicySet, WorkerMoves
from pie.policies.versions import PolicyVersions
from pie.pool.index_relay import IndexRelay
from pie.pool.settings import PoolSettings
from pie.wire import place_orders as orders
from pie.wire.errors import PeerGone, RefusedError
from pie.wire.figures import report
from pie.wire.messages import (
    AskStatus,
    Cancel,
    Generate,
    Message,
    RefusalCode,
)
from pie.wire.peer import Peer
from pie.wire.program_runs import StartProgram, TellProgram
from pie.wire.server import WireServer
from pie.wire.settings import WORKER_LIMITS
from pie.worker.assembly import (
    Assembly,
    assemble,
    make_engine,
    make_grammars,
    make_host,
    make_record,
    tiers_of,
)
from pie.worker.awaiting import Awaiting
from pie.worker.commands import CancelAll, CancelOne, StepReport, Submit
from pie.worker.engine import Engine
from pie.worker.engine_thread import EngineThread
from pie.worker.grammar import Constraint
from pie.worker.grammar_queue import GrammarQueue
from pie.worker.holdings import Holdings
from pie.worker.intake import Intake
from pie.worker.joining import Joining, usual_replication
from pie.worker.leaving import Emptying, Leaving
from pie.worker.lower_tiers import LowerTiers
from pie.worker.named_prefixes import Preloading, expect_prefixes, resolve_prefixes
from pie.worker.offload import Offload
from pie.worker.orders import PageOrders
from pie.worker.outboxes import Outboxes
from pie.worker.page_copies import PageCopies, PageNames
from pie.worker.page_pool import PagePool
from pie.worker.page_table import Change
from pie.worker.programs.host import ProgramHost
from pie.worker.programs.serving import ProgramService
from pie.worker.settings import ModelSettings, ProgramSettings
from pie.worker.status import WorkerStatus
from pie.worker.suspended import SuspendedPages, suspended_budget

log = logging.getLogger("pie.worker.service")

_STEP_ENDS_S = 30.0
"""Longest wait for the step under way when a worker is closed."""


class WorkerService:
    """A worker: loads a model, serves `Generate` on its wire address, publishes its pages.

    Args:
        place: The worker's name, the same across its restarts.
        settings: The `[model]` section.
        policies: Which retention policy chooses victims.
        index_settings: The `[index]` section.
        index_url: Redis that the index lives in, whatever `index_settings.url` says.
        address: Wire address to bind, such as `ipc:///run/pie/w0` or `curve://10.0.0.5:0`.
        epoch: This start's number, larger than that of any earlier start of `place`.
        pool_settings: The `[pool]` section; None uses no pool.
        programs: The `[programs]` section; None runs none.
        secret: 32 bytes that all of the cluster share: pages that leave device memory are keyed
            with them, and connections beyond this host.
        encryption_keys: What pages on disk are encrypted with: the first writes, all read.
        on_dead: Called on the event loop when this start is over, through a bug in the engine or
            because a later start is up: the process should be replaced.
        debug: Check all invariants whenever idle.
    """

    def __init__(
        self,
        place: PlaceId,
        settings: ModelSettings,
        *,
        policies: PolicySet,
        index_settings: IndexSettings,
        index_url: str,
        address: str,
        epoch: Epoch,
        pool_settings: PoolSettings | None = None,
        programs: ProgramSettings | None = None,
        secret: bytes | None = None,
        encryption_keys: Sequence[bytes] = (),
        on_dead: Callable[[BaseException], None] | None = None,
        debug: bool = False,
    ) -> None:
        self._place = place
        self._settings = settings
        self._policies = PolicyVersions(policies)
        self._index_settings = index_settings
        self._index_url = index_url
        self._epoch = epoch
        self._pool_settings = pool_settings
        self._program_settings = programs
        self._secret = secret
        self._encryption_keys = encryption_keys
        self._on_dead = on_dead
        self._debug = debug
        limit = 2 * (settings.max_running + settings.max_waiting)
        self._outboxes = Outboxes(epoch, limit, self._router_gone)
        self._server = WireServer(
            address,
            self._handle,
            epoch=epoch,
            on_peer=self._outboxes.open,
            settings=WORKER_LIMITS,
            secret=secret,
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self._exits = AsyncExitStack()
        self._state = "starting"
        self._record: PlaceRecord | None = None
        self._engine: Engine | None = None
        self._tiers: LowerTiers | None = None
        self._thread: EngineThread | None = None
        self._intake: Intake | None = None
        self._host: ProgramHost | None = None
        self._programs: ProgramService | None = None
        self._grammars: GrammarQueue | None = None
        self._awaiting = Awaiting(settings.max_waiting)
        self._follower: PolicyFollower | None = None
        self._publisher: Publisher | None = None
        self._offload: Offload | None = None
        self._orders: PageOrders | None = None
        self._leaving: Leaving | None = None
        self._emptying = Emptying()
        self._is_stopping = False
        self._moves = policies.worker_moves()
        self._joining = Joining(
            place,
            index_url,
            index_settings,
            secret,
            usual_replication(pool_settings),
            self._exits,
        )
        self._submitted = 0
        self._taken = 0
        """Of the requests submitted, those that the engine has seen."""
        self._refused = 0

    async def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Load the model, bind the wire address and announce the worker.

        `progress` is called, from any thread, with one sentence for each stage that takes time.

        Raises:
            WorkerError: The model cannot be had or served; the message says why in one sentence.
            AddressError: The address cannot be bound.
        """
        try:
            await self._start(progress)
        except BaseException:
            await self.close()
            raise

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and return when the running ones are done or time is up.

        What only this worker has goes to the pool, and with a disk, what only host memory holds goes there
        after that, as far as the time lasts.
        """
        self._is_stopping = True
        await self._leave(timeout_s)

    async def _leave(self, timeout_s: float) -> tuple[int, int]:
        self._awaiting.release()
        self._announce("draining")
        if self._leaving is None:
            return 0, 0
        return await self._leaving.leave(timeout_s, self._moves.drain_share)

    def _take_again(self) -> None:
        if self._is_stopping or self._state not in ("draining", "serving"):
            raise RefusedError(RefusalCode.DRAINING, "the worker is stopping")
        self._emptying.take_back()
        self._announce("serving")

    def _announce(self, state: str) -> None:
        self._state, draining = state, state == "draining"
        if self._publisher is not None and self.record.draining is not draining:
            self._record = msgspec.structs.replace(self.record, draining=draining)
            self._publisher.change(self._record)

    async def _requests_end(self) -> None:
        await self._idle.wait()
        if self._programs is not None:
            await self._programs.ended()
        await self._outboxes.sent()

    async def close(self) -> None:
        """Stop at once and give everything back. Safe to call twice, and after a failed start."""
        self._state = "closed"
        self._emptying.take_back()
        await self._exits.aclose()

    @property
    def record(self) -> PlaceRecord:
        """What the worker announced; valid after `start`."""
        assert self._record is not None, "the worker has not started"
        return self._record

    def status(self) -> WorkerStatus:
        """Return the worker's counters and gauges as they are now."""
        status = WorkerStatus(state=self._state) if self._engine is None else self._engine.status
        below = {} if self._tiers is None else self._tiers.figures()
        below |= {} if self._orders is None else self._orders.figures()
        policies = None if self._follower is None else self._follower.state
        return msgspec.structs.replace(
            status,
            state=self._state,
            refused=status.refused + self._refused,
            **self._awaiting.figures(),
            policy_version=policies.version if policies else 0,
            policy_refused=policies.refused if policies else 0,
            **below,
        )

    def check(self) -> None:
        """Raise `AssertionError` where the worker's parts contradict each other; when at rest."""
        if self._engine is not None:
            self._engine.check()
        if self._tiers is not None:
            self._tiers.check()

    async def _start(self, progress: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        assembly = await asyncio.to_thread(assemble, self._settings, progress)

        resolve = functools.partial(resolve_prefixes, assembly.model, assembly.tokenizer)
        own = self._policies.current
        await asyncio.to_thread(resolve, own)
        self._intake = Intake(assembly.model.vocab_size, assembly.context_tokens)
        self._grammars = make_grammars(assembly)
        self._exits.callback(self._grammars.close)
        address = await self._server.start()
        self._exits.push_async_callback(self._server.close)
        holdings, relay = Holdings(assembly.model.layout), IndexRelay()
        copies = PageCopies(
            assembly.arena,
            PageNames(assembly.model.model_root, assembly.model.layout),
            secret=self._secret,
        )
        tiers = self._tiers = await asyncio.to_thread(
            tiers_of,
            self._settings,
            self._place,
            copies,
            secret=self._secret,
            encryption_keys=self._encryption_keys,
            retention=own.new_retention_aside,
            index=relay,
        )
        if tiers is not None:
            self._exits.push_async_callback(asyncio.to_thread, tiers.close)
        self._record = make_record(
            assembly,
            place=self._place,
            epoch=self._epoch,
            address=address,
            tiers=() if tiers is None else tiers.kinds,
            ttl_s=self._index_settings.ttl_s,
            takes_programs=self._takes_programs,
        )

        publisher = self._joining.publisher(self._record, holdings, tiers, self._fenced)
        relay.connect(publisher)

        def publish(changes: list[Change]) -> None:
            holdings.apply(changes, publisher)

        self._engine = make_engine(
            assembly, self._settings, own.new_retention_aside, publish, debug=self._debug
        )

        def take_report(report: StepReport) -> None:
            loop.call_soon_threadsafe(self._take_report, report)

        def dead(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._dead, error)

        self._thread = EngineThread(self._engine, take_report, dead)
        pool = await self._joining.pool(self._pool_settings)
        if pool is not None:
            self._awaiting.attach(pool, copies.names, self._intake)
            self._exits.push_async_callback(self._awaiting.close)
        self._use_below(assembly, copies, pool, tiers)
        self._leaving = Leaving(self._requests_end, holdings, self._orders, tiers)
        self._thread.start()
        self._exits.push_async_callback(asyncio.to_thread, self._thread.stop, _STEP_ENDS_S)
        if self._orders is not None:
            self._exits.push_async_callback(self._orders.close)
        if self._takes_programs:
            self._begin_programs(assembly)
        engine = self._engine
        loads = loop.create_task(self._outboxes.tell_loads(lambda: engine.load))
        self._exits.callback(loads.cancel)
        self._exits.push_async_callback(self._outboxes.close)
        self._follower = await self._joining.policies(
            self._policies,
            self._thread,
            engine.tables,
            tiers,
            resolve=resolve,
            preloading=Preloading(tiers, pool, copies.names, self._settings.transfer_timeout_s),
            on_moves=self._set_moves,
        )
        self._state = "serving"
        # Last, so that nobody sends requests before they can be taken.
        await publisher.start()
        self._publisher = publisher
        self._exits.push_async_callback(publisher.close)
        self._exits.callback(relay.connect, None)

    def _use_below(
        self,
        assembly: Assembly,
        copies: PageCopies,
        pool: PagePool | None,
        tiers: LowerTiers | None,
    ) -> None:
        """Let the engine use what is below device memory, and take orders about it, where there is any."""
        if pool is None and tiers is None:
            return
        engine, thread, rate = self._engine, self._thread, self._settings.order_rate
        assert engine is not None
        assert thread is not None
        limit_s, put = self._settings.transfer_timeout_s, thread.put
        offload = self._offload = Offload(copies, pool=pool, tiers=tiers, put=put, limit_s=limit_s)
        self._exits.push_async_callback(offload.close)
        kept = suspended_budget(self._settings.host_kv_budget, assembly.model.layout)
        engine.attach(offload, SuspendedPages(assembly.arena, copies.names, kept))
        storing, lending = offload.storing, engine.lending
        self._orders = PageOrders(copies, storing, lending, thread, rate, pool=pool, tiers=tiers)

    def _begin_programs(self, assembly: Assembly) -> None:
        assert self._program_settings is not None
        assert self._thread is not None
        assert self._grammars is not None
        put = self._thread.put
        self._host = make_host(assembly, self._program_settings, put, self._grammars)
        self._programs = ProgramService(self._host)
        self._exits.push_async_callback(self._programs.close)

    def _set_moves(self, moves: WorkerMoves) -> None:
        self._moves = moves
        if self._offload is not None:
            self._offload.set_moves(moves)

    async def _handle(self, peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        """Take one message of a router."""
        assert self._thread is not None
        match message:
            case Generate():
                try:
                    constraint = None
                    if message.grammar is not None:
                        assert self._grammars is not None
                        constraint = await self._grammars.compiled(message.grammar)
                    request = await self._awaiting.wait(peer.id, message, frames)
                    if request is not None:
                        self._generate(peer, request, frames, self._thread, constraint)
                except RefusedError:
                    self._refused += 1
                    raise
            case Cancel(request_id):
                self._awaiting.cancel(peer.id, request_id)
                self._thread.put(CancelOne(peer.id, request_id))
                if self._programs is not None:
                    self._programs.cancel(peer.id, request_id)
            case AskStatus(request_id):
                status = self.status()
                await peer.send(report(request_id, self._place, self._epoch, status.state, status))
            case StartProgram():
                self._check_serving()
                await self._program_service().start(peer, message, frames)
            case TellProgram():
                await self._program_service().tell(peer, message)
            case _:
                await peer.send(await self._ordered(message))

    async def _ordered(self, message: Message) -> Message:
        """Carry out an order, and return the answer."""
        text = f"a worker takes no {type(message).__name__}"
        match message:
            case orders.DrainNode(request_id, _, timeout_s):
                told = await self._emptying.join(lambda: self._leave(timeout_s))
                return orders.Drained(request_id, *told)
            case orders.TakeAgain(request_id, _):
                self._take_again()
                return orders.TakesAgain(request_id)
            case orders.StoreInPool() | orders.BringNear() | orders.LetGoOf():
                if self._orders is not None:
                    return await self._orders.carry_out(message)
                text = "this worker has nothing below device memory"
        raise RefusedError(RefusalCode.BAD_MESSAGE, text)

    def _generate(
        self,
        peer: Peer,
        request: Generate,
        frames: Sequence[memoryview],
        thread: EngineThread,
        constraint: Constraint | None,
    ) -> None:
        assert self._intake is not None
        self._check_serving()
        tokens = self._intake.tokens(request, frames)
        expect_prefixes(self._policies.current.prefixes, self.record, request.salt, tokens)
        outbox = self._outboxes.of(peer.id)
        if outbox is None:
            raise PeerGone("the router went before its request was taken on")
        if outbox.is_full:
            raise RefusedError(
                RefusalCode.OVERLOADED, "the router takes its answers too slowly", 1.0
            )
        if self._submitted - self._taken > self._settings.max_running + self._settings.max_waiting:
            raise RefusedError(RefusalCode.OVERLOADED, "the engine is behind", 1.0)
        self._idle.clear()
        self._submitted += 1
        thread.put(Submit(peer.id, request, tokens, constraint))

    @property
    def _takes_programs(self) -> bool:
        return self._program_settings is not None and self._program_settings.allow

    def _program_service(self) -> ProgramService:
        if self._programs is None:
            raise RefusedError(
                RefusalCode.BAD_MESSAGE, "this worker runs no programs ([programs] allow)"
            )
        return self._programs

    def _check_serving(self) -> None:
        if self._state != "serving":
            raise RefusedError(RefusalCode.DRAINING, f"the worker is {self._state}", 1.0)

    def _router_gone(self, owner: bytes) -> None:
        self._awaiting.cancel_all(owner)
        if self._thread is not None:
            self._thread.put(CancelAll(owner))
        if self._programs is not None:
            self._programs.cancel_all(owner)

    def _take_report(self, report: StepReport) -> None:
        self._outboxes.take(report)
        if report.programs and self._host is not None:
            self._host.take(report.programs)
        self._taken = report.submitted
        # What was submitted since that report was made is not in it.
        if report.idle and self._taken == self._submitted:
            self._idle.set()

    def _fenced(self) -> None:
        """End this start: routers know a later one of this place, or the clock was set back."""
        self._dead(PlaceFencedError(f"{self._place} is up in a later epoch than {self._epoch}"))

    def _dead(self, error: BaseException) -> None:
        """Take no more requests; whoever made this worker ends its process, which routers see."""
        log.error("%s ends: %s", self._place, error)
        self._state = "failed"
        if self._host is not None:
            self._host.end_all()
        if self._on_dead is not None:
            self._on_dead(error)
