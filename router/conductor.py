"""Cluster policies at work: one router of all asks them, once a second, and orders what they want.

Covers the lease that says which router that is, the view, and writing orders and events to Redis. Does
not cover what is decided (`pie.policies`) or how places carry it out (`pie.pool.migration`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

from pie.index.contract import PlaceRecord
from pie.index.errors import PageIndexError
from pie.index.lease import Lease
from pie.index.orders import CopiesTable, LoggedEvent, Orders
from pie.index.settings import IndexSettings
from pie.index.trouble import Trouble
from pie.page.events import PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterEvent, ClusterManager
from pie.policies.cluster_policy import ClusterView, GroupView
from pie.policies.policy_set import PolicySet
from pie.router.demand import Demand

log = logging.getLogger("pie.router.conductor")

_EVERY_S = 1.0
_LEASE_S = 5.0
_DEADLINE_S = 1.0
"""What a policy has to answer."""
_AGAIN_S = 60.0
"""A table that has not changed is set again so often, so that it is not forgotten."""
_SHOWN = 256
"""Groups that a policy is shown, beside those with more copies."""

Decided = tuple[dict[PageKey, int], list[ClusterEvent]]


class Conductor:
    """Runs one router's share of cluster policies. For one event loop.

    Args:
        url: Redis.
        name: What this router is called, for the lease.
        demand: What is asked for here.
        places: Says which places there are.
        policies: Those in force when it starts.
        settings: Key prefix and time limits.
    """

    def __init__(
        self,
        url: str,
        name: str,
        demand: Demand,
        places: Callable[[], list[PlaceRecord]],
        policies: PolicySet,
        *,
        settings: IndexSettings | None = None,
    ) -> None:
        self._orders = Orders(url, settings)
        self._lease = Lease(url, "policies", name, ttl_s=_LEASE_S, settings=settings)
        self._demand = demand
        self._places = places
        self._manager = _manager(policies)
        self._trouble = Trouble(log)
        self._set_s = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._asked: asyncio.Future[Decided] | None = None
        self.leads = False
        """Whether this router holds the lease."""

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def replace_policies(self, policies: PolicySet) -> None:
        """Ask other policies from now on."""
        self._manager = _manager(policies)

    async def close(self) -> None:
        """Stop, and let another router lead."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._give_back)

    def _give_back(self) -> None:
        try:
            self._lease.give_back()
        except PageIndexError as error:
            log.info("the lease of cluster policies ends by itself: %s", error)
        self._orders.close()

    async def _run(self) -> None:
        while True:
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
        self.leads = await asyncio.to_thread(self._lease.keep) is None
        if not self.leads:
            return
        table = await asyncio.to_thread(self._orders.table)
        before, now_s = table.by_key(), time.monotonic()
        view = self._view(before, now_s)
        decided = await self._decide(view, before)
        if decided is None:
            return
        after, events = decided
        if after != before or (after and now_s - self._set_s >= _AGAIN_S):
            self._set_s = now_s
            changed = CopiesTable(table.seq + 1, {group.hex(): n for group, n in after.items()})
            await asyncio.to_thread(self._orders.set_table, changed)
        if events:
            await asyncio.to_thread(self._orders.log, [_logged(event) for event in events])

    async def _decide(self, view: ClusterView, table: Mapping[PageKey, int]) -> Decided | None:
        """Ask the policy; None where it has not answered in time, or has not yet answered before.

        On a thread of its own, which ends with the process: a policy that hangs holds up nobody.
        """
        if self._asked is not None and not self._asked.done():
            return None
        manager, loop = self._manager, asyncio.get_running_loop()
        asked: asyncio.Future[Decided] = loop.create_future()
        self._asked = asked

        def settle(decided: Decided) -> None:
            if not asked.done():
                asked.set_result(decided)

        def work() -> None:
            decided = manager.decide(view, table)
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(settle, decided)

        threading.Thread(target=work, name="pie-cluster-policy", daemon=True).start()
        await asyncio.wait([asked], timeout=_DEADLINE_S)
        if asked.done():
            return asked.result()
        log.error("the cluster policy has not answered in %g s; nothing changes", _DEADLINE_S)
        return None

    def _view(self, table: dict[PageKey, int], now_s: float) -> ClusterView:
        nodes = [one for one in self._places() if one.kind is PlaceKind.POOL and not one.draining]
        least = max((one.copies for one in nodes), default=1)
        demand = self._demand
        shown = dict.fromkeys([*table, *demand.hottest(_SHOWN, now_s)])
        groups = [
            GroupView(group, demand.uses_per_s(group, now_s), table.get(group, least))
            for group in shown
        ]
        groups.sort(key=lambda one: -one.uses_per_s)
        return ClusterView(len(nodes), least, groups, now_s)


def _manager(policies: PolicySet) -> ClusterManager:
    return ClusterManager(policies.new_replication(), policies.replication.name)


def _logged(event: ClusterEvent) -> LoggedEvent:
    group = "" if event.group is None else event.group.hex()
    return LoggedEvent(
        round(time.time(), 3), event.policy, event.action, group, event.copies, event.reason
    )
