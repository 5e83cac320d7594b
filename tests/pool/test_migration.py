"""Nodes hand pages to those that come, and to those that stay when they leave; none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId, Tier
from pie.page.groups import GROUP_PAGES
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.policies.replication import FixedReplication
from pie.pool import migration
from pie.pool.node import PoolNode
from pie.pool.placement import Placement, view_of
from pie.pool.tier import TierKind, id_of
from pie.wire.client import WireClient
from pie.wire.ids import new_request_id
from pie.wire.messages import PutStatus
from pie.wire.place_orders import Drained, DrainNode
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.places import Places, SamplePages, until

COUNT = 8 * GROUP_PAGES
MOVES = {"move_after_s": 0, "move_rate": 0}


def held(node: PoolNode) -> dict[PageKey, PageHeader]:
    return {header.key: header for header in node._cache.headers([Tier.POOL_RAM, Tier.POOL_DISK])}


def is_at_home(places: Places, *nodes: PoolNode, copies: int = 1) -> bool:
    """Say whether each node holds what it should keep and nothing else."""
    placement = Placement(places.known, FixedReplication(copies))
    return all(
        (node.place in placement.homes(PageKey(header.group))) == (header.key in held(node))
        for one in nodes
        for header in held(one).values()
        for node in nodes
    )


async def at_home(places: Places, *nodes: PoolNode, copies: int = 1) -> None:
    async def are() -> bool:
        return is_at_home(places, *nodes, copies=copies)

    await until(are)


async def test_a_node_that_joins_is_handed_its_share_and_pages_are_found_meanwhile(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    first = await start_node("a", **MOVES)
    client, pages = make_client(), SamplePages(COUNT)
    assert set(await pages.store(client)) == {PutStatus.STORED}
    second = await start_node("b", **MOVES)
    while not is_at_home(places, first, second):
        assert all(await pages.hits(client))
    assert held(first).keys().isdisjoint(held(second))
    assert len(held(second)) % GROUP_PAGES == 0
    assert 0 < len(held(second)) == first.status().moved < COUNT
    assert all(await pages.hits(client))


async def test_a_page_that_went_stays_a_while_for_those_who_asked_the_new_home_too_early(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    first = await start_node("a", **MOVES)
    grace = first._migration._grace
    grace.grace_s = 600.0
    await SamplePages(COUNT).store(make_client())
    second = await start_node("b", **MOVES)

    async def has_its_share() -> bool:
        return len(held(second)) > GROUP_PAGES

    await until(has_its_share)
    assert len(held(first)) == COUNT
    grace.grace_s = 0.1
    await at_home(places, first, second)
    assert len(held(first)) + len(held(second)) == COUNT


async def test_a_reader_who_asked_the_new_home_too_early_finds_the_page_at_the_old_one(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    first = await start_node("a", **MOVES)
    client, pages = make_client(), SamplePages(COUNT)
    await pages.store(client)
    second = await start_node("b", **MOVES)
    open_link = client._links.open

    async def open_late(record: PlaceRecord) -> WireClient:
        if record.place == first.place:
            # Meanwhile the new home has said no, and then got the pages.
            await until(has_its_share)
        return await open_link(record)

    placement = Placement(places.known, FixedReplication())
    share = sum(placement.homes(group) == [second.place] for group in pages.groups)

    async def has_its_share() -> bool:
        return len(held(second)) == share

    client._links.open = open_late  # type: ignore[method-assign]
    assert all(await pages.hits(client))
    assert second.status().misses > 0, "it was asked too early"
    await at_home(places, first, second)


async def test_where_two_nodes_come_at_once_no_page_is_missed_before_while_and_after_it_moves(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    old = [await start_node(name, move_after_s=1, move_rate=0) for name in "ab"]
    client, pages = make_client(), SamplePages(COUNT, first=768)
    await pages.store(client)
    nodes = [*old, *[await start_node(name, move_after_s=1, move_rate=0) for name in "cd"]]
    placement = Placement(places.known, FixedReplication())
    assert any({*placement.asked(group)[:2]}.isdisjoint("ab") for group in set(pages.groups)), (
        "both of the new nodes come before the one that has it"
    )

    def have_settled() -> bool:
        return {node.record.settled for node in nodes} == {view_of(places.known)}

    while not have_settled():
        assert all(await pages.hits(client))
        for node in nodes:
            places.up(node.record)
    assert is_at_home(places, *nodes)
    assert all(await pages.hits(client))


async def test_a_node_that_dies_while_pages_move_to_it_costs_none(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    first = await start_node("a", **MOVES)
    first._migration._grace.grace_s = 600.0
    client, pages = make_client(), SamplePages(COUNT)
    await pages.store(client)
    second = await start_node("b", **MOVES)

    async def has_its_share() -> bool:
        return len(held(second)) > GROUP_PAGES

    await until(has_its_share)
    del places.known[second.place]
    await second.close()
    assert all(await pages.hits(client))
    assert len(held(first)) == COUNT


async def test_a_node_that_leaves_is_emptied_and_pages_are_found_meanwhile(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    nodes = [await start_node(name, **MOVES) for name in "abc"]
    client, pages = make_client(), SamplePages(COUNT)
    await pages.store(client)
    leaver = max(nodes, key=lambda node: len(held(node)))
    had = len(held(leaver))
    emptying = asyncio.create_task(leaver.empty(60))
    while not emptying.done():
        assert all(await pages.hits(client))
        places.up(leaver.record)
    assert await emptying == (had, 0)
    assert leaver.record.draining
    assert not held(leaver)
    del places.known[leaver.place]
    await leaver.close()
    assert all(await pages.hits(client))


async def test_who_asks_over_the_wire_is_told_how_many_pages_went(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    node, _ = await start_node("a", **MOVES), await start_node("b", **MOVES)
    await SamplePages(COUNT).store(make_client())
    had = len(held(node))
    wire = WireClient(node.record.address)
    ask = DrainNode(new_request_id(), await wire.start(), 60)
    answer, _ = await wire.request(ask, timeout_s=120)
    await wire.close()
    assert answer == Drained(ask.request_id, had, 0)


async def test_the_last_node_has_nobody_to_hand_pages_to_and_says_so(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node("a", **MOVES)
    await SamplePages(40).store(make_client())
    assert await node.empty(5) == (0, 40)


async def test_the_event_loop_lists_no_pages_while_a_node_leaves(
    start_node: StartNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node("a", move_after_s=0, move_rate="1MiB")
    await SamplePages(40).store(make_client())
    list_headers, lists = node._cache.headers, set[threading.Thread]()

    def listed(kinds: Collection[TierKind]) -> Iterator[PageHeader]:
        lists.add(threading.current_thread())
        return list_headers(kinds)

    monkeypatch.setattr(node._cache, "headers", listed)
    assert await node.empty(5) == (0, 40)
    assert lists
    assert threading.current_thread() not in lists


async def test_what_is_left_is_said_in_time_where_counting_takes_long(
    start_node: StartNode, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, go_on = await start_node("a", **MOVES), threading.Event()
    await SamplePages(40).store(make_client())
    assert await node.empty(0.1) == (0, 40)
    monkeypatch.setattr(migration, "_COUNT_S", 0.1)
    monkeypatch.setattr(node._migration, "_count_left", go_on.wait)
    try:
        assert await node.empty(0.1) == (0, 40)
    finally:
        go_on.set()


async def test_a_node_that_is_full_takes_no_page_that_would_push_out_another(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    small = await start_node("a", ram_budget="1MiB", **MOVES)
    client = make_client()
    resident = SamplePages(100, first=5000, size=8192)
    await resident.store(client)
    kept = set(held(small))
    large = await start_node("b", ram_budget="8MiB", move_after_s=3600)
    del places.known[small.place]
    pages = SamplePages(COUNT, size=8192)
    await pages.store(client)
    places.up(small.record)
    moved, left = await large.empty(1.0)
    assert moved + left == COUNT
    assert left > 0
    assert kept <= set(held(small))
    places.up(large.record)
    assert all(await pages.hits(client)), "what nobody took is still read where it was"


async def test_with_two_copies_the_loss_of_a_node_costs_nothing_and_is_made_up_for(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    nodes = [await start_node(name, copies=2, **MOVES) for name in "abc"]
    client, pages = make_client(copies=2), SamplePages(COUNT)
    assert set(await pages.store(client)) == {PutStatus.STORED}
    assert sum(len(held(node)) for node in nodes) == 2 * COUNT
    await nodes[0].close()
    assert all(await pages.hits(client)), "while the index still has it"
    del places.known[nodes[0].place]
    assert all(await pages.hits(client))
    await at_home(places, *nodes[1:], copies=2)
    assert all(len(held(node)) == COUNT for node in nodes[1:])
    await nodes[1].close()
    del places.known[nodes[1].place]
    assert all(await pages.hits(client))


async def test_writers_that_come_second_learn_at_once_on_every_copy(
    start_node: StartNode, make_client: MakeClient
) -> None:
    for name in "ab":
        await start_node(name)
    pages = SamplePages(4)
    first, second = make_client(copies=2), make_client(copies=2)
    assert await pages.store(first) == [PutStatus.STORED] * 4
    assert await pages.store(second) == [PutStatus.HELD] * 4
    assert second.counters.stored_bytes == 0


async def test_pages_come_back_to_a_node_that_was_away(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    nodes = [await start_node(name, **MOVES) for name in "ab"]
    away = places.known.pop(PlaceId("a"))
    client, pages = make_client(), SamplePages(COUNT)
    await pages.store(client)
    assert len(held(nodes[1])) == COUNT
    places.up(away)
    await at_home(places, *nodes)
    assert 0 < len(held(nodes[0])) < COUNT
    assert all(await pages.hits(client))
    assert {id_of(header) for node in nodes for header in held(node).values()} == set(pages.pages)


async def test_what_moved_is_removed_from_a_nodes_own_tiers_alone(
    start_node: StartNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = await start_node("a", disk_budget="8MiB", disk_folders=[tmp_path])
    pages = SamplePages(1)
    await pages.store(make_client())
    await asyncio.to_thread(node._cache.save, float("inf"))
    assert node._cache.remove(pages.pages[0], [Tier.POOL_RAM])
    assert node.status().pages == {"pool_ram": 0, "pool_disk": 1}
