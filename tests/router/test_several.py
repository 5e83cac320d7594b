"""Several routers on one port, and what they know of the same pages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from pie.router.errors import PortBusyError
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from tests.router.conftest import Cluster, until

ASK: Any = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Why is the sky blue? " * 20}],
    "max_tokens": 2,
}


async def joined(cluster: Cluster, port: int) -> RouterService:
    service = RouterService(
        RouterSettings(port=port),
        index_url=cluster.index.url,
        index=cluster.index,
        shares_port=True,
    )
    cluster.routers.append(service)
    await service.start()
    await cluster.workers(service, 1)
    return service


async def test_connections_are_dealt_out_and_all_go_on_when_one_ends(cluster: Cluster) -> None:
    cluster.mock("w0")
    one = await joined(cluster, 0)
    port = urlsplit(one.url).port
    assert port is not None
    other = await joined(cluster, port)
    assert one.url == other.url

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            return await client.post(f"{one.url}/v1/chat/completions", json=ASK)

    def counted(router: RouterService) -> int:
        return router.metrics.total(router.metrics.requests)

    for _ in range(100):
        assert (await ask()).status_code == 200
        if counted(one) and counted(other):
            break
    assert counted(one)
    assert counted(other)
    # What one router's request left behind is a hit for the other.
    await until(lambda: one.status().workers == other.status().workers)
    assert int((await ask()).headers["x-pie-cached-tokens"]) > 0
    await one.close()
    for _ in range(10):
        assert (await ask()).status_code == 200
    with pytest.raises(PortBusyError):
        await cluster.router(0, port=port)
