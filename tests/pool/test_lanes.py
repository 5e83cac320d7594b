"""Who waits for one tier keeps nobody waiting who needs another, and keeps no node from stopping."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie.page.lookup import LookupStatus
from pie.pool.client import PoolClient
from pie.pool.files import Files
from pie.pool.node import PoolNode
from pie.wire.messages import PutStatus
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.places import SamplePages, until

SIZE = 600_000
"""More than is sent from the event loop."""
HUNG = 4


class Disk:
    """Every disk of this process; it hangs where a test says so."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()
        self.waiting = threading.Semaphore(0)

    def wait(self) -> None:
        if not self.works.is_set():
            self.waiting.release()
            assert self.works.wait(60)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk()
    for call in ("read", "read_at", "write_new", "write_at", "unlink", "sync"):
        inner = getattr(Files, call)

        def held(*arguments, inner=inner, **options):  # type: ignore[no-untyped-def]
            made.wait()
            return inner(*arguments, **options)

        monkeypatch.setattr(Files, call, held)
    yield made
    made.works.set()


async def _node(start_node: StartNode, folder: Path, **settings: object) -> PoolNode:
    return await start_node(
        ram_budget="16MiB", disk_budget="32MiB", disk_folders=[str(folder)], **settings
    )


async def _on_disk(node: PoolNode, client: PoolClient, count: int) -> SamplePages:
    """Store pages, and leave them on disk only."""
    pages = SamplePages(count, size=SIZE)
    assert set(await pages.store(client)) == {PutStatus.STORED}
    await asyncio.to_thread(node._cache.relieve, 0.0, 0.0)
    assert node.status().pages == {"pool_ram": 0, "pool_disk": count}
    return pages


async def test_a_disk_that_hangs_keeps_no_page_of_ram_waiting(
    start_node: StartNode, make_client: MakeClient, disk: Disk, tmp_path: Path
) -> None:
    node = await _node(start_node, tmp_path)
    client = make_client()
    await _on_disk(node, client, HUNG)
    near = SamplePages(4, size=SIZE, first=100)
    await near.store(client)
    disk.works.clear()
    hung = [
        asyncio.create_task(SamplePages(1, size=SIZE, first=at).hits(make_client(), 120))
        for at in range(HUNG)
    ]
    assert await asyncio.to_thread(disk.waiting.acquire, timeout=60)
    assert await near.hits(make_client(), 60) == [True] * 4
    assert set(await SamplePages(4, size=SIZE, first=200).store(make_client(), 60)) == {
        PutStatus.STORED
    }
    disk.works.set()
    assert await asyncio.gather(*hung) == [[True]] * HUNG


async def test_a_page_that_ram_finds_bad_is_not_waited_for_on_the_event_loop(
    start_node: StartNode, make_client: MakeClient, disk: Disk, tmp_path: Path
) -> None:
    node = await _node(start_node, tmp_path)
    client = make_client()
    pages = SamplePages(1, size=1000)
    await pages.store(client)
    (page,) = pages.pages
    await asyncio.to_thread(node._cache.save, time.monotonic() + 60)
    node._tier._payload(node._tier._entries[page])[0] ^= 1
    disk.works.clear()
    asking = asyncio.create_task(pages.hits(client, 120))
    assert await asyncio.to_thread(disk.waiting.acquire, timeout=60)
    assert node._cache.lookup(page) is LookupStatus.HIT
    disk.works.set()
    assert await asking == [True]


async def test_a_disk_that_hangs_keeps_no_node_from_stopping(
    start_node: StartNode,
    make_client: MakeClient,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = await _node(start_node, tmp_path)
    client = make_client()
    pages = await _on_disk(node, client, 2)
    await SamplePages(2, size=SIZE, first=100).store(client)
    disk.works.clear()
    hung = asyncio.create_task(pages.hits(client, 120))
    assert await asyncio.to_thread(disk.waiting.acquire, timeout=60)
    for limit in ("lanes.CLOSE_S", "mover._CLOSE_S", "node._LAST_PAGE_S"):
        monkeypatch.setattr(f"pie.pool.{limit}", 0.1)
    node._close_s = 0.1
    async with asyncio.timeout(60):
        await node.drain(0.5)
        await node.close()
    hung.cancel()
    await asyncio.gather(hung, return_exceptions=True)
    # What the disk held goes on to its end, and closes the tier.
    disk.works.set()
    tiers = [tier for tier in (node._tier, node._disk) if tier is not None]

    async def are_closed() -> bool:
        return not any(list(tier.pages()) for tier in tiers)

    await until(are_closed)


async def test_a_node_that_nobody_takes_pages_from_saves_them(
    start_node: StartNode,
    make_client: MakeClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The disk may take nearly all of the time, which is far more than it needs.
    monkeypatch.setattr("pie.pool.node._SAVE_SHARE", 0.98)
    node = await _node(start_node, tmp_path, drain_on_stop=True)
    pages = SamplePages(8, size=SIZE)
    assert set(await pages.store(make_client())) == {PutStatus.STORED}
    await start_node("pool-1", ram_budget="1MiB")
    await node.drain(100.0)
    held = node.status().pages
    assert held["pool_disk"] == held["pool_ram"] >= 7
