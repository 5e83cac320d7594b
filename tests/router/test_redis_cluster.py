"""A router and its workers find each other in a Redis Cluster as they do in one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pie.index.settings import IndexSettings
from tests.router.conftest import Cluster, until
from tests.support.redis_deployments import Servers

pytestmark = pytest.mark.live


@pytest.fixture
async def sharded(
    tmp_path: Path, chat_folder: Path, redis_cluster: Servers
) -> AsyncIterator[Cluster]:
    nodes = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.processes)
    index = IndexSettings(
        url=f"redis+cluster://:open@{nodes}", key_prefix="served", ttl_s=2.0, poll_s=0.05
    )
    cluster = Cluster(tmp_path, chat_folder, index)
    yield cluster
    await cluster.close()


async def test_what_one_router_learns_of_pages_another_knows(sharded: Cluster) -> None:
    for name in ("w0", "w1"):
        sharded.mock(name)
    first, second = await sharded.router(2), await sharded.router(2)
    ask = {"model": "mock", "prompt": "word " * 100, "max_tokens": 2}
    answer = await sharded.openai(first).completions.with_raw_response.create(**ask)  # type: ignore[call-overload]
    place = answer.headers["x-pie-worker"]

    def known() -> int:
        return sum(sum(one.pages.values()) for one in second.status().workers if one.place == place)

    await until(lambda: known() * sharded.mocks[0].spec.page_tokens > 64)
    again = await sharded.openai(second).completions.with_raw_response.create(**ask)  # type: ignore[call-overload]
    assert again.headers["x-pie-worker"] == place
    assert int(again.headers["x-pie-cached-tokens"]) > 64
