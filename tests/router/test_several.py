"""Several routers on one port, and what they know of the same pages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from pie.index.client import make_client
from pie.index.lease import Lease
from pie.index.policy_store import PolicyStore
from pie.page.events import PlaceId
from pie.router import conductor
from pie.router.errors import PortBusyError
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from tests.router.conftest import Cluster, until

ASK: Any = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Why is the sky blue? " * 20}],
    "max_tokens": 2,
}

SEA: Any = ASK | {"messages": [{"role": "user", "content": "Tell me of the sea. " * 150}]}
"""Longer than all else together, so that so many pages are those of its beginning for the most part."""


async def joined(cluster: Cluster, port: int, workers: int) -> RouterService:
    service = RouterService(
        RouterSettings(port=port),
        index_url=cluster.index.url,
        index=cluster.index,
        routers=2,
    )
    cluster.routers.append(service)
    await service.start()
    if workers:
        await cluster.workers(service, workers)
    return service


async def test_one_on_a_port_leads_and_another_once_that_one_is_killed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str | None] = []

    class Watched(Lease):
        def keep(self) -> str | None:
            answers.append(super().keep())
            return answers[-1]

    monkeypatch.setattr(conductor, "Lease", Watched)
    index = cluster.index
    one = await joined(cluster, 0, workers=0)
    await until(lambda: one.leads)
    port = urlsplit(one.url).port
    assert port is not None
    process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        [
            *(sys.executable, "-m", "tests.router.one_router"),
            *(index.model_dump_json(), str(port)),
        ],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    store = PolicyStore(index.url, index)
    with process:
        try:
            assert process.stdout is not None
            name = (await asyncio.to_thread(process.stdout.readline)).strip()
            await until(lambda: set(store.places()) == {one.name, name})
            await one.close()
            assert list(store.places()) == [name], "what was stopped is not waited for"
            with make_client(index.url, index) as redis:
                lease = f"{index.key_prefix}:lease:policies"
                await until(lambda: redis.get(lease) == name.encode())
            answers.clear()
            other = await joined(cluster, port, workers=0)
            await until(lambda: len(answers) >= 2)
            assert set(answers) == {name}
            assert not other.leads
        finally:
            process.kill()
        await until(lambda: other.leads)
        assert set(store.places()) == {name, other.name}
    store.close()


async def test_connections_are_dealt_out_and_all_go_on_when_one_ends(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        cluster.mock(name)
    one = await joined(cluster, 0, workers=2)
    port = urlsplit(one.url).port
    assert port is not None
    other = await joined(cluster, port, workers=2)
    assert one.url == other.url

    async def ask(body: Any = ASK) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            return await client.post(f"{one.url}/v1/chat/completions", json=body)

    def counted(router: RouterService) -> int:
        return router.metrics.total(router.metrics.requests)

    for _ in range(100):
        assert (await ask()).status_code == 200
        if counted(one) and counted(other):
            break
    assert counted(one)
    assert counted(other)

    # What one router's request left behind is a hit for the other, at the worker that has it.
    async def taken() -> tuple[RouterService, httpx.Response]:
        """Return who took a request, and its answer."""
        before, others = counted(one), counted(other)
        answer = await ask(SEA)
        await until(lambda: counted(one) + counted(other) > before + others)
        return (one if counted(one) > before else other), answer

    asked, first = await taken()
    unasked = other if asked is one else one
    place, tokens = first.headers["x-pie-worker"], first.json()["usage"]["prompt_tokens"]
    pages = tokens // cluster.mocks[0].spec.page_tokens
    await until(lambda: sum(unasked._mirror.pages(PlaceId(place)).values()) >= pages)
    router, answer = asked, first
    for _ in range(100):
        router, answer = await taken()
        if router is unasked:
            break
    assert router is unasked
    assert answer.headers["x-pie-worker"] == place
    assert int(answer.headers["x-pie-cached-tokens"]) > tokens / 2
    await one.close()
    for _ in range(10):
        assert (await ask()).status_code == 200
    with pytest.raises(PortBusyError):
        await cluster.router(0, port=port)
