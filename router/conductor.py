"""Cluster policies at work: one router of all asks them, once a second, and orders what they want.

Covers the lease that says which router that is, the rounds, what routers tell each other in them, and writing
orders and events to Redis, of each router's routing policy too. Does not cover what policies are shown (`pie.router.overview`), what is decided
(`pie.policies`), orders on their way (`pie.router.ordering`) or how places carry them out (`pie.pool.migration`,
`pie.worker.orders`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pie.index.errors import PageIndexError
from pie.index.lease import Lease
from pie.index.orders import CopiesTable, LoggedEvent, Orders, WantedWorkers
from pie.index.router_views import Move
from pie.index.router_views_redis import RedisRouterViews
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from pie.index.trouble import Trouble
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterEvent, ClusterManager, Decision
from pie.policies.cluster_policy import ClusterPolicy, MoveSession, Wanted
from pie.policies.order_limits import BYTES_PER_S, DEADLINE_S
from pie.policies.policy_set import PolicySet
from pie.policies.prefixes import Prefixes
from pie.router.aside import AskedAside
from pie.router.failures import RoutingFailures
from pie.router.ordering import Ordering
from pie.router.overview import Overview
from pie.router.pauses import in_turns

log = logging.getLogger("pie.router.conductor")

_EVERY_S = 1.0
_LEASE_S = 5.0
_ROUND_S = _LEASE_S / 2
"""A round that has lasted longer is dropped: by its end another router may lead."""
_AGAIN_S = 60.0
"""A table that has not changed is set again so often, so that it is not forgotten."""
_MOST_UNLOGGED = 1_000
"""Events that wait while Redis is away: as many as it keeps."""
_HINTED_AGAIN_S = 10.0
_HINTED_S = 30.0
"""A hint that was read from Redis so long ago is shown no more."""
_GIVES_BACK_S = 10.0
"""How long closing waits for what is being asked of Redis, and for giving back after it."""

T = TypeVar("T")


class Conductor:
    """Runs one router's share of cluster policies. For one event loop.

    Args:
        url: Redis.
        name: What this router is called, for the lease.
        overview: What policies are shown.
        ordering: Who takes orders to workers; closed with this.
        policies: Those in force when it starts.
        resolve: Learns the pages of named prefixes, as far as that is possible now.
        failures: Of this router's routing policy, which are told as events too.
        on_event: Told of the policy and the action of each event.
        settings: Key prefix and time limits.
        bytes_per_s: How much orders may move in the whole cluster.
    """

    def __init__(
        self,
        url: str,
        name: str,
        overview: Overview,
        ordering: Ordering,
        policies: PolicySet,
        *,
        resolve: Callable[[Prefixes], Awaitable[None]] | None = None,
        failures: RoutingFailures | None = None,
        on_event: Callable[[str, str], None] = lambda _policy, _action: None,
        settings: IndexSettings | None = None,
        bytes_per_s: int = BYTES_PER_S,
    ) -> None:
        self._orders = Orders(url, settings)
        self._lease = Lease(url, "policies", name, ttl_s=_LEASE_S, settings=settings)
        self._views = RedisRouterViews(url, name, settings)
        # One thread, so that what a cancelled round has begun is over before the next call begins, whichever it is.
        self._thread = ThreadPoolExecutor(1, "pie-conductor")
        self._has_told = False
        self._overview = overview
        self._prefixes = policies.prefixes
        self._resolve = resolve
        self._name = name
        self._failures = failures or RoutingFailures()
        self._on_event = on_event
        self._ordering = ordering
        self._bytes_per_s = bytes_per_s
        self._manager = ClusterManager(policies.new_cluster(), bytes_per_s=bytes_per_s)
        self._aside = AskedAside(len(self._manager.names))
        self._trouble = Trouble(log)
        self._set_s = float("-inf")
        self._wanted: Mapping[str, Wanted] = {}
        self._wanted_s = float("-inf")
        self._hinted_s = float("-inf")
        self._unlogged: deque[LoggedEvent] = deque(maxlen=_MOST_UNLOGGED)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.leads = False
        """Whether this router holds the lease."""

    @property
    def wanted(self) -> Mapping[str, Wanted]:
        """How many workers models should have, whichever router's policy says so."""
        return self._wanted if time.monotonic() - self._wanted_s < _HINTED_S else {}

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def show_prefixes(self, prefixes: Prefixes) -> None:
        """Show policies other named prefixes from now on."""
        self._prefixes = prefixes

    def replace_policies(self, policies: Sequence[tuple[str, ClusterPolicy]]) -> None:
        """Ask other policies from now on, each with its name."""
        before = self._manager
        self._manager = ClusterManager(policies, bytes_per_s=self._bytes_per_s)
        self._manager.go_on_from(before)
        self._aside = AskedAside(len(self._manager.names))

    async def close(self) -> None:
        """Stop, and let another router lead."""
        self._closed = True
        if self._task is not None:
            await end([self._task])
        await self._ordering.close()
        self._note(self._ordering.take_told())
        giving_back = asyncio.ensure_future(self._call(self._give_back))
        _, late = await asyncio.wait([giving_back], timeout=_GIVES_BACK_S)
        if late:
            log.warning(
                "the lease of cluster policies is not given back in %g s; it is once Redis has answered",
                _GIVES_BACK_S,
            )
        else:
            giving_back.result()
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[..., T], *args: object) -> T:
        """Do what asks Redis on the thread for that, after what is being done there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _give_back(self) -> None:
        try:
            self._lease.give_back()
        except PageIndexError as error:
            log.info("the lease of cluster policies ends by itself: %s", error)
        try:
            self._orders.log(list(self._unlogged))
        except PageIndexError as error:
            log.info("%d events of cluster policies are lost: %s", len(self._unlogged), error)
        try:
            self._views.close()
        except PageIndexError as error:
            log.info("what this router has told others is forgotten by itself: %s", error)
        self._orders.close()

    async def _run(self) -> None:
        while not self._closed:
            await asyncio.sleep(_EVERY_S)
            try:
                await self._round()
            except PageIndexError as error:
                self.leads = False
                self._trouble.begins("cluster policies are not asked: %s", error)
            except Exception:
                log.exception("cluster policies were not asked")
            else:
                self._trouble.ends("cluster policies are asked again")

    async def _round(self) -> None:
        led_s = time.monotonic()
        self.leads = await self._call(self._lease.keep) is None
        told = await self._call(self._orders.wanted)
        self._show({model: _wanted(one) for model, one in told.items()})
        if not self.leads:
            await self._tell()
            await self._log()
            return
        await self._hear()
        table = await self._call(self._orders.table)
        before, now_s = table.by_key(), time.monotonic()
        manager, aside = self._manager, self._aside
        manager.inherit(before)
        prefixes = self._prefixes
        if self._resolve is not None:
            await self._resolve(prefixes)
        view = await self._overview.view(before, now_s, self._wanted, prefixes)
        questions = [
            functools.partial(manager.ask, number, manager.shown(number, view))
            for number in range(len(manager.names))
        ]
        asked, late = await aside.ask(questions, DEADLINE_S)
        for number in late:
            log.error(
                "the cluster policy %s has not answered in %g s; nothing of it changes",
                manager.names[number],
                DEADLINE_S,
            )
        if manager is not self._manager or self._is_late(led_s):
            return
        decision = await in_turns(manager.disposing(asked, view, before, self._overview))
        if manager is not self._manager or self._is_late(led_s):
            return
        if not await self._set(table, decision.table, now_s) or self._is_late(led_s):
            return
        manager.keep(decision)
        if manager is not self._manager:
            # Policies were replaced just now.
            self._manager.go_on_from(manager)
        self._note(decision.events)
        await self._carry_out(decision, now_s)
        await self._hint(decision.wanted, now_s)
        await self._log()

    def _is_late(self, led_s: float) -> bool:
        """Return whether a round, for which the lease was kept then, may have outlasted it, as that of a process that stood still."""
        lasted_s = time.monotonic() - led_s
        if lasted_s <= _ROUND_S:
            return False
        log.warning("a round of cluster policies took %.1f s; nothing comes of it", lasted_s)
        return True

    async def _set(self, table: CopiesTable, after: Mapping[PageKey, int], now_s: float) -> bool:
        """Put other copies in force, or the same ones in time; return False where another router has done so."""
        if not table.readable:
            log.error(
                "the table of copies in Redis cannot be read; it counts as none, and is written anew"
            )
        stale = not table.readable or (after and now_s - self._set_s >= _AGAIN_S)
        if after == table.by_key() and not stale:
            return True
        changed = CopiesTable(table.seq + 1, {group.hex(): n for group, n in after.items()})
        if not await self._call(self._orders.set_table, changed, table):
            log.warning("another router has set copies meanwhile; nothing comes of this round")
            return False
        self._set_s = now_s
        return True

    async def _hint(self, wanted: Mapping[str, Wanted], now_s: float) -> None:
        """Tell all routers how many workers models should have."""
        if wanted == self._wanted and (not wanted or now_s - self._hinted_s < _HINTED_AGAIN_S):
            return
        self._hinted_s = now_s
        self._show(wanted)
        told = {
            model: WantedWorkers(one.workers, one.reason, one.policy)
            for model, one in wanted.items()
        }
        await self._call(self._orders.set_wanted, told)

    def _show(self, wanted: Mapping[str, Wanted]) -> None:
        self._wanted, self._wanted_s = wanted, time.monotonic()

    async def _tell(self) -> None:
        """Tell the router that leads what this one sees, and hear which conversations it has moved."""
        now_s = time.monotonic()
        self._has_told = True
        for move in await self._call(self._views.tell, self._overview.seen(now_s)):
            self._overview.conversations.move(move.tag, move.place, now_s)

    async def _hear(self) -> None:
        """Hear what the other routers see; nobody looks at it meanwhile."""
        if self._has_told:
            await self._call(self._views.withdraw)
            self._has_told = False
        await self._call(self._learn)

    def _learn(self) -> None:
        self._overview.elsewhere.learn(self._views.others(), time.monotonic())

    async def _carry_out(self, decision: Decision, now_s: float) -> None:
        moves = []
        for given in decision.given:
            order = given.order
            if isinstance(order, MoveSession):
                self._overview.conversations.move(order.session, order.place, now_s)
                moves.append(Move(order.session, order.place))
            else:
                self._ordering.send(given)
        await self._call(self._views.move, moves)

    def _note(self, events: Sequence[ClusterEvent]) -> None:
        """Count events, and keep them until they are logged."""
        for event in events:
            self._on_event(event.policy, event.action)
            self._unlogged.append(_logged(event))

    async def _log(self) -> None:
        """Log what waits, and what became of orders; a part of it may be logged twice where Redis goes away meanwhile."""
        self._note(self._ordering.take_told())
        self._note(self._failures.take(self._name, time.monotonic()))
        if not self._unlogged:
            return
        await self._call(self._orders.log, list(self._unlogged))
        self._unlogged.clear()


def _logged(event: ClusterEvent) -> LoggedEvent:
    group = "" if event.group is None else event.group.hex()
    return LoggedEvent(
        round(time.time(), 3),
        event.policy,
        event.action,
        group,
        event.copies,
        event.reason,
        event.place,
        event.pages,
        event.model,
        event.workers,
    )


def _wanted(told: WantedWorkers) -> Wanted:
    return Wanted(told.workers, told.reason, told.policy)
