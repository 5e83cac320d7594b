"""What a node holds is in a real index, and what has left is not."""

from collections.abc import AsyncIterator

import pytest

from pie.index.errors import PlaceFencedError
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, Part, PlaceId, Tier, part_bit
from pie.pool.client import PoolClient
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.wire.messages import PutStatus
from tests.pool.places import SamplePages, until

pytestmark = pytest.mark.live

POOL = PlaceId("pool-0")
BIT = part_bit(Part.FULL, Tier.POOL_RAM)


class Cluster:
    """One node, one index, and a reader of it."""

    def __init__(self, settings: IndexSettings) -> None:
        self.deaths: list[BaseException] = []
        self.mirror = Mirror()
        self.feed = MirrorFeed(settings.url, self.mirror, settings=settings)
        self.node = PoolNode(
            POOL,
            PoolSettings.model_validate({"ram_budget": "1MiB"}),
            index_url=settings.url,
            index_settings=settings,
            epoch=Epoch(1),
            on_dead=self.deaths.append,
        )
        self.client = PoolClient(self.mirror, PoolSettings())

    def known(self, pages: SamplePages) -> list[bool]:
        """Say which pages the reader knows the node to hold."""
        return [list(self.mirror.matches([p.key]).get(POOL, ())) == [BIT] for p in pages.pages]

    async def knows(self, pages: SamplePages, *expected: bool) -> None:
        async def it_does() -> bool:
            return self.known(pages) == list(expected)

        await until(it_does)


@pytest.fixture
async def cluster(index_settings: IndexSettings) -> AsyncIterator[Cluster]:
    """A running cluster in which the reader knows the node."""
    cluster = Cluster(index_settings)
    await cluster.feed.start()
    await cluster.node.start()

    async def is_known() -> bool:
        return POOL in cluster.mirror.places()

    await until(is_known)
    yield cluster
    cluster.node.check()
    cluster.mirror.check()
    await cluster.client.close()
    await cluster.node.close()
    await cluster.feed.close()


async def test_stored_pages_are_found_through_the_index(cluster: Cluster) -> None:
    pages = SamplePages(5)
    assert await pages.store(cluster.client) == [PutStatus.STORED] * 5
    await cluster.knows(pages, *[True] * 5)
    assert await pages.hits(cluster.client) == [True] * 5


async def test_evicted_pages_leave_the_index(cluster: Cluster) -> None:
    early, late = SamplePages(5, size=64 << 10), SamplePages(15, first=5, size=64 << 10)
    await early.store(cluster.client)
    await cluster.knows(early, *[True] * 5)
    await late.store(cluster.client)
    await cluster.knows(late, *[True] * 15)
    held = await early.hits(cluster.client)
    assert False in held
    await cluster.knows(early, *held)


async def test_a_page_that_went_bad_leaves_the_index(cluster: Cluster) -> None:
    pages = SamplePages(2)
    await pages.store(cluster.client)
    await cluster.knows(pages, True, True)
    tier = cluster.node._tier
    tier._payload(tier._entries[pages.pages[0]])[0] ^= 1
    assert await pages.hits(cluster.client) == [False, True]
    await cluster.knows(pages, False, True)


async def test_a_node_that_closes_leaves_the_index(cluster: Cluster) -> None:
    pages = SamplePages(2)
    await pages.store(cluster.client)
    await cluster.node.close()

    async def is_gone() -> bool:
        return POOL not in cluster.mirror.places()

    await until(is_gone)
    assert await pages.hits(cluster.client) == [False, False]


async def test_a_later_start_of_a_node_replaces_what_the_index_knew(
    cluster: Cluster,
    index_settings: IndexSettings,
) -> None:
    pages = SamplePages(2)
    await pages.store(cluster.client)
    await cluster.knows(pages, True, True)
    later = PoolNode(
        POOL,
        PoolSettings.model_validate({"ram_budget": "1MiB"}),
        index_url=index_settings.url,
        index_settings=index_settings,
        epoch=Epoch(2),
    )
    await later.start()
    await cluster.knows(pages, False, False)

    async def the_first_is_dead() -> bool:
        return cluster.node.status().draining and bool(cluster.deaths)

    await pages.store(cluster.client)
    await cluster.knows(pages, True, True)
    assert later.status().stored == 2
    await until(the_first_is_dead)
    assert isinstance(cluster.deaths[0], PlaceFencedError)
    await later.close()
