"""A node serves over the wire what its cache holds, to whoever comes, and stops cleanly."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from pie.page.events import Epoch, PlaceId
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.conformance import sample_page
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.pool.status import PoolStatus
from pie.pool.tier import PageId, id_of
from pie.wire.client import WireClient
from pie.wire.errors import AddressError, RefusedError
from pie.wire.figures import kinds
from pie.wire.ids import new_request_id
from pie.wire.messages import (
    AskStatus,
    Generate,
    GetPages,
    Lookup,
    LookupResult,
    PutPages,
    PutResult,
    PutStatus,
    RefusalCode,
    Sampling,
    StatusReport,
    StoreWanted,
)
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.places import Places, SamplePages, until

MISS, HIT, PENDING, RETRY = (
    LookupStatus.MISS,
    LookupStatus.HIT,
    LookupStatus.PENDING,
    LookupStatus.RETRY,
)


class Writer:
    """One process that stores pages, as the wire sees it."""

    def __init__(self, address: str) -> None:
        self.wire = WireClient(address)

    async def wants(self, *pages: PageId) -> list[int]:
        return await self._ask(StoreWanted, pages)

    async def lookup(self, *pages: PageId) -> list[int]:
        return await self._ask(Lookup, pages)

    async def put(self, header: PageHeader, payload: bytes) -> PutStatus:
        message = PutPages(new_request_id(), self.wire.epoch, (header,))
        answer, _ = await self.wire.request(message, [payload], timeout_s=60)
        assert isinstance(answer, PutResult)
        return PutStatus(answer.statuses[0])

    async def _ask(self, kind: type[Lookup | StoreWanted], pages: tuple[PageId, ...]) -> list[int]:
        names = tuple((page.key, int(page.part)) for page in pages)
        message = kind(new_request_id(), self.wire.epoch, names)
        answer, _ = await self.wire.request(message, timeout_s=60)
        assert isinstance(answer, LookupResult)
        return list(answer.statuses)


Connect = Callable[[PoolNode], "asyncio.Future[Writer]"]


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[PoolNode], object]]:
    """Connects writers, and closes them."""
    writers: list[Writer] = []

    async def connected(node: PoolNode) -> Writer:
        writer = Writer(node.record.address)
        await writer.wire.start()
        writers.append(writer)
        return writer

    yield connected
    for writer in writers:
        await writer.wire.close()


async def test_of_two_writers_the_second_learns_pending_and_then_hit(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node(claim_timeout_s=60)
    first, second = await connect(node), await connect(node)
    header, payload = sample_page(1)
    page = id_of(header)
    assert await first.wants(page) == [MISS]
    assert await second.wants(page) == [PENDING]
    assert await second.lookup(page) == [PENDING]
    assert await first.put(header, payload) is PutStatus.STORED
    assert await second.wants(page) == [HIT]
    assert await second.put(header, payload) is PutStatus.HELD


async def test_a_writer_that_vanishes_leaves_its_page_to_the_next(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node(claim_timeout_s=60)
    first, second = await connect(node), await connect(node)
    page = id_of(sample_page(1)[0])
    assert await first.wants(page) == [MISS]
    await first.wire.close()

    async def is_wanted() -> bool:
        return await second.wants(page) == [MISS]

    await until(is_wanted)
    assert node.status().claims == 1


async def test_a_writer_that_takes_too_long_leaves_its_page_to_the_next(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node(claim_timeout_s=0.1)
    first, second = await connect(node), await connect(node)
    page = id_of(sample_page(1)[0])
    assert await first.wants(page) == [MISS]
    await asyncio.sleep(0.15)
    assert await second.lookup(page) == [MISS]
    assert await second.wants(page) == [MISS]


async def test_whoever_brings_the_bytes_first_stores_them(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node()
    first, second = await connect(node), await connect(node)
    header, payload = sample_page(1)
    assert await first.wants(id_of(header)) == [MISS]
    assert await second.put(header, payload) is PutStatus.STORED
    assert await first.put(header, payload) is PutStatus.HELD
    assert node.status().claims == 0


async def test_a_payload_that_does_not_match_its_checksum_is_refused_and_counted(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node()
    writer = await connect(node)
    header, payload = sample_page(1)
    assert await writer.put(header, payload[:-1] + b"x") is PutStatus.REFUSED
    assert await writer.lookup(id_of(header)) == [MISS]
    assert node.status().bad_pages == {"at_store": 1, "at_load": 0, "malformed": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"parent": b""},
        {"raw_bytes": 5},
        {"raw_bytes": -1},
        {"index": -1},
        {"codec": "lz4"},
        {"version": 99},
        {"dtype": "x" * 1000},
        {"tenant_tag": "x" * 1000},
    ],
    ids=str,
)
async def test_a_header_that_makes_no_sense_is_refused_and_counted(
    start_node: StartNode, connect: Connect, change: dict[str, object]
) -> None:
    node = await start_node()
    writer = await connect(node)
    header, payload = sample_page(1)
    bad = msgspec.structs.replace(header, **change)
    assert await writer.put(bad, payload) is PutStatus.REFUSED
    assert node.status().bad_pages["malformed"] == 1
    assert await writer.put(header, payload) is PutStatus.STORED


async def test_headers_without_payloads_are_refused(
    start_node: StartNode, connect: Connect
) -> None:
    writer = await connect(await start_node())
    message = PutPages(new_request_id(), writer.wire.epoch, (sample_page(1)[0],))
    with pytest.raises(RefusedError) as refused:
        await writer.wire.request(message, timeout_s=60)
    assert refused.value.code is RefusalCode.BAD_MESSAGE


async def test_a_part_that_does_not_exist_is_refused(
    start_node: StartNode, connect: Connect
) -> None:
    writer = await connect(await start_node())
    message = GetPages(new_request_id(), writer.wire.epoch, ((sample_page(1)[0].key, 9),))
    with pytest.raises(RefusedError, match="no part has the number 9"):
        await writer.wire.request(message, timeout_s=60)


async def test_what_is_not_for_a_pool_is_refused(start_node: StartNode, connect: Connect) -> None:
    writer = await connect(await start_node())
    message = Generate(new_request_id(), writer.wire.epoch, 0, 1, Sampling())
    with pytest.raises(RefusedError, match="Generate"):
        await writer.wire.request(message, [b"\0\0\0\0"], timeout_s=60)


async def test_a_message_for_an_earlier_start_is_refused(
    start_node: StartNode, connect: Connect
) -> None:
    writer = await connect(await start_node(epoch=8))
    message = Lookup(new_request_id(), Epoch(7), ((sample_page(1)[0].key, 0),))
    with pytest.raises(RefusedError) as refused:
        await writer.wire.request(message, timeout_s=60)
    assert refused.value.code is RefusalCode.STALE_EPOCH


async def test_a_full_node_lets_the_least_recently_used_pages_go(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(ram_budget="1MiB")
    client = make_client()
    early, late = SamplePages(8, size=64 << 10), SamplePages(10, first=8, size=64 << 10)
    await early.store(client)
    assert await SamplePages(1, size=64 << 10).hits(client) == [True]
    await late.store(client)
    assert await late.hits(client) == [True] * 10
    assert (await early.hits(client))[0], "it was used after all others of the early ones"
    status = node.status()
    assert status.evicted >= 3
    assert status.used_bytes <= status.budget_bytes


async def test_a_node_tells_what_it_counts(
    start_node: StartNode, make_client: MakeClient, connect: Connect
) -> None:
    node = await start_node(ram_budget="1MiB", epoch=3)
    pages = SamplePages(3)
    await pages.store(make_client())
    await pages.hits(make_client())
    writer = await connect(node)
    told, _ = await writer.wire.request(AskStatus(new_request_id()), timeout_s=60)
    assert isinstance(told, StatusReport)
    assert (told.place, told.epoch, told.state) == ("pool-0", 3, "serving")
    assert told.counters["stored"] == told.counters["hits"] == 3
    assert told.counters["bad_pages.at_load"] == told.counters["policy_failures"] == 0
    assert told.counters["policy_fallbacks"] == 0
    assert told.counters["policy_proposals_refused.unknown"] == 0
    assert told.gauges["pages.pool_ram"] == 3
    assert 0 < told.gauges["used_bytes"] < told.gauges["budget_bytes"] == 1 << 20
    await node.drain(60)
    told, _ = await writer.wire.request(AskStatus(new_request_id()), timeout_s=60)
    assert isinstance(told, StatusReport)
    assert told.state == "draining"


def test_every_number_of_a_status_is_a_counter_or_a_gauge() -> None:
    said_otherwise = {"place", "epoch", "address", "index_mode", "draining"}
    assert kinds(PoolStatus).keys() == set(PoolStatus.__struct_fields__) - said_otherwise


async def test_a_draining_node_sends_but_takes_nothing(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node()
    client = make_client()
    held = SamplePages(3)
    await held.store(client)
    await node.drain(60)
    assert await held.hits(client) == [True] * 3
    assert await SamplePages(1, first=10).store(client) == [PutStatus.REFUSED]
    assert node.status().draining


async def test_draining_waits_for_what_is_being_sent_but_not_for_ever(
    start_node: StartNode, connect: Connect, make_client: MakeClient
) -> None:
    node = await start_node(ram_budget="128MiB")
    pages = SamplePages(80, size=1 << 20)
    await pages.store(make_client(), 60)
    reader = await connect(node)
    names = tuple((page.key, 0) for page in pages.pages)
    stream = reader.wire.stream(GetPages(new_request_id(), Epoch(1), names), timeout_s=60)
    await anext(stream)  # From here on the reader gives no credit.

    async def is_out_of_credit() -> bool:
        came = reader.wire.counters.payload_bytes_in >> 20
        return came >= reader.wire._settings.credit_messages and node.status().loans > 0

    await until(is_out_of_credit)
    async with asyncio.timeout(60):
        await node.drain(0.2)
    assert node.status().loans > 0
    draining = asyncio.create_task(node.drain(60))
    assert len([answer async for answer in stream]) == 79
    async with asyncio.timeout(60):
        await draining
    assert node.status().loans == 0


async def test_closing_leaves_no_thread_and_frees_the_address(
    start_node: StartNode, make_client: MakeClient, places: Places
) -> None:
    node = await start_node()
    await SamplePages(4, size=1 << 20).store(make_client())
    await node.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pie-pool")]
    again = await start_node(epoch=2, address=node.record.address)
    assert again.record.address == node.record.address


async def test_a_closed_node_answers_nobody(start_node: StartNode) -> None:
    node = await start_node()
    await node.close()
    writer = WireClient(node.record.address)
    connecting = asyncio.create_task(writer.start())
    await asyncio.sleep(0.1)
    assert not connecting.done()
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await writer.close()


async def test_a_node_that_cannot_listen_says_so_and_leaves_nothing(
    start_node: StartNode,
) -> None:
    node = await start_node()
    second = PoolNode(
        PlaceId("pool-1"),
        PoolSettings(),
        index_url=None,
        epoch=Epoch(1),
        address=node.record.address,
    )
    with pytest.raises(AddressError):
        await second.start()
    await second.close()
    with pytest.raises(RuntimeError, match="not started"):
        _ = second.record
