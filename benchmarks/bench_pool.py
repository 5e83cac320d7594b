"""Pages to and from a pool node: GB/s, milliseconds of one page, milliseconds of a look-up.

One node in a process of its own, one client on this host, checksums on both sides, warm memory; over loopback
TCP, the same encrypted, and by shared memory. `PIE_BENCH_MOONCAKE` names a folder to run Mooncake Store from.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import uvloop

from benchmarks.peers import mooncake_store
from pie.index.contract import IndexMode, PlaceRecord
from pie.page.events import Epoch, PartMask, PlaceId
from pie.page.groups import group_keys
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.pool.client import PoolClient
from pie.pool.conformance import sample_page
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.pool.tier import id_of
from pie.wire.messages import PutStatus

_ROUNDS = 7
_MIB = 1 << 20
_BYTES = 64 * _MIB
_SECRET = bytes(range(32))
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


@dataclass(frozen=True)
class _Way:
    """How pages travel."""

    address: str = "tcp://127.0.0.1:0"
    secret: bytes | None = None
    shared_memory: int = 0


_WAYS = {
    "tcp": _Way(),
    # What CURVE is to be compared with: a secret makes checksums dearer, too.
    "tcp_keyed": _Way(secret=_SECRET),
    "curve": _Way("curve://127.0.0.1:0", _SECRET),
    "shared_memory": _Way(shared_memory=64 * _MIB),
}

_MUST_REACH = {
    "tcp": {
        "get_1mib_gb_s": 1.8,
        "put_1mib_gb_s": 1.2,
        "get_360kib_ms": 0.4,
        "lookup_2048_ms": 2.0,
    },
    "shared_memory": {"get_1mib_gb_s": 4.0},
}


def run() -> dict[str, object]:
    """Return figures as medians with minimum and maximum, by how pages travel."""
    found: dict[str, object] = {name: _with_node(way) for name, way in _WAYS.items()}
    return {**found, "mooncake": mooncake_store.figures(), "must_reach": _MUST_REACH}


def _with_node(way: _Way) -> dict[str, object]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_node, args=(there, way))
    process.start()
    try:
        # As workers and nodes run.
        return uvloop.run(_measure(here.recv(), way))
    finally:
        here.send(None)
        process.join(10)


def _node(pipe: Connection, way: _Way) -> None:
    async def serve() -> None:
        node = PoolNode(
            PlaceId("pool-0"),
            PoolSettings.model_validate({"ram_budget": "1GiB"}),
            index_url=None,
            epoch=Epoch(1),
            address=way.address,
            secret=way.secret,
        )
        pipe.send(await node.start())
        await asyncio.to_thread(pipe.recv)
        await node.close()

    uvloop.run(serve())


async def _measure(record: PlaceRecord, way: _Way) -> dict[str, object]:
    settings = PoolSettings.model_validate({"shared_memory": way.shared_memory})
    client = PoolClient(_OneNode(record), settings, secret=way.secret)
    try:
        return {
            "put_1mib_gb_s": await _puts(client, way, _MIB),
            "put_4mib_gb_s": await _puts(client, way, 4 * _MIB),
            "get_1mib_gb_s": await _gets(client, way, _MIB),
            "get_4mib_gb_s": await _gets(client, way, 4 * _MIB),
            "get_360kib_ms": await _single_gets(client, way),
            "put_360kib_ms": await _single_puts(client, way),
            "lookup_2048_ms": await _look_ups(client),
        }
    finally:
        await client.close()


def _pages(
    first: int, count: int, size: int, way: _Way | None = None
) -> tuple[list[PageHeader], list[bytes]]:
    secret = None if way is None else way.secret
    made = [sample_page(n, size, secret=secret) for n in range(first, first + count)]
    return [header for header, _ in made], [payload for _, payload in made]


async def _puts(client: PoolClient, way: _Way, size: int) -> dict[str, float]:
    """Pages of 64 MiB in all, new each time, out of an arena into memory that was touched before."""
    count = _BYTES // size
    staging = np.ones(_BYTES, np.uint8)

    async def put(first: int) -> float:
        headers, payloads = _pages(first, count, size, way)
        groups = group_keys([header.key for header in headers])
        arena = np.frombuffer(b"".join(payloads), np.uint8)
        began = time.perf_counter()
        copies = []
        for at in range(0, _BYTES, size):
            staging[at : at + size] = arena[at : at + size]
            copies.append(staging[at : at + size].data)
        statuses = await client.store(headers, copies, groups=groups, deadline_s=30)
        seconds = time.perf_counter() - began
        assert set(statuses) == {PutStatus.STORED}
        return _BYTES / seconds / 1e9

    base = size * 100
    # Fill the budget, so that every page's memory is resident.
    fill = 17 if size == _MIB else 1
    for number in range(fill):
        await put(base + number * count)
    return _spread([await put(base + (fill + n) * count) for n in range(_ROUNDS)])


async def _gets(client: PoolClient, way: _Way, size: int) -> dict[str, float]:
    """The same pages each time, checked, and copied into the caller's arena.

    With shared memory they land in memory that the caller has lent, and are not copied once more.
    """
    count = _BYTES // size
    headers, payloads = _pages(size * 200, count, size, way)
    groups = group_keys([header.key for header in headers])
    await client.store(headers, payloads, groups=groups, deadline_s=30)
    pages = [id_of(header) for header in headers]
    arena = np.ones(_BYTES, np.uint8)
    figures = []
    for number in range(_ROUNDS + 2):
        began = time.perf_counter()
        loaded = await client.load(pages, groups=groups, deadline_s=30)
        if not way.shared_memory:
            for at, page in enumerate(loaded):
                assert page is not None
                arena[at * size : (at + 1) * size] = np.frombuffer(page.payload, np.uint8)
        figures.append(_BYTES / (time.perf_counter() - began) / 1e9)
        if number == 0:
            assert [page and bytes(page.payload) for page in loaded] == payloads
        del loaded
    return _spread(figures[2:])


async def _single_gets(client: PoolClient, way: _Way) -> dict[str, float]:
    headers, payloads = _pages(5000, 32, _PAGE_BYTES, way)
    groups = group_keys([header.key for header in headers])
    await client.store(headers, payloads, groups=groups, deadline_s=30)
    chance = random.Random(1)

    async def get() -> None:
        at = chance.randrange(32)
        (page,) = await client.load([id_of(headers[at])], groups=[groups[at]], deadline_s=5)
        assert page is not None

    return await _milliseconds(get)


async def _single_puts(client: PoolClient, way: _Way) -> dict[str, float]:
    headers, payloads = _pages(6000, 300, _PAGE_BYTES, way)
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
