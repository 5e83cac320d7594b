"""The index in a Redis Cluster, behind Sentinels, over TLS, in another database: real servers."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pie.index.allowance import Claim, Draw, Hold, Limits
from pie.index.allowance_redis import RedisAllowances
from pie.index.commons import Commons
from pie.index.conformance import IndexConformance, key
from pie.index.contract import IndexMode
from pie.index.epochs import next_epoch
from pie.index.errors import IndexUnavailableError
from pie.index.feed import MirrorFeed
from pie.index.lease import Lease
from pie.index.lookup import DirectLookup
from pie.index.mirror import Mirror
from pie.index.orders import CopiesTable, Orders, WantedWorkers
from pie.index.policy_store import PolicyStore
from pie.index.router_views import Move, RouterView
from pie.index.router_views_conformance import seen
from pie.index.router_views_redis import RedisRouterViews
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.index.shelf import ShelfLimits
from pie.index.shelf_redis import RedisShelf
from pie.index.tallies import Tallies, Tally
from pie.page.events import PlaceId
from tests.index.places import running, until
from tests.index.test_conformance import FedIndex
from tests.support.redis_deployments import Servers, behind_tls, connect, wait_for

HOW = pytest.mark.parametrize(
    "how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)]
)
live = pytest.mark.live
_prefixes = itertools.count(1)


@pytest.fixture
def cluster_settings(redis_cluster: Servers) -> IndexSettings:
    nodes = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.processes)
    return IndexSettings(
        url=f"redis+cluster://:open@{nodes}",
        key_prefix=f"test{next(_prefixes)}",
        ttl_s=1.0,
        poll_s=0.05,
        request_timeout_s=2.0,
    )


class TestMirrorFedThroughACluster(IndexConformance):
    pytestmark = live

    @pytest.fixture(autouse=True)
    def _settings(self, cluster_settings: IndexSettings) -> None:
        self.settings = cluster_settings

    @asynccontextmanager
    async def index(self) -> AsyncIterator[FedIndex]:
        mirror = Mirror()
        feed = MirrorFeed(self.settings.url, mirror, settings=self.settings)
        await feed.start()
        index = FedIndex(mirror, self.settings)
        yield index
        await index.close()
        await feed.close()
        index.exact.close()
        mirror.check()


def use_all(settings: IndexSettings) -> None:
    """Do all that tools do with Redis."""
    lease = Lease(settings.url, "cluster", "me", settings=settings)
    assert lease.keep() is None
    lease.give_back()
    store = PolicyStore(settings.url, settings)
    assert store.apply("cluster: {}", "a file") == store.current() == 1
    version = store.version(1)
    assert version is not None
    assert version.note == "a file"
    assert list(store.versions()) == [1]
    assert store.places() == {}
    store.close()
    orders = Orders(settings.url, settings)
    assert orders.set_table(CopiesTable(1, {"00" * 32: 2}), orders.table())
    assert orders.table().copies == {"00" * 32: 2}
    assert orders.events(10) == []
    orders.set_wanted({"m": WantedWorkers(2, "busy", "by-load")})
    assert orders.wanted()["m"].workers == 2
    orders.close()
    views = [RedisRouterViews(settings.url, name, settings) for name in ("leads", "other")]
    for sessions in ((seen("s"), seen("t")), (seen("s"),)):
        assert views[1].tell(RouterView((), sessions)) == []
        assert list(views[0].others().values()) == [RouterView((), sessions)]
    views[0].move([Move("s", PlaceId("w0"))])
    assert views[1].tell(RouterView()) == [Move("s", PlaceId("w0"))]
    for view in views:
        view.close()
    lookup = DirectLookup(settings.url, settings=settings)
    assert lookup.mode is IndexMode.OK
    keys = [key(number) for number in range(20)]
    assert {place: len(run) for place, run in lookup.matches(keys).items()} == {"w0": 10, "w1": 20}
    assert {place: len(list(run)) for place, run in lookup.hint(keys).items()} == {
        "w0": 10,
        "w1": 20,
    }
    assert lookup.silent() == {}
    lookup.close()


async def use_commons(settings: IndexSettings) -> None:
    """Do all that routers do in Redis for what they share."""
    commons = Commons(settings.url, settings, 10.0)
    assert await commons.routers() == 1
    limits = Limits(5, 5, 5)
    for claim in (Claim(Draw(need=1), Draw(need=1), Hold(need=1)), Claim(), Claim(Draw(need=99))):
        await RedisAllowances(commons).claim("t", limits, claim)
    await RedisAllowances(commons).claim("t", Limits(), Claim())
    shelf = RedisShelf(commons, "s", ShelfLimits(1, 1_000, 60, by_use=True))
    for name in ("a", "b"):
        await shelf.put([(name, b"x")])
    assert await shelf.get("b") == b"x"
    assert (await shelf.latest(9)).names == ["b"]
    tallies = Tallies(commons)
    await tallies.tell(Tally("r"))
    assert await tallies.others() == []
    await tallies.withdraw()
    assert not commons.is_degraded
    await commons.close()


@pytest.mark.live
async def test_routers_share_in_a_cluster_as_in_one_server(
    cluster_settings: IndexSettings,
) -> None:
    await use_commons(cluster_settings)


@pytest.mark.live
async def test_tools_use_a_cluster_as_they_use_one_server(cluster_settings: IndexSettings) -> None:
    async with running(cluster_settings) as index:
        await index.join("w0", holding=10)
        await index.join("w1", holding=20)
        await index.settled()
        await asyncio.to_thread(use_all, cluster_settings)
        assert (
            await next_epoch(
                cluster_settings.url, cluster_settings, PlaceId("w0"), clock_ns=lambda: 0
            )
            == 2
        )


@pytest.mark.live
async def test_a_cluster_keeps_each_place_in_one_slot(
    redis_cluster: Servers, cluster_settings: IndexSettings
) -> None:
    async with running(cluster_settings) as index:
        for number in range(8):
            await index.join(f"w{number}", holding=10)
        await index.settled()
        found: dict[str, set[int]] = {}
        for port in redis_cluster.processes:
            with connect(port, password="open") as node:
                for raw in node.scan_iter(f"{cluster_settings.key_prefix}:*"):
                    tag = raw.decode().partition("{")[2].partition("}")[0]
                    found.setdefault(tag, set()).add(port)
        found.pop("")
        assert len(found) == 8
        assert all(len(ports) == 1 for ports in found.values())
        assert len(set.union(*found.values())) > 1, "places are spread over the nodes"


@pytest.mark.live
@HOW
async def test_a_replica_in_a_cluster_takes_over(
    replicated_redis_cluster: Servers, how: signal.Signals
) -> None:
    ports = list(replicated_redis_cluster.processes)
    nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
    settings = IndexSettings(
        url=f"redis+cluster://:open@{nodes}", ttl_s=3.0, poll_s=0.05, request_timeout_s=1.0
    )
    async with running(settings) as index:
        for number in range(8):
            await index.join(f"w{number}", holding=10)
        await index.settled()
        replicated_redis_cluster.processes[ports[0]].send_signal(how)
        for place in index.places.values():
            place.store(*range(100, 200))
        await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "a primary is missed")
        assert len(index.mirror.places()) == 8
        await index.settled()
        await asyncio.to_thread(_look_up, settings)


def _look_up(settings: IndexSettings) -> None:
    lookup = DirectLookup(settings.url, settings=settings)
    assert len(lookup.matches([key(100)])) == 8
    lookup.close()


@pytest.mark.live
async def test_a_cluster_that_nobody_answers_for_is_a_redis_that_is_away() -> None:
    settings = IndexSettings(url="redis+cluster://127.0.0.1:1", request_timeout_s=1.0)
    mirror = Mirror()
    feed = MirrorFeed(settings.url, mirror, settings=settings)
    await feed.start()
    await until(lambda: mirror.mode is IndexMode.DEGRADED, "degraded")
    await feed.close()
    lookup = DirectLookup(settings.url, settings=settings)
    with pytest.raises(IndexUnavailableError):
        await asyncio.to_thread(lookup.places)
    assert lookup.mode is IndexMode.DEGRADED
    lookup.close()


@pytest.mark.live
@HOW
async def test_behind_sentinels_a_replica_takes_over(
    redis_sentinels: Servers, how: signal.Signals
) -> None:
    master, replica, sentinel = redis_sentinels.processes
    settings = IndexSettings(
        url=f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/pages",
        ttl_s=2.0,
        poll_s=0.05,
        request_timeout_s=2.0,
    )
    async with running(settings) as index:
        first = await index.join("w0", holding=10)
        await index.join("w1", holding=20)
        await index.settled()
        await asyncio.to_thread(use_all, settings)
        redis_sentinels.processes[master].send_signal(how)
        first.store(*range(100, 200))
        await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "the master is missed")
        assert set(index.mirror.places()) == {"w0", "w1"}, "the mirror goes on"
        await index.settled()
        with connect(replica) as client:
            await asyncio.to_thread(
                wait_for, lambda: client.role()[0] == b"master", "the replica is the master"
            )
        first.remove(*range(5))
        await index.settled()


@pytest.mark.live
async def test_tls_is_spoken_and_certificates_are_checked(
    own_redis_server: EmbeddedServer, tmp_path: Path
) -> None:
    path = Path(own_redis_server.url.removeprefix("unix://"))
    async with behind_tls(path, tmp_path) as (port, cert):
        url = f"rediss://localhost:{port}/0"
        settings = IndexSettings(url=f"{url}?ssl_ca_certs={cert}", ttl_s=2.0, poll_s=0.05)
        async with running(settings) as index:
            await index.join("w0", holding=10)
            await index.join("w1", holding=20)
            await index.settled()
            await asyncio.to_thread(use_all, settings)
        stranger = DirectLookup(url, settings=settings)
        with pytest.raises(IndexUnavailableError, match="certificate verify failed"):
            await asyncio.to_thread(stranger.places)
        stranger.close()
        plain = DirectLookup(f"redis://localhost:{port}/0", settings=settings)
        with pytest.raises(IndexUnavailableError):
            await asyncio.to_thread(plain.places)
        plain.close()


@pytest.mark.live
async def test_databases_of_one_server_are_apart() -> None:
    servers = Servers()
    try:
        port = servers.start(['save ""'])
        settings = [
            IndexSettings(url=f"redis://127.0.0.1:{port}/{number}", ttl_s=1.0, poll_s=0.05)
            for number in (0, 3)
        ]
        async with running(settings[0]) as index, running(settings[1]) as other:
            await index.join("w0", holding=10)
            await other.join("w1", holding=20)
            await index.settled()
            await other.settled()
            assert set(index.mirror.places()) == {"w0"}
            assert set(other.mirror.places()) == {"w1"}
    finally:
        servers.close()
