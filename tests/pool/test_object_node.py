"""A pool node with a bucket: pages survive the node, and a store that fails takes nothing down."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pie.page.events import Tier
from pie.pool.node import PoolNode
from pie.pool.object_s3 import S3Store
from pie.pool.settings import PoolSettings
from pie.wire.messages import PutStatus
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.object_places import objects
from tests.pool.places import SamplePages, until
from tests.pool.test_sealing import smooth_page

pytestmark = pytest.mark.live


@pytest.fixture
async def start_node(start_node: StartNode) -> AsyncIterator[StartNode]:
    """Starts nodes; no page moves any more when they are checked at the end."""
    nodes: list[PoolNode] = []

    async def start(*arguments: Any, **settings: Any) -> PoolNode:
        nodes.append(await start_node(*arguments, **settings))
        return nodes[-1]

    yield start
    for node in nodes:
        await asyncio.to_thread(node._mover.close)


@pytest.fixture
def bucket(s3_settings: PoolSettings) -> dict[str, object]:
    """Settings of a node with little RAM and a bucket."""
    chosen = s3_settings.model_dump(mode="json", exclude_unset=True)
    return {**chosen, "ram_budget": "2MiB", "object_timeout_s": 60}


def in_bucket(node: PoolNode) -> int:
    return node.status().pages["pool_object"]


async def until_kept(node: PoolNode, count: int) -> None:
    """Wait until so many pages are in the bucket, and not just on their way."""

    async def are_kept() -> bool:
        return in_bucket(node) >= count and not node.status().object_buffered_bytes

    await until(are_kept)


async def test_each_page_is_in_the_bucket_soon_and_a_killed_nodes_pages_come_from_there(
    start_node: StartNode, make_client: MakeClient, bucket: dict[str, object]
) -> None:
    node = await start_node(**bucket)
    large, small = SamplePages(10, size=100_000), SamplePages(60, first=100, size=5_000)
    for pages in (large, small):
        assert set(await pages.store(make_client())) == {PutStatus.STORED}
    await until_kept(node, 70)
    # Nothing of what this node does from now on is of use to the next one.
    again = await start_node(epoch=2, **bucket)
    assert again.status().pages == {"pool_ram": 0, "pool_object": 70}
    assert {entry.tier for entry in again._cache.entries()} == {Tier.POOL_OBJECT}
    for pages in (large, small):
        assert all(await pages.hits(make_client()))
    assert again.status().object_read_bytes > 1_000_000

    async def are_promoted() -> bool:
        return again.status().pages["pool_ram"] > 10

    await until(are_promoted)


@pytest.mark.parametrize("tier", ["disk", "object"])
async def test_each_tier_packs_as_it_is_told_and_counts_what_that_saves_and_costs(
    start_node: StartNode,
    make_client: MakeClient,
    bucket: dict[str, object],
    tmp_path: Path,
    tier: str,
) -> None:
    node = await start_node(
        **bucket,
        disk_budget="32MiB",
        disk_folders=[tmp_path],
        **{f"{tier}_compression": "auto"},
    )
    smooth = SamplePages(8, size=100_000)
    smooth.take([smooth_page(number, 100_000) for number in range(8)])
    assert set(await smooth.store(make_client())) == {PutStatus.STORED}
    await until_kept(node, 8)
    await asyncio.to_thread(node._cache.save, float("inf"))
    status = node.status()
    raw = {"disk": status.disk_raw_bytes, "object": status.object_raw_bytes}
    packed = {"disk": status.disk_packed_bytes, "object": status.object_packed_bytes}
    kinds = {"disk": status.disk_packed_pages, "object": status.object_packed_pages}
    other = "object" if tier == "disk" else "disk"
    assert raw["disk"] == raw["object"] == packed[other]
    assert packed[tier] < 0.9 * raw[tier]
    assert kinds[other]["none"] == kinds[tier]["bshuf-lz4"] == 8
    assert status.object_seal_s > 0
    again = await start_node(epoch=2, **bucket)
    assert all(await smooth.hits(make_client()))
    assert again.status().object_open_s > 0


async def test_without_write_through_only_what_leaves_ram_and_what_a_drain_saves_is_sent(
    start_node: StartNode, make_client: MakeClient, bucket: dict[str, object]
) -> None:
    node = await start_node(**bucket, object_write_through=False)
    pages = SamplePages(10)
    await pages.store(make_client())
    assert in_bucket(node) == 0
    more = SamplePages(40, first=100, size=100_000)
    await more.store(make_client())
    assert 20 < in_bucket(node) < 50
    await node.drain(60)
    assert in_bucket(node) == 50
    assert all(await more.hits(make_client()))


async def test_pages_go_from_ram_to_disk_to_the_bucket_and_come_back(
    start_node: StartNode, make_client: MakeClient, bucket: dict[str, object], tmp_path: object
) -> None:
    node = await start_node(
        **bucket,
        disk_budget="3MiB",
        disk_folders=[f"{tmp_path}/disk"],
        object_write_through=False,
    )
    pages = SamplePages(100, size=100_000)
    assert set(await pages.store(make_client())) == {PutStatus.STORED}
    held = node.status().pages
    assert held["pool_ram"] > 5
    assert held["pool_disk"] > 10
    assert held["pool_object"] > 40
    assert all(await pages.hits(make_client()))

    async def some_are_promoted() -> bool:
        return node.status().promoted > 0

    await until(some_are_promoted)
    status = node.status()
    for tier, used in status.tier_used_bytes.items():
        assert used <= status.tier_budget_bytes[tier]


async def test_a_full_bucket_lets_the_least_used_pages_go(
    start_node: StartNode, make_client: MakeClient, bucket: dict[str, object]
) -> None:
    node = await start_node(**{**bucket, "object_budget": "4MiB", "object_write_through": False})
    pages = SamplePages(100, size=100_000)
    await pages.store(make_client())
    node._object.flush(60)  # type: ignore[union-attr]
    status = node.status()
    assert status.tier_used_bytes["pool_object"] <= 4 << 20
    assert status.object_removed > 10
    hits = await pages.hits(make_client())
    assert 30 < hits.count(True) < 80
    assert sum(objects(PoolSettings.model_validate(bucket)).values()) <= 4 << 20


async def test_the_store_is_never_asked_on_the_event_loop(
    start_node: StartNode,
    make_client: MakeClient,
    bucket: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where: set[int] = set()

    def traced(inner: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            where.add(threading.get_ident())
            return inner(*arguments, **options)

        return call

    for name in ("put", "get", "remove", "found", "probe"):
        monkeypatch.setattr(S3Store, name, traced(getattr(S3Store, name)))
    node = await start_node(**bucket)
    for size in (1_000, 100_000):
        pages = SamplePages(40, size=size, first=size)
        await pages.store(make_client())
        await pages.hits(make_client())
    await node.drain(60)
    await node.close()
    assert where
    assert threading.get_ident() not in where


async def test_a_node_whose_bucket_is_not_there_serves_from_ram_and_says_so(
    start_node: StartNode, make_client: MakeClient, bucket: dict[str, object]
) -> None:
    node = await start_node(**{**bucket, "object_bucket": "no-such-bucket"})
    status = node.status()
    assert status.object_state["off"] == 1
    assert status.object_errors == {"no_bucket": 1}
    pages = SamplePages(5)
    assert await pages.store(make_client()) == [PutStatus.STORED] * 5
    assert await pages.hits(make_client()) == [True] * 5
    assert node._cache.pages_by_tier()["pool_object"] == 0


async def test_a_large_load_from_the_bucket_does_not_hold_up_those_from_ram(
    start_node: StartNode,
    make_client: MakeClient,
    bucket: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = await start_node(**bucket)
    kept = SamplePages(5, size=100_000)
    await kept.store(make_client())
    await until_kept(node, 5)
    await node.close()
    node = await start_node(epoch=2, **bucket)
    release = threading.Event()
    get = S3Store.get

    def slow(self: S3Store, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        assert release.wait(120)
        return get(self, name, start, length)

    monkeypatch.setattr(S3Store, "get", slow)
    waiting = [asyncio.create_task(kept.hits(make_client())) for _ in range(6)]
    await asyncio.sleep(0.1)
    fresh = SamplePages(3, first=50)
    assert await fresh.store(make_client()) == [PutStatus.STORED] * 3
    assert await fresh.hits(make_client()) == [True] * 3
    assert not any(task.done() for task in waiting)
    release.set()
    assert all(all(hits) for hits in await asyncio.gather(*waiting))
