"""What places count is seen at the router: in `/metrics` and `/status`, within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.router.service import RouterService
from tests.router.conftest import WAIT_S, Cluster

pytestmark = pytest.mark.live

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


@pytest.fixture
async def pool(index_settings: IndexSettings) -> AsyncIterator[PoolNode]:
    node = PoolNode(
        PlaceId("pool-0"),
        PoolSettings.model_validate({"ram_budget": "1MiB"}),
        index_url=index_settings.url,
        index_settings=index_settings,
        epoch=Epoch(1),
    )
    await node.start()
    yield node
    await node.close()


async def metrics(http: httpx.AsyncClient, router: RouterService) -> list[str]:
    return (await http.get(f"{router.url}/metrics")).text.splitlines()


async def metrics_like(
    http: httpx.AsyncClient, router: RouterService, are_right: Callable[[list[str]], bool]
) -> None:
    """Ask until the metrics are right."""
    async with asyncio.timeout(WAIT_S):
        while True:
            told = await metrics(http, router)
            if are_right(told):
                return
            await asyncio.sleep(0.2)


async def status_like(
    http: httpx.AsyncClient, router: RouterService, are_right: Callable[[dict[str, str]], bool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ask until the states of all places are right, and return workers and pool nodes then."""
    async with asyncio.timeout(WAIT_S):
        while True:
            told = (await http.get(f"{router.url}/status")).json()
            if are_right({one["place"]: one["state"] for one in told["workers"] + told["pool"]}):
                return told["workers"], told["pool"]
            await asyncio.sleep(0.2)


async def metrics_with(http: httpx.AsyncClient, router: RouterService, *lines: str) -> None:
    """Ask until the metrics have all of these lines."""
    await metrics_like(http, router, lambda told: set(lines) <= set(told))


async def test_metrics_have_what_workers_and_pool_nodes_count(
    cluster: Cluster, pool: PoolNode, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    cluster.mock("w1")
    router = await cluster.router(2)
    answer = await http.post(
        f"{router.url}/v1/chat/completions", json=CHAT, headers={"x-pie-place": "w1"}
    )
    assert answer.status_code == 200
    await metrics_with(
        http,
        router,
        "# TYPE pie_worker_decode_tokens_total counter",
        'pie_worker_decode_tokens_total{place="w0"} 0.0',
        'pie_worker_decode_tokens_total{place="w1"} 5.0',
        "# TYPE pie_worker_running gauge",
        'pie_worker_up{place="w1"} 1.0',
        'pie_pool_up{place="pool-0"} 1.0',
        'pie_pool_budget_bytes{place="pool-0"} 1.048576e+06',
        "# TYPE pie_pool_bad_pages_total counter",
        'pie_pool_bad_pages_total{kind="at_load",place="pool-0"} 0.0',
        'pie_pool_pages{kind="pool_ram",place="pool-0"} 0.0',
    )


async def test_status_has_counters_and_gauges_of_each_place(
    cluster: Cluster, pool: PoolNode, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    await metrics_with(http, router, 'pie_pool_up{place="pool-0"} 1.0')
    (worker,), (node,) = await status_like(
        http, router, lambda states: states == {"w0": "ready", "pool-0": "ready"}
    )
    assert worker["counters"] == {"decode_tokens": 0}
    assert worker["gauges"] == {"running": 0}
    assert node["counters"]["stored"] == 0
    assert node["gauges"]["budget_bytes"] == 1 << 20
    await pool.drain(1)
    await status_like(http, router, lambda states: states["pool-0"] == "draining")


async def test_a_silent_place_holds_up_nobody_and_is_shown_as_silent(
    cluster: Cluster, pool: PoolNode, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    cluster.mock("w1", silent=True)
    router = await cluster.router(2)
    await metrics_with(
        http, router, 'pie_worker_up{place="w0"} 1.0', 'pie_worker_up{place="w1"} 0.0'
    )
    told = await metrics(http, router)
    assert not any(line.startswith('pie_worker_running{place="w1"}') for line in told)
    await status_like(
        http, router, lambda states: (states["w0"], states["w1"]) == ("ready", "silent")
    )
    assert (await http.get(f"{router.url}/status")).json()["ready"]


async def test_scrapes_within_a_second_ask_the_places_once(
    cluster: Cluster, http: httpx.AsyncClient, pool: PoolNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await cluster.router(0)
    await metrics_with(http, router, 'pie_pool_up{place="pool-0"} 1.0')
    asked = 0
    real_status = pool.status

    def status() -> object:
        nonlocal asked
        asked += 1
        return real_status()

    monkeypatch.setattr(pool, "status", status)
    await asyncio.sleep(1.1)
    began_s = time.monotonic()
    await asyncio.gather(*(metrics(http, router) for _ in range(20)))
    assert asked <= 1 + (time.monotonic() - began_s)
    assert asked >= 1


async def test_a_node_that_starts_anew_is_asked_anew(
    cluster: Cluster, index_settings: IndexSettings, http: httpx.AsyncClient, pool: PoolNode
) -> None:
    router = await cluster.router(0)
    await metrics_with(http, router, 'pie_pool_budget_bytes{place="pool-0"} 1.048576e+06')
    await pool.close()
    again = PoolNode(
        pool.place,
        PoolSettings.model_validate({"ram_budget": "2MiB"}),
        index_url=index_settings.url,
        index_settings=index_settings,
        epoch=Epoch(2),
    )
    await again.start()
    try:
        await metrics_with(http, router, 'pie_pool_budget_bytes{place="pool-0"} 2.097152e+06')
    finally:
        await again.close()
    await metrics_like(http, router, lambda told: not any("pie_pool_" in line for line in told))
