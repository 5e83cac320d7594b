"""Pages to and from a pool node: GB/s, milliseconds of one page, milliseconds of a look-up.

One node in a process of its own, one client, loopback TCP, checksums on both sides, warm memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from pie.index.contract import IndexMode, PlaceRecord
from pie.page.events import Epoch, PartMask, PlaceId
from pie.page.format import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.pool.client import PoolClient
from pie.pool.conformance import sample_page
from pie.pool.node import PoolNode
from pie.pool.placement import group_keys
from pie.pool.settings import PoolSettings
from pie.pool.tier import id_of
from pie.wire.messages import PutStatus

_ROUNDS = 5
_MIB = 1 << 20
_PAGE_BYTES = 360 << 10
"""A page of SmolLM2-135M in bfloat16."""


class _OneNode:
    """An index that knows one node."""

    mode = IndexMode.OK

    def __init__(self, record: PlaceRecord) -> None:
        self._record = record

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        return {self._record.place: self._record}

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, Sequence[PartMask]]:  # noqa: ARG002
        return {}


def run() -> dict[str, object]:
    """Return figures as medians with minimum and maximum."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_node, args=(there,))
    process.start()
    try:
        return asyncio.run(_measure(here.recv()))
    finally:
        here.send(None)
        process.join(10)


def _node(pipe: Connection) -> None:
    async def serve() -> None:
        settings = PoolSettings.model_validate({"ram_budget": "1GiB"})
        node = PoolNode(PlaceId("pool-0"), settings, index_url=None, epoch=Epoch(1))
        pipe.send(await node.start())
        await asyncio.to_thread(pipe.recv)
        await node.close()

    asyncio.run(serve())


async def _measure(record: PlaceRecord) -> dict[str, object]:
    client = PoolClient(_OneNode(record), PoolSettings())
    try:
        return {
            "put_1mib_gb_s": await _puts(client),
            "get_1mib_gb_s": await _gets(client),
            "get_360kib_ms": await _single_gets(client),
            "put_360kib_ms": await _single_puts(client),
            "lookup_2048_ms": await _look_ups(client),
        }
    finally:
        await client.close()


def _pages(first: int, count: int, size: int) -> tuple[list[PageHeader], list[bytes]]:
    made = [sample_page(number, size) for number in range(first, first + count)]
    return [header for header, _ in made], [payload for _, payload in made]


async def _puts(client: PoolClient) -> dict[str, float]:
    """64 pages of 1 MiB, new each time, into memory that was touched before."""

    async def put(first: int) -> float:
        headers, payloads = _pages(first, 64, _MIB)
        groups = group_keys([header.key for header in headers])
        began = time.perf_counter()
        statuses = await client.store(headers, payloads, groups=groups, deadline_s=30)
        seconds = time.perf_counter() - began
        assert set(statuses) == {PutStatus.STORED}
        return 64 * _MIB / seconds / 1e9

    for first in range(0, 17 * 64, 64):
        await put(first)  # Fill the budget, so that every page's memory is resident.
    return _spread([await put(first) for first in range(17 * 64, (17 + _ROUNDS) * 64, 64)])


async def _gets(client: PoolClient) -> dict[str, float]:
    headers, payloads = _pages(21 * 64, 64, _MIB)
    groups = group_keys([header.key for header in headers])
    pages = [id_of(header) for header in headers]
    figures = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        loaded = await client.load(pages, groups=groups, deadline_s=30)
        seconds = time.perf_counter() - began
        assert [bytes(page.payload) for page in loaded if page is not None] == payloads
        figures.append(64 * _MIB / seconds / 1e9)
    return _spread(figures[1:])


async def _single_gets(client: PoolClient) -> dict[str, float]:
    headers, payloads = _pages(5000, 32, _PAGE_BYTES)
    groups = group_keys([header.key for header in headers])
    await client.store(headers, payloads, groups=groups, deadline_s=30)
    chance = random.Random(1)

    async def get() -> None:
        at = chance.randrange(32)
        (page,) = await client.load([id_of(headers[at])], groups=[groups[at]], deadline_s=5)
        assert page is not None

    return await _milliseconds(get)


async def _single_puts(client: PoolClient) -> dict[str, float]:
    headers, payloads = _pages(6000, 300, _PAGE_BYTES)
    ready = iter(zip(headers, payloads, strict=True))

    async def put() -> None:
        header, payload = next(ready)
        await client.store([header], [payload], groups=[header.key], deadline_s=5)

    return await _milliseconds(put)


async def _look_ups(client: PoolClient) -> dict[str, float]:
    headers, _ = _pages(0, 2048, 1)
    groups = group_keys([header.key for header in headers])
    pages = [id_of(header) for header in headers]

    async def look() -> None:
        statuses = await client.lookup(pages, groups=groups, deadline_s=5)
        assert LookupStatus.RETRY not in statuses

    return await _milliseconds(look, 100)


async def _milliseconds(do: Callable[[], Awaitable[None]], count: int = 200) -> dict[str, float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await do()
        taken.append((time.perf_counter() - began) * 1e3)
    return _spread(taken)


def _spread(figures: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(figures), 3),
        "min": round(min(figures), 3),
        "max": round(max(figures), 3),
    }
