"""Pages are removed, pinned and let go by who asks a node over the wire; pins end by themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given, strategies as st

from pie.page.events import Part, Tier
from pie.policies.manager import RetentionManager
from pie.pool.cache import Level, TieredCache
from pie.pool.conformance import sample_key, sample_page
from pie.pool.pinned import PinnedPages
from pie.pool.ram import RamTier
from pie.pool.tier import PageId, id_of
from pie.wire.orders import PageChange
from tests.pool.conftest import MakeClient, StartNode
from tests.pool.places import Places, SamplePages, until

DONE, NOT_HELD, IN_USE = PageChange.DONE, PageChange.NOT_HELD, PageChange.IN_USE
NOWHERE = PageId(sample_key(-5), Part.FULL)


async def test_removed_pages_are_gone_from_every_node_and_tier(
    start_node: StartNode, make_client: MakeClient, tmp_path: Path
) -> None:
    nodes = [
        await start_node(name, disk_budget="16MiB", disk_folders=[tmp_path], move_after_s=3600)
        for name in "ab"
    ]
    client, pages = make_client(), SamplePages(100)
    await pages.store(client)
    for node in nodes:
        await asyncio.to_thread(node._cache.save, float("inf"))
    gone = [*pages.pages[:40], NOWHERE]
    said = await client.orders.remove(gone, deadline_s=60)
    assert said == [DONE] * 40 + [NOT_HELD]
    assert await pages.hits(client) == [False] * 40 + [True] * 60
    assert await client.orders.remove(gone, deadline_s=60) == [NOT_HELD] * 41
    assert sum(node.status().pages["pool_disk"] for node in nodes) == 60


async def test_a_pinned_page_outlives_what_pushes_out_all_others(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(ram_budget="2MiB")
    client, pages = make_client(), SamplePages(4, size=100_000)
    await pages.store(client)
    kept = pages.pages[:2]
    assert await client.orders.pin([*kept, NOWHERE], 60, deadline_s=60) == [DONE, DONE, NOT_HELD]
    assert node.status().pinned_pages == 2
    assert node.status().pinned_bytes == 200_000
    for first in (100, 200, 300):  # On a busy node some of them find no room.
        await SamplePages(40, first=first, size=100_000).store(client)
    assert await pages.hits(client) == [True, True, False, False]
    assert await client.orders.remove(kept, deadline_s=60) == [IN_USE, IN_USE]
    assert await client.orders.unpin(kept, deadline_s=60) == [DONE, DONE]
    assert await client.orders.unpin(kept, deadline_s=60) == [NOT_HELD, NOT_HELD]
    for first in (400, 500, 600):
        await SamplePages(40, first=first, size=100_000).store(client)
    assert not any(await pages.hits(client))


async def test_a_pin_ends_when_its_time_is_over_and_asking_again_makes_it_longer(
    start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node()
    client, pages = make_client(), SamplePages(2)
    await pages.store(client)
    assert await client.orders.pin(pages.pages, 0.2, deadline_s=60) == [DONE, DONE]
    assert await client.orders.pin(pages.pages[:1], 3600, deadline_s=60) == [DONE]
    assert await client.orders.pin(pages.pages[:1], 0.2, deadline_s=60) == [DONE]

    async def one_is_left() -> bool:
        return node.status().pinned_pages == 1

    await until(one_is_left)
    assert await client.orders.remove(pages.pages, deadline_s=60) == [IN_USE, DONE]


async def test_a_page_that_only_the_disk_has_is_pinned_in_ram(
    start_node: StartNode, make_client: MakeClient, tmp_path: Path
) -> None:
    node = await start_node(ram_budget="2MiB", disk_budget="16MiB", disk_folders=[tmp_path])
    client, pages = make_client(), SamplePages(40, size=100_000)
    await pages.store(client)
    # The mover makes room, or the page may be used and come up, at the same time.
    assert await client.orders.pin(pages.pages[:1], 60, deadline_s=60) == [DONE]
    held = {entry.key for entry in node._cache.entries() if entry.tier is Tier.POOL_RAM}
    assert pages.pages[0].key in held


async def test_a_node_that_is_told_to_stop_lets_go_of_pins_and_a_dead_one_is_told_of(
    places: Places, start_node: StartNode, make_client: MakeClient
) -> None:
    node = await start_node(move_after_s=3600)
    client, pages = make_client(), SamplePages(2)
    await pages.store(client)
    assert await client.orders.pin(pages.pages, 60, deadline_s=60) == [DONE, DONE]
    other = await start_node("other", move_after_s=3600)
    await other.close()
    assert await client.orders.remove(pages.pages[:1], deadline_s=60) == [PageChange.FAILED]
    assert await client.orders.pin(pages.pages, 60, deadline_s=60) == [DONE, DONE]
    await node.drain(60)
    assert node.status().pinned_pages == 0
    assert await client.orders.pin(pages.pages, 60, deadline_s=60) == [PageChange.FAILED] * 2
    del places.known[other.place]


SIZE = 5_000


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pin"), st.integers(0, 20), st.integers(0, 5)),
            st.tuples(st.just("unpin"), st.integers(0, 20), st.just(0)),
            st.tuples(st.just("wait"), st.just(0), st.integers(0, 4)),
        ),
        max_size=40,
    )
)
def test_pins_are_those_of_a_plain_table(orders: list[tuple[str, int, int]]) -> None:
    now_s = 0.0
    cache = TieredCache([Level(RamTier(1 << 20), RetentionManager())])
    pinned = PinnedPages(cache, 1 << 20, most=6, clock=lambda: now_s)
    pages = []
    for number in range(15):
        header, payload = sample_page(number, SIZE)
        room = cache.prepare_store(header)
        assert isinstance(room, memoryview)
        room[:] = payload
        assert cache.complete_store(id_of(header), success=True)
        pages.append(id_of(header))
    pages += [PageId(sample_key(number), Part.FULL) for number in range(100, 106)]
    table: dict[int, float] = {}
    for kind, number, amount in orders:
        table = {page: until_s for page, until_s in table.items() if until_s > now_s}
        if kind == "wait":
            now_s += amount
            pinned.expire()
        elif kind == "unpin":
            wanted = DONE if table.pop(number, None) is not None else NOT_HELD
            assert pinned.unpin([pages[number]]) == [wanted]
        else:
            (said,) = pinned.pin([pages[number]], amount)
            if number in table or (number < 15 and len(table) < 6):
                assert said is DONE
                table[number] = max(table.get(number, 0), now_s + amount)
            else:
                assert said is (PageChange.FULL if number < 15 else NOT_HELD)
        pinned.check()
    pinned.close()
    assert not len(pinned)
    assert all(cache.remove(page) for page in pages)
    cache.close()
