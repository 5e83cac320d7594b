"""Connections to a Cluster that all break, as a blip of the network breaks them."""

import asyncio

import pytest
import uvloop

from pie.index.contract import IndexMode
from pie.index.settings import IndexSettings
from tests.index.places import WITHIN_S, Index, running
from tests.support.redis_deployments import Servers, connect

_BLIPS = 3
_STEPS_IN_PEACE = 60


async def _in_peace(index: Index) -> None:
    """Wait until the mirror has followed for a while and was never degraded in it."""
    steps = 0
    degraded = index.modes.count(IndexMode.DEGRADED)
    async with asyncio.timeout(WITHIN_S):
        while steps < _STEPS_IN_PEACE:
            for place in index.places.values():
                place.store(steps)
            await asyncio.sleep(0.03)
            now = index.modes.count(IndexMode.DEGRADED)
            well = now == degraded and index.mirror.mode is IndexMode.OK
            steps, degraded = (steps + 1 if well else 0), now


def _break_all(servers: Servers) -> None:
    for port in servers.processes:
        with connect(port, password="open") as node:
            node.execute_command("CLIENT KILL TYPE normal SKIPME yes")


@pytest.mark.live
def test_a_mirror_is_well_again_after_every_connection_to_a_cluster_broke(
    redis_cluster: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.processes)
    settings = IndexSettings(
        url=f"redis+cluster://:open@{nodes}",
        key_prefix="torn",
        ttl_s=5.0,
        poll_s=0.05,
        request_timeout_s=10.0,
    )

    async def break_and_mend() -> None:
        async with running(settings) as index:
            for number in range(8):
                await index.join(f"w{number}", holding=10)
            await index.settled()
            for _ in range(_BLIPS):
                await asyncio.to_thread(_break_all, redis_cluster)
                await asyncio.sleep(0.5)
            await _in_peace(index)
            await index.settled()

    uvloop.run(break_and_mend())  # as routers run, whose order of steps is another
    assert "the index feed failed" not in caplog.text
