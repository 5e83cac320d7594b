"""What a client stores, any client loads; whatever fails is a miss, soon, and counted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.page.lookup import LookupStatus
from pie.pool import links
from pie.pool.client import Reason
from pie.pool.placement import view_of
from pie.wire.client import WireClient
from pie.wire.messages import GetPages, Message, PageData, PutStatus
from pie.wire.peer import Peer
from pie.wire.server import WireServer
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.places import Places, SamplePages, until, without_waits

MIB = 1 << 20
Answer = Callable[[Peer, GetPages], Awaitable[None]]


@pytest.fixture
async def lying_node(places: Places) -> AsyncIterator[Callable[[Answer], Awaitable[None]]]:
    """Starts a node that answers each get as it likes."""
    servers: list[WireServer] = []

    async def start(answer: Answer) -> None:
        async def handle(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
            if isinstance(message, GetPages):
                await answer(peer, message)

        server = WireServer("tcp://127.0.0.1:0", handle, epoch=Epoch(1))
        address = await server.start()
        places.up(PlaceRecord(PlaceId("liar"), Epoch(1), PlaceKind.POOL, address))
        servers.append(server)

    yield start
    for server in servers:
        await server.close()


async def test_what_one_client_stores_another_loads(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node()
    pages = SamplePages(40)
    assert await pages.store(make_client()) == [PutStatus.STORED] * 40
    reader = make_client()
    assert await pages.hits(reader) == [True] * 40
    assert (reader.counters.loaded, reader.counters.loaded_bytes) == (40, 40 * 4096)
    assert node.status().pages == {"pool_ram": 40}


@pytest.mark.parametrize("size", [1, 70_000, MIB + 1, 5 * MIB])
async def test_pages_of_any_size_come_back_as_they_were(
    start_node: StartNode, make_client: MakeClient, size: int
) -> None:
    await start_node(ram_budget="64MiB")
    client = make_client()
    pages = SamplePages(4, size=size)
    await pages.store(client)
    assert await pages.hits(client) == [True] * 4


async def test_pages_that_are_not_held_are_misses_in_their_places(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node()
    client = make_client()
    await SamplePages(2, first=1).store(client)
    assert await SamplePages(4).hits(client) == [False, True, True, False]
    assert client.counters.missed == {Reason.NOT_HELD: 2}


async def test_pages_that_are_held_are_not_sent_again(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node()
    client = make_client()
    pages = SamplePages(3)
    await pages.store(client)
    received = node.status().received_bytes
    assert await pages.store(client) == [PutStatus.HELD] * 3
    assert node.status().received_bytes == received


async def test_two_clients_that_store_the_same_at_once_send_it_once(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(ram_budget="64MiB")
    pages = SamplePages(16, size=MIB)
    outcomes = await asyncio.gather(pages.store(make_client()), pages.store(make_client()))
    assert node.status().received_bytes == 16 * MIB
    assert node.status().stored == 16
    for first, second in zip(*outcomes, strict=True):
        assert PutStatus.STORED in {first, second}
        assert PutStatus.REFUSED not in {first, second}


async def test_look_ups_tell_what_each_page_is(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node()
    client = make_client()
    pages = SamplePages(3)
    await SamplePages(2).store(client)
    statuses = await client.lookup(pages.pages, groups=pages.groups, deadline_s=60)
    assert statuses == [LookupStatus.HIT, LookupStatus.HIT, LookupStatus.MISS]


async def test_a_store_larger_than_the_budget_goes_in_turns(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node(ram_budget="64MiB")
    client = make_client(inflight_budget="1MiB")
    pages = SamplePages(8, size=MIB)
    assert await pages.store(client) == [PutStatus.STORED] * 8
    assert await pages.hits(client) == [True] * 8
    assert client._budget.used_bytes == 0


async def test_groups_spread_over_nodes_and_come_back_in_order(
    start_node: StartNode, make_client: MakeClient
) -> None:
    nodes = [await start_node(f"pool-{n}") for n in range(3)]
    pages = SamplePages(32 * 12, size=100)
    client = make_client()
    await pages.store(client)
    assert await pages.hits(client) == [True] * 32 * 12
    held = [node.status().pages["pool_ram"] for node in nodes]
    assert all(held)
    assert all(count % 32 == 0 for count in held), "a group stays together"


async def test_a_node_that_goes_costs_its_own_groups_only(
    start_node: StartNode, make_client: MakeClient
) -> None:
    nodes = [await start_node(f"pool-{n}") for n in range(2)]
    pages = SamplePages(32 * 8, size=100)
    client = make_client()
    await pages.store(client)
    left = nodes[1].status().pages["pool_ram"]
    await nodes[0].close()
    assert sum(await pages.hits(client)) == left
    assert client.counters.missed == {Reason.GONE: 256 - left}


async def test_pages_stored_while_their_home_was_away_are_found(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node("pool-0")
    pages = SamplePages(32 * 8, size=100)
    await pages.store(make_client())
    returned = await start_node("pool-1")
    client = make_client()
    assert await pages.hits(client) == [True] * 32 * 8
    assert not returned.status().hits
    assert returned.status().misses, "some groups belong to the one that was away"


async def test_and_look_ups_find_them_too(start_node: StartNode, make_client: MakeClient) -> None:
    await start_node("pool-0")
    pages = SamplePages(32 * 8, size=100)
    await pages.store(make_client())
    await start_node("pool-1")
    wanted = [*pages.pages, *SamplePages(1, first=9999).pages]
    groups = [*pages.groups, pages.groups[0]]
    statuses = await make_client().lookup(wanted, groups=groups, deadline_s=60)
    assert statuses == [LookupStatus.HIT] * 32 * 8 + [LookupStatus.MISS]


async def test_a_page_that_nobody_has_is_asked_of_two_nodes_and_missed_once(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    nodes = [await start_node(f"pool-{n}", move_after_s=0) for n in range(3)]
    client = make_client()

    async def have_settled() -> bool:
        for node in nodes:
            places.up(node.record)
        return {node.record.settled for node in nodes} == {view_of(places.known)}

    await until(have_settled)
    assert await SamplePages(1).hits(client) == [False]
    assert sum(node.status().misses for node in nodes) == 2
    assert client.counters.missed == {Reason.NOT_HELD: 1}


async def test_a_bit_that_flips_in_the_arena_is_a_miss_once_and_then_not_held(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node()
    client = make_client()
    pages = SamplePages(2)
    await pages.store(client)
    entry = node._tier._entries[pages.pages[1]]
    node._tier._payload(entry)[100] ^= 1
    assert await pages.hits(client) == [True, False]
    assert node.status().bad_pages["at_load"] == 1
    assert node.status().pages == {"pool_ram": 1}
    assert await pages.store(client) == [PutStatus.HELD, PutStatus.STORED]


async def test_without_a_node_all_is_a_miss_at_once(make_client: MakeClient) -> None:
    client = make_client()
    pages = SamplePages(3)
    assert await pages.hits(client) == [False] * 3
    assert await pages.store(client) == [PutStatus.REFUSED] * 3
    assert client.counters.missed == {Reason.NO_NODE: 3}
    assert client.counters.dropped == {Reason.NO_NODE: 3}


async def test_a_worker_is_never_asked_for_pool_pages(
    make_client: MakeClient, places: Places
) -> None:
    places.up(PlaceRecord(PlaceId("w0"), Epoch(1), PlaceKind.WORKER, "tcp://127.0.0.1:9"))
    client = make_client()
    assert await SamplePages(1).hits(client) == [False]
    assert client.counters.missed == {Reason.NO_NODE: 1}


async def test_a_node_that_was_never_there_is_waited_for_once_and_not_for_long(
    make_client: MakeClient, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_PATIENCE_S", 0.05)
    places.up(PlaceRecord(PlaceId("ghost"), Epoch(1), PlaceKind.POOL, "tcp://127.0.0.1:9"))
    client, hung = make_client(), asyncio.Event()

    async def hang(*_: object) -> None:
        await hung.wait()

    monkeypatch.setattr(WireClient, "start", hang)
    assert await SamplePages(1).hits(client) == [False]
    monkeypatch.setattr(links, "asyncio", without_waits())
    assert await SamplePages(5).hits(client) == [False] * 5
    monkeypatch.undo()
    assert client.counters.missed == {Reason.GONE: 6}


async def test_a_deadline_holds_while_a_connection_is_being_made(
    make_client: MakeClient, places: Places
) -> None:
    places.up(PlaceRecord(PlaceId("ghost"), Epoch(1), PlaceKind.POOL, "tcp://127.0.0.1:9"))
    client = make_client()
    assert await SamplePages(1).hits(client, deadline_s=0.05) == [False]
    assert client.counters.missed == {Reason.TIMEOUT: 1}


async def test_a_node_that_the_index_drops_while_it_is_being_connected_to_is_a_miss(
    make_client: MakeClient, places: Places
) -> None:
    places.up(PlaceRecord(PlaceId("ghost"), Epoch(1), PlaceKind.POOL, "tcp://127.0.0.1:9"))
    client = make_client()
    loading = asyncio.create_task(SamplePages(1).hits(client))
    await asyncio.sleep(0.05)
    places.known.clear()
    assert await SamplePages(1).hits(client) == [False]
    assert await loading == [False]
    assert client.counters.missed == {Reason.NO_NODE: 1, Reason.GONE: 1}


async def test_an_address_that_makes_no_sense_is_a_miss(
    make_client: MakeClient, places: Places
) -> None:
    places.up(PlaceRecord(PlaceId("odd"), Epoch(1), PlaceKind.POOL, "nonsense"))
    client = make_client()
    assert await SamplePages(1).hits(client) == [False]
    assert client.counters.missed == {Reason.FAILED: 1}


async def test_a_node_that_comes_back_with_a_new_epoch_is_used_again(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(epoch=1)
    client = make_client()
    pages = SamplePages(3)
    await pages.store(client)
    await node.close()
    assert await pages.hits(client) == [False] * 3
    await start_node(epoch=2, address=node.record.address)

    async def are_stored() -> bool:
        return await pages.store(client) == [PutStatus.STORED] * 3

    await until(are_stored)
    assert await pages.hits(client) == [True] * 3


async def test_a_node_that_moves_is_found_at_its_new_address(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(epoch=1)
    client = make_client()
    pages = SamplePages(3)
    await pages.store(client)
    await start_node(epoch=2)
    await node.close()
    assert await pages.store(client) == [PutStatus.STORED] * 3
    assert await pages.hits(client) == [True] * 3


async def test_a_node_that_the_index_gives_up_is_let_go(
    start_node: StartNode, make_client: MakeClient, places: Places
) -> None:
    await start_node()
    client = make_client()
    await SamplePages(1).store(client)
    places.known.clear()
    assert await SamplePages(1).hits(client) == [False]
    assert client._links._links == {}


async def test_a_load_that_is_given_up_leaves_no_page_pinned(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(ram_budget="64MiB")
    client = make_client()
    pages = SamplePages(40, size=MIB)
    await pages.store(client)
    for delay_s in (0.0, 0.001, 0.004, 0.01):
        load = asyncio.create_task(pages.load(client))
        await asyncio.sleep(delay_s)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)

    async def all_have_ended() -> bool:
        return not node.status().loans

    await until(all_have_ended)
    assert await pages.hits(client) == [True] * 40
    assert client._budget.used_bytes == 0


async def test_pages_keyed_with_another_secret_are_refused(
    start_node: StartNode, make_client: MakeClient
) -> None:
    ours, theirs = b"o" * 32, b"t" * 32
    node = await start_node(secret=ours)
    pages = SamplePages(2, secret=ours)
    await pages.store(make_client(secret=ours))
    assert await pages.hits(make_client(secret=ours)) == [True] * 2
    stranger = make_client(secret=theirs)
    assert await pages.hits(stranger) == [False] * 2
    assert stranger.counters.missed == {Reason.BAD_PAGE: 2}
    forged = SamplePages(2, first=5, secret=theirs)
    assert await forged.store(stranger) == [PutStatus.REFUSED] * 2
    assert node.status().bad_pages["at_store"] == 2


async def test_a_payload_that_is_damaged_on_its_way_is_a_miss(
    lying_node: Any, make_client: MakeClient
) -> None:
    pages = SamplePages(1)

    async def answer(peer: Peer, message: GetPages) -> None:
        payload = pages.payloads[0][:-1] + b"x"
        hit = PageData(message.request_id, 0, int(LookupStatus.HIT), pages.headers[0])
        await peer.send(hit, [payload])

    await lying_node(answer)
    client = make_client()
    assert await pages.hits(client) == [False]
    assert client.counters.missed == {Reason.BAD_PAGE: 1}


async def test_another_page_than_the_one_asked_for_is_a_miss(
    lying_node: Any, make_client: MakeClient
) -> None:
    pages, others = SamplePages(1), SamplePages(1, first=7)

    async def answer(peer: Peer, message: GetPages) -> None:
        hit = PageData(message.request_id, 0, int(LookupStatus.HIT), others.headers[0])
        await peer.send(hit, [others.payloads[0]])

    await lying_node(answer)
    client = make_client()
    assert await pages.hits(client) == [False]
    assert client.counters.missed == {Reason.BAD_PAGE: 1}


async def test_an_answer_about_no_page_is_a_miss(lying_node: Any, make_client: MakeClient) -> None:
    async def answer(peer: Peer, message: GetPages) -> None:
        await peer.send(PageData(message.request_id, 5, int(LookupStatus.MISS)))

    await lying_node(answer)
    client = make_client()
    assert await SamplePages(1).hits(client) == [False]
    assert client.counters.missed == {Reason.FAILED: 1}


async def test_a_node_that_falls_silent_costs_no_more_than_the_deadline(
    lying_node: Any, make_client: MakeClient
) -> None:
    pages = SamplePages(3)

    async def answer(peer: Peer, message: GetPages) -> None:
        hit = PageData(message.request_id, 0, int(LookupStatus.HIT), pages.headers[0])
        await peer.send(hit, [pages.payloads[0]])
        await asyncio.sleep(60)

    await lying_node(answer)
    client = make_client()
    assert await pages.hits(client, deadline_s=3.0) == [True, False, False]
    assert client.counters.missed == {Reason.TIMEOUT: 2}


async def test_a_closed_client_knows_no_node(
    start_node: StartNode, make_client: MakeClient
) -> None:
    await start_node()
    client = make_client()
    await SamplePages(1).store(client)
    await client.close()
    assert await SamplePages(1).hits(client) == [False]


async def test_lists_of_unequal_length_are_an_error(make_client: MakeClient) -> None:
    pages = SamplePages(2)
    client = make_client()
    with pytest.raises(ValueError, match="2 pages, 1 groups"):
        await client.load(pages.pages, groups=pages.groups[:1], deadline_s=1)
    with pytest.raises(ValueError, match="2 headers, 1 payloads"):
        await client.store(pages.headers, pages.payloads[:1], groups=pages.groups, deadline_s=1)
