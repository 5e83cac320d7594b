"""A pool node with a disk: what RAM has no room for is served from there, also after a restart."""

import asyncio
import errno
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, Part, PartMask, PlaceId, Tier, part_bit
from pie.page.lookup import LookupStatus
from pie.pool.client import PoolClient
from pie.pool.errors import FolderInUseError
from pie.pool.files import Files
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.wire.messages import PutStatus
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.disk_places import flip
from tests.pool.places import SamplePages, until

POOL = PlaceId("pool-0")
RAM = part_bit(Part.FULL, Tier.POOL_RAM)
DISK = part_bit(Part.FULL, Tier.POOL_DISK)


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, object]:
    """Settings of a node with little RAM and more disk."""
    return {"ram_budget": "1MiB", "disk_budget": "32MiB", "disk_folders": [str(tmp_path / "disk")]}


async def test_what_has_no_room_in_ram_goes_to_disk_and_comes_back(
    start_node: StartNode, make_client: MakeClient, disk: dict[str, object]
) -> None:
    node = await start_node(**disk)
    client = make_client()
    pages = SamplePages(100, size=40_000)
    assert set(await pages.store(client)) == {PutStatus.STORED}
    status = node.status()
    # A page that is used meanwhile stays, and one that is being moved counts as demoted first.
    assert status.demoted >= status.evicted > 60
    assert await pages.hits(client) == [True] * 100
    status = node.status()
    assert status.tier_used_bytes["pool_ram"] <= 1 << 20
    assert status.tier_budget_bytes == {"pool_ram": 1 << 20, "pool_disk": 32 << 20}
    assert status.disk_folders == {"ok": 1, "read_only": 0, "off": 0}
    assert status.disk_errors == {}

    async def are_promoted() -> bool:
        return node.status().promoted > 10

    await until(are_promoted)


async def test_look_ups_find_pages_wherever_they_lie(
    start_node: StartNode, make_client: MakeClient, disk: dict[str, object]
) -> None:
    node = await start_node(**disk)
    client = make_client()
    pages = SamplePages(60, size=40_000)
    await pages.store(client)
    await node.drain(60)  # What only RAM holds lies on disk too, and nothing there is being moved.
    in_ram = [node._cache._tiers[0].lookup(page) for page in pages.pages]
    assert {LookupStatus.HIT, LookupStatus.MISS} == set(in_ram)
    assert node._disk is not None
    assert len(node._disk._table._rows) == 60, "and all of them have rows"
    asked = SamplePages(63, size=40_000)
    found = await client.lookup(asked.pages, groups=asked.groups, deadline_s=60)
    assert found == [LookupStatus.HIT] * 60 + [LookupStatus.MISS] * 3


async def test_the_disk_is_never_waited_for_on_the_event_loop(
    start_node: StartNode,
    make_client: MakeClient,
    disk: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = threading.get_ident()
    where: set[int] = set()
    for call in ("write_new", "write_at", "append", "read", "read_at", "unlink", "rename", "sync"):
        inner = getattr(Files, call)

        def traced(*arguments, inner=inner, **options):  # type: ignore[no-untyped-def]
            where.add(threading.get_ident())
            return inner(*arguments, **options)

        monkeypatch.setattr(Files, call, traced)
    node = await start_node(**disk)
    client = make_client()
    for size in (1_000, 40_000, 200_000):
        pages = SamplePages(60, size=size, first=size)
        await pages.store(client)
        for number in range(60):
            await SamplePages(1, first=size + number, size=size).hits(client)
    await node.close()
    assert where
    assert loop not in where


async def test_a_page_that_is_damaged_on_disk_is_a_miss_to_the_client(
    start_node: StartNode, make_client: MakeClient, disk: dict[str, object], tmp_path: Path
) -> None:
    node = await start_node(**disk)
    client = make_client()
    pages = SamplePages(60, size=100_000)
    await pages.store(client)
    files = sorted((tmp_path / "disk").rglob("*.full"))
    assert len(files) > 40
    for path in files:
        flip(path, 50_000)
    hits = await pages.hits(client)
    assert 0 < hits.count(True) <= 60 - len(files) + 8
    status = node.status()
    assert status.disk_bad_pages["checksum"] == status.bad_pages["at_load"] > 30


async def test_a_node_that_drains_brings_to_disk_what_only_ram_holds(
    start_node: StartNode, make_client: MakeClient, disk: dict[str, object]
) -> None:
    node = await start_node(**disk)
    pages = SamplePages(10)
    await pages.store(make_client())
    assert node.status().pages == {"pool_ram": 10, "pool_disk": 0}
    await node.drain(60)
    assert node.status().pages == {"pool_ram": 10, "pool_disk": 10}
    await node.close()
    again = await start_node(epoch=2, **disk)
    assert again.status().pages == {"pool_ram": 0, "pool_disk": 10}
    assert await pages.hits(make_client()) == [True] * 10


async def test_two_nodes_of_one_name_do_not_share_a_folder(
    start_node: StartNode, disk: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.pool.node._LOCK_TIMEOUT_S", 0.1)
    await start_node(**disk)
    await start_node("pool-1", **disk)
    second = PoolNode(POOL, PoolSettings.model_validate(disk), index_url=None, epoch=Epoch(2))
    with pytest.raises(FolderInUseError, match=r"pool-0 is in use by another process"):
        await second.start()
    await second.close()


async def test_a_folder_that_goes_off_is_told_to_the_index(
    start_node: StartNode, make_client: MakeClient, disk: dict[str, object]
) -> None:
    node = await start_node(**disk)
    pages = SamplePages(60, size=100_000)
    await pages.store(make_client())
    assert node._disk is not None
    node._disk._failed(node._disk._folders[0], OSError(errno.ENXIO, "gone"), "load")

    async def is_told() -> bool:
        return {entry.tier for entry in node._cache.entries()} == {Tier.POOL_RAM}

    await until(is_told)
    assert node.status().disk_folders["off"] == 1
    hits = await pages.hits(make_client())
    assert 0 < hits.count(True) < 20
    # Serving goes on from RAM.
    more = SamplePages(3, first=1000)
    assert await more.store(make_client()) == [PutStatus.STORED] * 3
    assert await more.hits(make_client()) == [True] * 3


class Outside:
    """A node process with a disk, a real index, and a reader of it."""

    def __init__(self, index: IndexSettings, pool: dict[str, object]) -> None:
        self._given = json.dumps({"index": index.model_dump(mode="json"), "pool": pool})
        self.mirror = Mirror()
        self.feed = MirrorFeed(index.url, self.mirror, settings=index)
        self.client = PoolClient(self.mirror, PoolSettings())
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("disk_node_process.py")), self._given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    async def end(self, *, kill: bool) -> None:
        assert self.process is not None
        if kill:
            self.process.kill()
        await asyncio.to_thread(self.process.communicate, timeout=100)

    def masks(self, pages: SamplePages) -> list[PartMask]:
        return [
            next(iter(self.mirror.matches([page.key]).get(POOL, ())), PartMask(0))
            for page in pages.pages
        ]


@pytest.fixture
async def outside(index_settings: IndexSettings, disk: dict[str, object]) -> AsyncIterator[Outside]:
    """Nothing but the index runs yet."""
    made = Outside(index_settings, disk)
    await made.feed.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        await made.end(kill=True)
    await made.client.close()
    await made.feed.close()


@pytest.mark.live
@pytest.mark.parametrize("kill", [True, False])
async def test_pages_are_found_on_disk_and_served_after_a_restart(
    outside: Outside, kill: bool
) -> None:
    large, small = SamplePages(40, size=100_000), SamplePages(60, first=100, size=5_000)

    async def is_up() -> bool:
        return POOL in outside.mirror.places()

    async def all_are_known() -> bool:
        return all(outside.masks(large)) and all(outside.masks(small))

    await outside.start()
    await until(is_up)
    assert outside.mirror.places()[POOL].tiers == (Tier.POOL_RAM, Tier.POOL_DISK)
    for pages in (large, small):
        assert set(await pages.store(outside.client)) == {PutStatus.STORED}
    await until(all_are_known)
    on_disk = [bool(m & DISK) for pages in (large, small) for m in outside.masks(pages)]
    assert on_disk.count(True) > 20
    await outside.end(kill=kill)

    async def is_gone() -> bool:
        return POOL not in outside.mirror.places()

    await until(is_gone)
    await outside.start()
    await until(is_up)

    async def what_is_on_disk_is_known() -> bool:
        masks = [*outside.masks(large), *outside.masks(small)]
        return all(m == DISK for m, expected in zip(masks, on_disk, strict=True) if expected)

    await until(what_is_on_disk_is_known)
    hits = [*await large.hits(outside.client), *await small.hits(outside.client)]
    assert all(hit for hit, expected in zip(hits, on_disk, strict=True) if expected)
    if not kill:
        assert hits == [True] * 100, "an orderly stop loses nothing"

    async def is_promoted_and_told() -> bool:
        return (RAM | DISK) in [*outside.masks(large), *outside.masks(small)]

    await until(is_promoted_and_told)


@pytest.mark.live
async def test_a_node_killed_while_pages_go_down_to_disk_has_whole_ones_there_and_no_others(
    outside: Outside,
) -> None:
    pages = SamplePages(120, size=100_000)

    async def is_up() -> bool:
        return POOL in outside.mirror.places()

    async def is_gone() -> bool:
        return not await is_up()

    async def some_went_down() -> bool:
        return sum(bool(mask & DISK) for mask in outside.masks(pages)) > 10

    await outside.start()
    await until(is_up)
    store = asyncio.create_task(pages.store(outside.client, deadline_s=120))
    await until(some_went_down)
    await outside.end(kill=True)
    await store
    on_disk = [bool(mask & DISK) for mask in outside.masks(pages)]
    await until(is_gone)
    await outside.start()
    await until(is_up)

    async def what_is_on_disk_is_known() -> bool:
        return all(
            mask & DISK
            for mask, expected in zip(outside.masks(pages), on_disk, strict=True)
            if expected
        )

    await until(what_is_on_disk_is_known)
    # What comes is compared with what was stored.
    hits = await pages.hits(outside.client)
    assert all(hit for hit, expected in zip(hits, on_disk, strict=True) if expected)
    assert hits.count(True) < 120, "it was killed before all had come"
