"""Two routers that answer as one: quotas, responses and explanations, whichever a connection comes to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.router.service import RouterService
from tests.router.conftest import Cluster, until
from tests.router.test_access import HELLO, Keys, bearer
from tests.support.redis_server import own_redis_server

__all__ = ["own_redis_server"]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


async def ask(cluster: Cluster, router: RouterService, key: str, **fields: Any) -> Any:
    client = cluster.openai(router, api_key=key)
    return await client.chat.completions.create(
        **({"model": "mock", "messages": HELLO, "max_tokens": 4} | fields)
    )


async def let_in(cluster: Cluster, routers: list[RouterService], key: str, most: int) -> int:
    """Return how many requests in turn come through until one is refused."""
    for count in range(most):
        try:
            await ask(cluster, routers[count % len(routers)], key)
        except openai.RateLimitError:
            return count
    return most


async def test_a_tenant_takes_no_more_from_two_routers_than_from_one(
    cluster: Cluster, keys: Keys
) -> None:
    cluster.mock("w0", token_delay_s=0.02)
    routers = [await cluster.router(1, keys_file=keys.file) for _ in range(2)]
    one, other = routers
    assert await let_in(cluster, routers, keys.make("few", requests_per_minute=5), 20) == 5

    short = keys.make("short", tokens_per_minute=50)
    await ask(cluster, one, short)
    with pytest.raises(openai.RateLimitError, match="50 tokens a minute"):
        await ask(cluster, other, short)

    slow = keys.make("slow", concurrent=2)
    stream = await ask(
        cluster, one, slow, stream=True, max_tokens=200, n=2, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    with pytest.raises(openai.RateLimitError, match="2 sequences in flight"):
        await ask(cluster, other, slow)
    await stream.close()
    await until(lambda: one.status().in_flight == 0)
    for turn in range(10):
        assert (await ask(cluster, routers[turn % 2], slow, n=2)).choices


async def test_many_at_once_are_let_in_as_by_one_router(cluster: Cluster, keys: Keys) -> None:
    cluster.mock("w0")
    routers = [await cluster.router(1, keys_file=keys.file, max_in_flight=400) for _ in range(2)]
    key = keys.make("many", requests_per_minute=20)
    async with httpx.AsyncClient(timeout=60) as client:
        answers = await asyncio.gather(
            *(
                client.post(
                    f"{routers[turn % 2].url}/v1/completions",
                    json={"model": "mock", "prompt": "word", "max_tokens": 1},
                    headers=bearer(key),
                )
                for turn in range(80)
            )
        )
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    # One more comes every three seconds.
    assert 20 <= statuses.count(200) <= 24


async def test_without_redis_each_router_has_its_share(
    tmp_path: Path, chat_folder: Path, own_redis_server: EmbeddedServer, keys: Keys
) -> None:
    server = own_redis_server
    index = IndexSettings(url=server.url, key_prefix="p", request_timeout_s=1.0, poll_s=0.05)
    cluster = Cluster(tmp_path, chat_folder, index)
    try:
        cluster.mock("w0")
        routers = [await cluster.router(1, keys_file=keys.file) for _ in range(2)]
        key = keys.make("few", requests_per_minute=6, concurrent=4)
        begun_s = time.monotonic()
        for router in routers:
            await ask(cluster, router, key)
        # Each has to have counted the other.
        for router in routers * 2:
            await router.quotas.count()
        server.kill()
        assert await let_in(cluster, routers, key, 20) == 6
        assert all(router.status().routers_together == "degraded" for router in routers)
        server.start()
        await until(lambda: all(r.status().routers_together == "ok" for r in routers), 30)
        # What was let in meanwhile is counted: more than six, of which one is back every ten seconds.
        await until(lambda: all(router.quotas.is_told for router in routers))
        late = await let_in(cluster, routers, key, 20)
        assert late <= max(0.0, (time.monotonic() - begun_s) / 10 - 2) + 1
    finally:
        await cluster.close()
