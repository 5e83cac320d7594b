"""The router that leads, when it stands still, and when Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from pie.index.lease import Lease
from pie.index.mirror import Mirror
from pie.index.orders import CopiesTable, LoggedEvent, Orders
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterEvent, ClusterManager, Decision
from pie.policies.cluster_policy import (
    ClusterView,
    MoveSession,
    Order,
    PlaceView,
    SessionView,
    SetCopies,
    Wanted,
)
from pie.policies.policy_set import PolicySet
from pie.policies.prefixes import NO_PREFIXES, Prefixes
from pie.router import conductor as module
from pie.router.conductor import Conductor
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.ordering import Ordering
from pie.router.overview import Overview
from tests.router.conftest import WAIT_S, until
from tests.support.redis_server import own_redis_server

__all__ = ["own_redis_server"]

GROUP = PageKey(b"1" * 32)
PLACES = [PlaceView(PlaceId(name), PlaceKind.WORKER) for name in ("w0", "w1")]
SESSION = SessionView("s", PlaceId("w0"), None, 0.0, 9.0, ())


class Says:
    """A policy that orders what a test says."""

    def __init__(self, *orders: Order) -> None:
        self.orders = orders

    def decide(self, shown: ClusterView) -> Iterable[Order]:
        return self.orders


class Paused(Overview):
    """Looks at a cluster of four nodes, each time when a test lets it."""

    def __init__(self) -> None:
        super().__init__(Mirror(), dict, Demand(), Conversations())
        self.looks = 0
        self.go_on = asyncio.Event()

    async def view(
        self,
        table: Mapping[PageKey, int],
        now_s: float,
        wanted: Mapping[str, Wanted] | None = None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> ClusterView:
        self.looks += 1
        await self.go_on.wait()
        self.go_on.clear()
        return ClusterView(4, 1, (), now_s, PLACES, [SESSION])


class Clock:
    """The time, and as much more as the process is said to have stood still."""

    def __init__(self) -> None:
        self.stood_s = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self.stood_s


@asynccontextmanager
async def conducting(
    index: IndexSettings, overview: Overview, *orders: Order
) -> AsyncIterator[Conductor]:
    conductor = Conductor(index.url, "a", overview, Ordering(dict), PolicySet(), settings=index)
    conductor._manager = ClusterManager([("says", Says(*orders))])
    conductor.start()
    try:
        yield conductor
    finally:
        await conductor.close()


@pytest.fixture
def orders(index_settings: IndexSettings) -> Iterator[Orders]:
    one = Orders(index_settings.url, index_settings)
    yield one
    one.close()


async def test_a_router_that_stood_still_in_a_round_does_nothing_with_it(
    index_settings: IndexSettings,
    orders: Orders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    overview = Paused()
    async with conducting(index_settings, overview, SetCopies(GROUP, 3, "hot")):
        await until(lambda: overview.looks == 1)
        clock.stood_s = 3.0
        overview.go_on.set()
        await until(lambda: overview.looks == 2)
        assert "a round of cluster policies took 3" in caplog.text
        assert orders.table().by_key() == {}
        overview.go_on.set()
        await until(lambda: orders.table().by_key() == {GROUP: 3})
        raised = [event.action for event in orders.events(10)]
    assert raised.count("raise") <= 1


async def test_a_round_in_which_another_router_set_copies_comes_to_nothing(
    index_settings: IndexSettings, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    overview = Paused()
    no_order: Any = None
    hot = SetCopies(GROUP, 3, "hot")
    async with conducting(index_settings, overview, hot, no_order) as conductor:
        await until(lambda: overview.looks == 1)
        assert orders.set_table(CopiesTable(7, {GROUP.hex(): 2}), orders.table())
        overview.go_on.set()
        await until(lambda: overview.looks == 2)
        assert "another router has set copies meanwhile" in caplog.text
        assert conductor._manager.failures == [0]
        assert orders.table().seq == 7
        overview.go_on.set()
        await until(lambda: orders.table().by_key().get(GROUP) == 3)
        await until(lambda: conductor._manager.failures == [1])
    assert orders.table().seq > 7


async def test_a_router_that_stood_still_while_it_set_copies_sends_no_orders(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_EVERY_S", 0.1)
    overview = Paused()
    async with conducting(index_settings, overview, SetCopies(GROUP, 3, "hot")) as conductor:
        set_table = conductor._orders.set_table

        def slowly(table: CopiesTable, before: CopiesTable) -> bool:
            clock.stood_s = 3.0
            return set_table(table, before)

        conductor._orders.set_table = slowly  # type: ignore[method-assign]
        carried: list[Decision] = []

        async def carry_out(decision: Decision, now_s: float) -> None:
            carried.append(decision)

        conductor._carry_out = carry_out  # type: ignore[method-assign]
        await until(lambda: overview.looks == 1)
        overview.go_on.set()
        await until(lambda: overview.looks == 2)
        assert carried == []


async def test_a_router_frozen_past_its_lease_orders_nothing_after_it(
    index_settings: IndexSettings, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy this process is, the other one finds that it leads.
    monkeypatch.setattr(module, "_LEASE_S", 60.0)
    monkeypatch.setattr(module, "_EVERY_S", 0.1)
    command = [sys.executable, "-m", "tests.router.freezing_leader"]
    frozen = await asyncio.create_subprocess_exec(
        *command, index_settings.model_dump_json(), stdout=asyncio.subprocess.PIPE
    )
    try:
        # It stops itself in the middle of its second round, in which it would lower what its first one raised.
        await until(lambda: psutil.Process(frozen.pid).status() == psutil.STATUS_STOPPED)
        assert orders.table().by_key() == {GROUP: 3}
        overview = Paused()
        async with conducting(index_settings, overview, SetCopies(GROUP, 4, "hot")) as conductor:
            overview.go_on.set()
            await until(lambda: orders.table().by_key() == {GROUP: 4})
            assert conductor.leads
            frozen.send_signal(signal.SIGCONT)
            assert frozen.stdout is not None
            async with asyncio.timeout(WAIT_S):
                assert await frozen.stdout.readline() == b"follows\n"
            assert conductor.leads
            assert orders.table().by_key() == {GROUP: 4}
            await until(lambda: len(orders.events(10)) == 2)
            told = [(event.policy, event.action, event.copies) for event in orders.events(10)]
            assert told == [("says", "raise", 4), ("frozen", "raise", 3)]
    finally:
        frozen.kill()
        await frozen.wait()


class Deaf(Paused):
    """Loses a cancellation, as libraries do now and then."""

    async def view(
        self,
        table: Mapping[PageKey, int],
        now_s: float,
        wanted: Mapping[str, Wanted] | None = None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> ClusterView:
        with contextlib.suppress(asyncio.CancelledError):
            return await super().view(table, now_s, wanted, prefixes)
        return ClusterView(4, 1, (), now_s)


async def test_policies_that_are_replaced_in_a_round_leave_what_comes_of_it(
    index_settings: IndexSettings,
) -> None:
    overview, move = Paused(), MoveSession("s", PlaceId("w1"), "r")
    async with conducting(index_settings, overview, move) as conductor:
        before = conductor._manager
        set_copies, replaced = conductor._set, list[ClusterManager]()

        async def meanwhile(table: CopiesTable, after: Mapping[PageKey, int], now_s: float) -> bool:
            if not replaced:
                conductor.replace_policies([("other", Says(move))])
                replaced.append(conductor._manager)
            return await set_copies(table, after, now_s)

        conductor._set = meanwhile  # type: ignore[method-assign]
        overview.go_on.set()
        await until(lambda: bool(replaced))
        await until(lambda: overview.looks == 2)
        remembered = replaced[0]._remembered
        assert remembered.given == before._remembered.given != {}


async def test_closing_ends_where_a_cancellation_is_lost(index_settings: IndexSettings) -> None:
    overview = Deaf()
    async with asyncio.timeout(WAIT_S):
        async with conducting(index_settings, overview):
            await until(lambda: overview.looks == 1)


async def test_the_lease_is_given_back_after_what_a_cancelled_round_has_begun(
    index_settings: IndexSettings,
) -> None:
    began, go_on, seen = threading.Event(), threading.Event(), list[str]()
    async with conducting(index_settings, Paused()) as conductor:
        lease = conductor._lease
        keep, give_back = lease.keep, lease.give_back

        def slow_keep() -> str | None:
            began.set()
            go_on.wait(60)
            other = keep()
            seen.append("kept")
            return other

        def told_give_back() -> None:
            seen.append("given back")
            give_back()

        lease.keep, lease.give_back = slow_keep, told_give_back  # type: ignore[method-assign]
        await until(began.is_set)
        closing = asyncio.create_task(conductor.close())
        try:
            # As long as Redis does not answer nothing else is asked of it.
            await asyncio.wait([closing], timeout=0.5)
            assert seen == []
        finally:
            go_on.set()
        await closing
        assert seen == ["kept", "given back"]
        conductor.close = closed  # type: ignore[method-assign]
    other = Lease(index_settings.url, "policies", "b", settings=index_settings)
    assert other.keep() is None
    other.give_back()


async def closed() -> None:
    """Close a conductor that is closed already."""


async def test_closing_ends_where_redis_does_not_answer(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_GIVES_BACK_S", 0.1)
    began, go_on, over = threading.Event(), threading.Event(), threading.Event()
    async with conducting(index_settings, Paused()) as conductor:

        def keep() -> str | None:
            began.set()
            go_on.wait(60)
            return None

        conductor._lease.keep = keep  # type: ignore[method-assign]
        await until(began.is_set)
    assert "is not given back in 0.1 s" in caplog.text
    close = conductor._orders.close
    conductor._orders.close = lambda: (close(), over.set())[0]  # type: ignore[method-assign,func-returns-value]
    go_on.set()
    await until(over.is_set)


class Told(Ordering):
    """Has heard what became of an order whenever a test says so."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.heard: list[ClusterEvent] = []

    def take_told(self) -> list[ClusterEvent]:
        told, self.heard = self.heard, []
        return told


async def test_what_became_of_orders_is_logged_once_redis_is_back(
    own_redis_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, index = own_redis_server, IndexSettings(url=own_redis_server.url)
    failed = 0

    class Dying(Orders):
        def log(self, events: Sequence[LoggedEvent]) -> None:
            nonlocal failed
            if events and not failed:
                server.kill()
                failed = len(events)
            super().log(events)

    monkeypatch.setattr(module, "Orders", Dying)
    ordering = Told()
    overview = Overview(Mirror(), dict, Demand(), Conversations())
    conductor = Conductor(index.url, "a", overview, ordering, PolicySet(), settings=index)
    conductor.start()
    ordering.heard.append(ClusterEvent("p", "done", None, 0, "stored"))
    await until(lambda: failed == 1)
    ordering.heard.append(ClusterEvent("p", "done", None, 0, "fetched"))
    server.start()
    orders = Orders(index.url, index)
    await until(lambda: [e.reason for e in orders.events(9)] == ["fetched", "stored"])
    # What is heard at the last moment is logged too.
    ordering.heard.append(ClusterEvent("p", "done", None, 0, "let go"))
    await conductor.close()
    assert [e.reason for e in orders.events(9)] == ["let go", "fetched", "stored"]
    orders.close()
