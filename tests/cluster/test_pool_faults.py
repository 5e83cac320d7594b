"""Nodes that are killed, halted and stopped while pages are on their way: waits end, pages are right."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from pie.page.groups import GROUP_PAGES
from pie.pool.client import PoolClient
from pie.pool.settings import PoolSettings
from pie.wire.client import WireClient
from pie.wire.ids import new_request_id
from pie.wire.messages import AskStatus, PutStatus, StatusReport
from tests.pool.places import SamplePages, until
from tests.support.pool_process import SECRET, PoolProcess
from tests.support.serving import PIE

pytestmark = pytest.mark.live

COUNT = 16 * GROUP_PAGES
SIZE = 32 << 10
SLOW = {"PIE_POOL__MOVE_AFTER_S": 0, "PIE_POOL__MOVE_RATE": "1MiB"}
"""16 MiB of pages, half of which take eight seconds to move: time to be killed in, also under load."""
FAST = {"PIE_POOL__MOVE_AFTER_S": 0, "PIE_POOL__MOVE_RATE": 0}
STILL = {"PIE_POOL__MOVE_AFTER_S": 3600, "PIE_POOL__MOVE_RATE": "1MiB"}
"""Nothing moves unless a node is emptied."""


class Pool:
    """Nodes as processes, an index, and a client."""

    def __init__(self, folder: Path, index: IndexSettings, **settings: object) -> None:
        self.index = index
        self.nodes: dict[str, PoolProcess] = {}
        self.mirror = Mirror()
        self._folder = folder
        self._feed = MirrorFeed(index.url, self.mirror, settings=index, with_pages=False)
        self.client = PoolClient(self.mirror, PoolSettings.model_validate(settings), secret=SECRET)

    async def open(self) -> None:
        await self._feed.start()

    async def close(self) -> None:
        await self.client.close()
        await self._feed.close()
        for node in self.nodes.values():
            node.close()

    async def up(self, name: str, **settings: object) -> PoolProcess:
        """Start a node and wait until clients know it."""
        node = self.nodes[name] = PoolProcess(self._folder, self.index, name, **settings)  # type: ignore[arg-type]
        address = await asyncio.to_thread(node.wait_until_up)

        async def is_known() -> bool:
            record = self.mirror.places().get(PlaceId(name))
            return record is not None and record.address == address

        await until(is_known)
        return node

    async def gone(self, name: str) -> None:
        async def is_gone() -> bool:
            return PlaceId(name) not in self.mirror.places()

        await until(is_gone)

    async def stored(self, pages: SamplePages) -> None:
        async def are() -> bool:
            return set(await pages.store(self.client)) <= {PutStatus.STORED, PutStatus.HELD}

        await until(are)

    async def counts(self, name: str) -> dict[str, int | float]:
        client = WireClient(self.mirror.places()[PlaceId(name)].address, secret=SECRET)
        await client.start()
        answer, _ = await client.request(AskStatus(new_request_id()), timeout_s=30)
        await client.close()
        assert isinstance(answer, StatusReport)
        return {**answer.counters, **answer.gauges}

    async def held(self, name: str) -> int:
        """Return how many pages a node has."""
        return int((await self.counts(name)).get("pages.pool_ram", 0))

    async def moving(self, name: str) -> int:
        """Wait until a node has brought more than a group of pages to others; return how many."""
        moved = 0

        async def is_moving() -> bool:
            nonlocal moved
            moved = int((await self.counts(name))["moved"])
            return moved > GROUP_PAGES

        await until(is_moving, limit_s=60)
        return moved


@pytest.fixture
async def pool(tmp_path: Path, index_settings: IndexSettings) -> AsyncIterator[Pool]:
    pool = Pool(tmp_path, index_settings)
    await pool.open()
    yield pool
    await pool.close()


@pytest.fixture
def pages() -> SamplePages:
    return SamplePages(COUNT, size=SIZE, secret=SECRET)


async def test_a_target_that_is_killed_in_mid_move_costs_no_page(
    pool: Pool, pages: SamplePages
) -> None:
    await pool.up("a", **SLOW)
    await pool.stored(pages)
    target = await pool.up("b", **SLOW)
    await pool.moving("a")
    assert (await pool.counts("a"))["to_move"] > 0, "it is in mid move"
    target.signal(signal.SIGKILL)
    target.wait()
    # Also before anybody has noticed, and after.
    assert all(await pages.hits(pool.client))
    await pool.gone("b")
    assert all(await pages.hits(pool.client))
    assert await pool.held("a") == COUNT


async def test_a_source_that_is_killed_in_mid_drain_costs_what_had_not_gone_and_nothing_else(
    pool: Pool, pages: SamplePages
) -> None:
    source = await pool.up("a", PIE_POOL__DRAIN_ON_STOP="true", **STILL)
    await pool.stored(pages)
    await pool.up("b", **STILL)
    source.signal(signal.SIGTERM)
    went = await pool.moving("a")
    source.signal(signal.SIGKILL)
    source.wait()
    await pool.gone("a")
    hits = await pages.hits(pool.client)  # What comes is compared with what was stored.
    assert went <= sum(hits) < COUNT
    assert sum(hits) == await pool.held("b")
    # What was lost is computed again, and stored again.
    await pool.stored(pages)
    assert all(await pages.hits(pool.client))


async def test_a_target_that_is_halted_in_mid_move_is_waited_for_by_nobody_and_costs_no_page(
    pool: Pool, pages: SamplePages
) -> None:
    await pool.up("a", **SLOW)
    await pool.stored(pages)
    target = await pool.up("b", **SLOW)
    await pool.moving("a")
    target.signal(signal.SIGSTOP)
    # Who waited for it to the deadline would have no time left to ask the other node.
    assert all(await pages.hits(pool.client, deadline_s=30))
    assert await pool.held("a") == COUNT
    target.signal(signal.SIGCONT)

    async def are_moved() -> bool:
        if PlaceId("b") not in pool.mirror.places():
            return False  # It was silent for long, and is not back yet.
        held = [await pool.held(name) for name in "ab"]
        return sum(held) == COUNT and 0 < held[1] < COUNT

    await until(are_moved, limit_s=90)
    assert all(await pages.hits(pool.client))


async def test_sigterm_empties_a_node_that_is_to_drain_and_pages_are_found_meanwhile(
    pool: Pool, pages: SamplePages
) -> None:
    leaver = await pool.up("a", PIE_POOL__DRAIN_ON_STOP="true", **FAST)
    await pool.stored(pages)
    await pool.up("b", **FAST)
    leaver.signal(signal.SIGTERM)
    while leaver.process.poll() is None:
        assert all(await pages.hits(pool.client))
    assert leaver.wait() == 0
    await pool.gone("a")
    assert await pool.held("b") == COUNT
    assert all(await pages.hits(pool.client))


async def test_pie_pool_drain_empties_a_node_which_ends(
    pool: Pool, pages: SamplePages, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    leaver = await pool.up("a", PIE_POOL__MOVE_AFTER_S=3600)
    await pool.stored(pages)
    await pool.up("b", PIE_POOL__MOVE_AFTER_S=3600)
    options = ["--index", pool.index.url]
    right, wrong = ["--secret-file", str(tmp_path / "secret")], ["--secret-file", str(other)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIE_")}
    environment = clean | {"PIE_INDEX__KEY_PREFIX": pool.index.key_prefix}

    def pie(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PIE, "pool", "drain", *arguments, *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = await asyncio.to_thread(pie, "a", *right)
    assert done.returncode == 0, done.stderr
    assert f"a: {COUNT} pages went to other nodes, 0 are left" in done.stdout
    assert await asyncio.to_thread(leaver.wait) == 0
    await pool.gone("a")
    assert await pool.held("b") == COUNT
    assert all(await pages.hits(pool.client))
    unknown, refused = await asyncio.gather(
        asyncio.to_thread(pie, "a", *right),
        asyncio.to_thread(pie, "b", *wrong),
    )
    assert unknown.returncode == 2
    assert "no pool node a is up; those that are: b" in unknown.stderr
    assert refused.returncode == 2
    assert "its secret is another than the one given here" in refused.stderr
    assert "hands its pages" not in refused.stdout
    last = await asyncio.to_thread(pie, "b", *right)
    assert last.returncode == 1
    assert f"b: 0 pages went to other nodes, {COUNT} are left\nThere was no other" in last.stdout
    assert "without either it is lost with the node's RAM" in last.stdout


async def test_a_node_that_is_killed_in_mid_put_with_two_copies_costs_no_page(
    tmp_path: Path, index_settings: IndexSettings, pages: SamplePages
) -> None:
    pool = Pool(tmp_path, index_settings, copies=2)
    await pool.open()
    try:
        for name in "ab":
            await pool.up(name, PIE_POOL__COPIES=2, **FAST)
        store = asyncio.create_task(pages.store(pool.client))
        await asyncio.sleep(0.02)
        pool.nodes["a"].signal(signal.SIGKILL)
        assert set(await store) <= {PutStatus.STORED, PutStatus.HELD}
        await pool.gone("a")
        assert all(await pages.hits(pool.client))
        await pool.up("c", PIE_POOL__COPIES=2, **FAST)

        async def are_all_there_twice() -> bool:
            return await pool.held("c") == COUNT

        await until(are_all_there_twice, limit_s=60)
        pool.nodes["b"].signal(signal.SIGKILL)
        await pool.gone("b")
        assert all(await pages.hits(pool.client))
    finally:
        await pool.close()
