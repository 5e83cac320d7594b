"""A Redis that answers and takes no writes looks as if every place died."""

import asyncio

import pytest

from pie.index.conformance import key
from pie.index.contract import IndexMode
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from tests.index.places import running, until
from tests.support.redis_deployments import Servers, connect

pytestmark = pytest.mark.live


@pytest.mark.parametrize(
    ("refuse", "mend"),
    [
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
        ("ACL SETUSER default -@write", "ACL SETUSER default +@all"),
    ],
    ids=["replica", "min-replicas", "acl"],
)
async def test_a_redis_that_takes_no_writes_is_a_degraded_one_and_loses_no_place(
    own_redis_server: EmbeddedServer, refuse: str, mend: str
) -> None:
    # Redis answers at once here; what it says late, on a busy machine, is not to count as another fault.
    short = IndexSettings(url=own_redis_server.url, ttl_s=1.0, poll_s=0.05, request_timeout_s=10.0)
    async with running(short) as index:
        place = await index.join("w0")
        place.store(*range(50))
        await index.settled()
        await index.redis.execute_command(*refuse.split())  # type: ignore[no-untyped-call]
        await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "degraded")
        # A replica first breaks off who waits, which may be over before the first write is refused.
        await asyncio.sleep(short.ttl_s)
        seen = len(index.modes)
        # Redis forgets that the place is alive, and nothing can tell it otherwise.
        await asyncio.sleep(short.ttl_s)
        assert index.mirror.places().keys() == {PlaceId("w0")}
        assert index.mirror.matches([key(0)])
        assert index.mirror.mode is IndexMode.DEGRADED
        assert index.modes[seen:] == []
        place.store(50)
        await index.redis.execute_command(*mend.split())  # type: ignore[no-untyped-call]
        await index.settled()


async def test_a_cluster_whose_nodes_answer_no_writes_loses_no_place(
    redis_cluster: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(command: str) -> None:
        for port in redis_cluster.processes:
            with connect(port, password="open") as node:
                node.execute_command(*command.split())

    nodes = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.processes)
    settings = IndexSettings(
        url=f"redis+cluster://:open@{nodes}",
        key_prefix="paused",
        ttl_s=1.0,
        poll_s=0.05,
        request_timeout_s=1.0,
    )
    async with running(settings) as index:
        for number in range(4):
            await index.join(f"w{number}", holding=10)
        await index.settled()
        lost: list[PlaceId] = []
        monkeypatch.setattr(index.mirror, "place_down", lost.append)
        try:
            await asyncio.to_thread(say, "CLIENT PAUSE 120000 WRITE")
            # Redis forgets that they are alive. Before, what a busy machine says late may read as degraded too.
            await asyncio.sleep(2 * settings.ttl_s)
            await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "degraded")
            seen = len(index.modes)
            await asyncio.sleep(2 * settings.ttl_s)
            assert index.modes[seen:] == []
            assert lost == []
            assert len(index.mirror.places()) == 4
        finally:
            await asyncio.to_thread(say, "CLIENT UNPAUSE")
        index.places["w0"].store(50)
        await index.settled()
