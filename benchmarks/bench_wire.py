"""The wire between two processes: round trips, pages, step tokens."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from pie.page.events import Epoch, Part
from pie.page.header import PageHeader, checksum
from pie.page.key import PageKey, RootKey
from pie.wire import Peer, WireClient, WireServer, new_request_id
from pie.wire.codec import encode
from pie.wire.messages import (
    GetPages,
    Load,
    Lookup,
    LookupResult,
    Message,
    PageData,
    PutPages,
    PutResult,
    StepTokens,
    TokenDelta,
)

EPOCH = Epoch(1)
PAGE_BYTES = 1 << 20
PAGE = bytes(PAGE_BYTES)
HEADER = PageHeader(
    PageKey(b"k" * 32),
    b"p" * 32,
    0,
    Part.FULL,
    RootKey(b"r" * 32),
    "bfloat16",
    "layout",
    16,
    PAGE_BYTES,
    checksum(PAGE),
)
ROUND_TRIPS = 2000
PAGES = 512
REPEATS = 5


def run() -> dict[str, object]:
    """Return milliseconds and gigabytes a second for each transport; medians of five runs."""
    with tempfile.TemporaryDirectory(prefix="pie") as folder:
        addresses = {"tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{Path(folder, 'wire')}"}
        figures: dict[str, object] = {name: _measure(at) for name, at in addresses.items()}
    return figures | {"step_tokens_16_requests": _step_tokens()}


def _measure(address: str) -> dict[str, object]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(address, there))
    process.start()
    try:
        return uvloop.run(_ask(here.recv()))
    finally:
        here.send("end")
        process.join()


def _serve(address: str, pipe: Connection) -> None:
    async def serve() -> None:
        server = WireServer(address, _answer, epoch=EPOCH)
        pipe.send(await server.start())
        await asyncio.to_thread(pipe.recv)
        await server.close()

    uvloop.run(serve())


async def _answer(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
    if isinstance(message, Lookup):
        await peer.send(LookupResult(message.request_id, (0,)))
    elif isinstance(message, GetPages):
        for i in range(len(message.pages)):
            await peer.send(PageData(message.request_id, i, 1, HEADER), [PAGE])
    elif isinstance(message, PutPages):
        await peer.send(PutResult(message.request_id, (0,) * len(frames)))


async def _ask(address: str) -> dict[str, object]:
    client = WireClient(address)
    await client.start()
    try:
        return {
            "round_trip_ms": await _round_trip_ms(client),
            "requests_per_s_at_256": await _median(lambda: _concurrent(client)),
            "get_1mib_gb_per_s": await _median(lambda: _get(client)),
            "get_1mib_checked_gb_per_s": await _median(lambda: _get(client, check=True)),
            "put_1mib_gb_per_s": await _median(lambda: _put(client)),
        }
    finally:
        await client.close()


async def _median(measure: Callable[[], Awaitable[float]]) -> dict[str, float]:
    figures = [await measure() for _ in range(REPEATS)]
    return _summary(figures)


def _summary(figures: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(figures), 4),
        "min": round(min(figures), 4),
        "max": round(max(figures), 4),
    }


def _lookup() -> Lookup:
    return Lookup(new_request_id(), EPOCH, ((PageKey(b"k" * 32), 0),))


async def _round_trip_ms(client: WireClient) -> dict[str, float]:
    figures = []
    for _ in range(ROUND_TRIPS):
        start_s = time.perf_counter()
        await client.request(_lookup(), timeout_s=5)
        figures.append(1000 * (time.perf_counter() - start_s))
    return _summary(figures)


async def _concurrent(client: WireClient) -> float:
    async def several() -> None:
        for _ in range(20):
            await client.request(_lookup(), timeout_s=30)

    start_s = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(256)))
    return 256 * 20 / (time.perf_counter() - start_s)


async def _get(client: WireClient, *, check: bool = False) -> float:
    start_s = time.perf_counter()
    message = GetPages(new_request_id(), EPOCH, ((PageKey(b"k" * 32), 0),) * PAGES)
    async for _, frames in client.stream(message, timeout_s=5):
        if check and checksum(frames[0]) != HEADER.checksum:
            raise AssertionError("a page arrived damaged")
    return PAGES * PAGE_BYTES / (time.perf_counter() - start_s) / 1e9


async def _put(client: WireClient) -> float:
    async def several() -> None:
        for _ in range(PAGES // 8 // 4):
            message = PutPages(new_request_id(), EPOCH, (HEADER,) * 8)
            await client.request(message, [PAGE] * 8, timeout_s=30)

    start_s = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(4)))
    return PAGES * PAGE_BYTES / (time.perf_counter() - start_s) / 1e9


def _step_tokens() -> dict[str, float]:
    load = Load(16, 0, 0, 100, 200, 1500.0, 60.0)
    deltas = tuple(TokenDelta(f"{i:016x}", (1000 + i,), " word") for i in range(16))
    message = StepTokens(EPOCH, deltas, load)
    rounds = 20_000
    start_s = time.perf_counter()
    for _ in range(rounds):
        encode(message)
    return {
        "encode_us": round(1e6 * (time.perf_counter() - start_s) / rounds, 3),
        "bytes": len(encode(message)),
    }
