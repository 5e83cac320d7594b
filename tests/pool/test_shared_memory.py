"""Pages of a node on the same host land in memory that the client lends; whatever goes wrong, pages are right."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os

import pytest

from pie.pool.client import PoolClient
from pie.pool.conformance import sample_page
from pie.pool.errors import NotSharedError
from pie.pool.node import PoolNode
from pie.pool.shared_memory import LandingArea, MappedArea
from pie.wire.client import WireClient
from pie.wire.errors import RefusedError
from pie.wire.ids import new_request_id
from pie.wire.messages import ShareMemory
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.places import SamplePages, until

SIZE = 100_000
LIMIT = 1 << 30


def mapped(area: LandingArea, *, token: bytes | None = None, limit: int = LIMIT) -> MappedArea:
    return MappedArea(os.getpid(), area.file, area.size_bytes, token or area.token, limit)


def used_bytes(client: PoolClient) -> int:
    gc.collect()
    return 0 if client._landing._area is None else client._landing._area.used_bytes


def sent_bytes(client: PoolClient) -> int:
    """Return the payload that came over the wire."""
    return sum(link.client.counters.payload_bytes_in for link in client._links._links.values())


async def test_after_the_first_pages_all_land_in_the_clients_memory(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node, client, pages = await start_node(), make_client(), SamplePages(16, size=SIZE)
    await pages.store(client)
    assert all(await pages.hits(client))
    over_the_wire = sent_bytes(client)
    assert over_the_wire == 16 * SIZE, "how large a page is was not known"
    assert all(await pages.hits(client))
    assert sent_bytes(client) == over_the_wire
    assert node.status().sent_bytes == 32 * SIZE
    assert node.status().loans == 0

    async def nobody_holds_what_landed_any_more() -> bool:
        return used_bytes(client) == 0

    await until(nobody_holds_what_landed_any_more)


async def test_what_landed_stays_as_it_is_as_long_as_it_is_held(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node(ram_budget="32MiB")
    client = make_client(shared_memory="1MiB")
    first, second = SamplePages(6, size=SIZE), SamplePages(40, first=100, size=SIZE)
    for pages in (first, second):
        await pages.store(client)
    await first.load(client)
    held = await first.load(client)
    assert used_bytes(client) >= 6 * SIZE
    # More than there is room for: the rest is sent.
    before = sent_bytes(client)
    assert all(await second.hits(client))
    assert sent_bytes(client) > before
    assert [page and bytes(page.payload) for page in held] == first.payloads
    assert all(page and page.payload.readonly for page in held)


async def test_slots_of_a_load_that_was_given_up_are_not_used_again_and_a_worn_area_is_left(
    start_node: StartNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, client = await start_node(), make_client(shared_memory="2MiB")
    pages = SamplePages(16, size=SIZE)
    await pages.store(client)
    await pages.load(client)
    await pages.load(client)
    area = client._landing._area
    assert area is not None

    def time_out(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        # As from a node that was halted, no answer comes.
        patch.setattr(node._service, "_borrow", time_out)
        assert await pages.hits(client, deadline_s=0.2) == [False] * 16
    assert used_bytes(client) >= 16 * SIZE
    assert area.is_worn
    assert all(await pages.hits(client))
    assert client._landing._area is not area


async def test_a_node_that_was_started_again_is_offered_the_memory_again(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node, client, pages = await start_node(), make_client(), SamplePages(4, size=SIZE)
    await pages.store(client)
    await pages.load(client)
    await node.close()
    again = await start_node(epoch=2)

    async def is_back() -> bool:
        await pages.store(client)
        return all(await pages.hits(client))

    await until(is_back)
    before = sent_bytes(client)
    assert all(await pages.hits(client))
    assert sent_bytes(client) == before
    assert len(again._service._areas) == 1


async def test_a_node_forgets_the_memory_of_a_client_that_goes(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node, client, pages = await start_node(), make_client(), SamplePages(4, size=SIZE)
    await pages.store(client)
    for _ in range(2):
        await pages.load(client)
    assert len(node._service._areas) == 1
    await client.close()

    async def is_forgotten() -> bool:
        return not node._service._areas

    await until(is_forgotten)


async def test_without_shared_memory_all_comes_over_the_wire(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node()
    client, pages = make_client(shared_memory=0), SamplePages(4, size=SIZE)
    await pages.store(client)
    for _ in range(2):
        assert all(await pages.hits(client))
    assert sent_bytes(client) == 8 * SIZE


async def refused(node: PoolNode, pid: int, file: int, size: int) -> str:
    wire = WireClient(node.record.address)
    epoch = await wire.start()
    ask = ShareMemory(new_request_id(), epoch, pid, file, size, bytes(32))
    with pytest.raises(RefusedError) as refusal:
        await wire.request(ask, timeout_s=60)
    await wire.close()
    return refusal.value.message


async def test_a_node_maps_nothing_but_what_a_client_means(start_node: StartNode) -> None:
    node, area = await start_node(), LandingArea(1 << 20)
    assert "cannot be opened" in await refused(node, 1 << 22, 3, 8192)
    assert "no area for pages" in await refused(node, os.getpid(), 0, 8192)
    assert "another one" in await refused(node, os.getpid(), area.file, area.size_bytes)
    assert "another one" in await refused(node, os.getpid(), area.file, area.size_bytes + 1)


def test_memory_that_may_be_cut_short_is_not_mapped() -> None:
    file = os.memfd_create("pie-pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 8192)
    with pytest.raises(NotSharedError, match="may be cut short"):
        MappedArea(os.getpid(), file, 8192, bytes(32), LIMIT)
    os.close(file)


def test_an_area_cannot_be_cut_short() -> None:
    area = LandingArea(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(area.file, 4096)
    assert fcntl.fcntl(area.file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_slots_lie_within_the_area() -> None:
    area = LandingArea(1 << 20)
    there = mapped(area)
    assert there.slot(0, 100) is None, "where the area's own words are"
    assert there.slot(area.size_bytes - 10, 11) is None
    offset = area.take(1000)
    assert offset is not None
    room = there.slot(offset, 1000)
    assert room is not None
    _, payload = sample_page(1, 1000)
    room[:] = payload
    assert area.landed(offset, 1000) == payload


def test_too_large_an_area_is_not_mapped() -> None:
    with pytest.raises(NotSharedError, match="are allowed"):
        mapped(LandingArea(1 << 20), limit=1 << 20)


def test_slots_come_back_when_nobody_refers_to_what_landed() -> None:
    area = LandingArea(1 << 16)
    offsets = [area.take(1 << 15), area.take(1 << 15)]
    assert None not in offsets
    assert area.take(1) is None
    landed = area.landed(offsets[0] or 0, 1 << 15)
    part = landed[10:20]
    del landed
    assert area.take(1) is None
    del part
    assert area.take(1) == offsets[0]
