"""A receiver that stalls stops its sender, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psutil
import pytest

from pie.page.key import PageKey
from pie.wire import Peer, PeerGone, WireSettings, WireTimeout, new_request_id
from pie.wire.messages import Cancel, GetPages, Load, Message, PageData, StepTokens, TokenDelta
from tests.support.credit import hold_credit

from .conftest import EPOCH, Connect, Serve
from .helpers import WAIT_S, eventually, header_of

LOAD = Load(0, 0, 0, 0, 0, 0.0, 0.0)
PAGE = bytes(1 << 20)


def step(number: int) -> StepTokens:
    return StepTokens(EPOCH, (TokenDelta("id", (number,), ""),), LOAD)


def number_of(message: Message) -> int:
    assert isinstance(message, StepTokens)
    return message.deltas[0].token_ids[0]


async def hello(peer: Peer, message: Message, frames: object) -> None:
    pass


async def test_a_stalled_receiver_stops_its_sender(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    got: list[int] = []
    client = await connect(
        server, on_message=lambda message, frames: got.append(number_of(message))
    )
    grant = hold_credit(client)
    (peer,) = server.peers
    limit = WireSettings().credit_messages
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(200):
            await peer.send(step(number))
            sent += 1

    sender = asyncio.create_task(send())
    await eventually(lambda: sent == limit)
    await asyncio.sleep(0.2)
    assert sent == limit
    assert not peer.has_credit
    grant(5)
    await eventually(lambda: sent == limit + 5)
    while not sender.done():
        grant(20)
        await asyncio.sleep(0.01)
    await eventually(lambda: len(got) == 200)
    assert got == list(range(200))


async def test_credit_comes_back_by_itself(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    got: list[int] = []
    await connect(server, on_message=lambda message, frames: got.append(number_of(message)))
    (peer,) = server.peers
    for number in range(5000):
        await peer.send(step(number))
    await eventually(lambda: len(got) == 5000)
    assert got == list(range(5000))
    await eventually(lambda: peer._credits.used == (0, 0))


async def test_other_messages_pass_those_that_wait_for_credit(
    serve: Serve, connect: Connect
) -> None:
    server = await serve(hello)
    got: list[Message] = []
    hold_credit(await connect(server, on_message=lambda message, frames: got.append(message)))
    (peer,) = server.peers
    while peer.has_credit:
        await peer.send(step(0))
    waiting = asyncio.create_task(peer.send(step(1)))
    await asyncio.sleep(0)
    await peer.send(Cancel("pass"))
    await eventually(lambda: got and got[-1] == Cancel("pass"))
    assert not waiting.done()
    waiting.cancel()


async def test_waiting_for_credit_has_a_limit(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    released: list[None] = []
    hold_credit(await connect(server))
    (peer,) = server.peers
    while peer.has_credit:
        await peer.send(step(0))
    used = peer._credits.used
    with pytest.raises(WireTimeout, match="no credit"):
        await peer.send(
            PageData("id", 0, 1, header_of(PAGE)),
            [PAGE],
            timeout_s=0.05,
            release=lambda: released.append(None),
        )
    assert peer._credits.used == used
    await eventually(lambda: len(released) == 1)


async def test_a_client_that_goes_wakes_those_that_wait_for_credit(
    serve: Serve, connect: Connect
) -> None:
    server = await serve(hello)
    client = await connect(server)
    hold_credit(client)
    (peer,) = server.peers
    while peer.has_credit:
        await peer.send(step(0))
    waiting = asyncio.create_task(peer.send(step(1)))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(PeerGone):
        await asyncio.wait_for(waiting, WAIT_S)


def get(count: int) -> GetPages:
    return GetPages(new_request_id(), EPOCH, ((PageKey(b"k"), 0),) * count)


async def test_a_slow_reader_of_pages_bounds_memory(
    serve: Serve, connect: Connect, settings: WireSettings
) -> None:
    sent = 0

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        nonlocal sent
        assert isinstance(message, GetPages)
        for i in range(len(message.pages)):
            # A fresh page each, as a disk tier would have it.
            await peer.send(PageData(message.request_id, i, 1, header_of(b"")), [bytearray(PAGE)])
            sent += 1

    few = settings.model_copy(update={"credit_bytes": 8 << 20})
    client = await connect(await serve(handler, settings=few))
    before_bytes = psutil.Process().memory_info().rss
    most = taken = 0
    async for _ in client.stream(get(200), timeout_s=WAIT_S):
        taken += 1
        if taken == 50:
            await asyncio.sleep(0.2)
        assert sent - taken <= 8
        most = max(most, psutil.Process().memory_info().rss)
    assert taken == 200
    assert most - before_bytes < 80 << 20


async def test_an_abandoned_stream_gives_its_credit_back(serve: Serve, connect: Connect) -> None:
    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, GetPages):
            for i in range(len(message.pages)):
                await peer.send(PageData(message.request_id, i, 0))

    server = await serve(handler)
    client = await connect(server)
    for _ in range(20):
        stream = client.stream(get(100), timeout_s=WAIT_S)
        async for _ in stream:
            break
        await stream.aclose()
    assert len([1 async for _ in client.stream(get(100), timeout_s=WAIT_S)]) == 100
    await eventually(lambda: server.peers[0]._credits.used == (0, 0))


async def test_lent_memory_comes_back_when_zmq_is_done(serve: Serve, connect: Connect) -> None:
    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        slots: asyncio.Queue[bytearray] = asyncio.Queue()
        assert isinstance(message, GetPages)
        for _ in range(3):
            slots.put_nowait(bytearray(PAGE))
        for i in range(100):
            slot = await slots.get()
            slot[:] = bytes([i]) * len(slot)

            def release(slot: bytearray = slot) -> None:
                # Whatever is written from here on must not reach the receiver.
                slot[:] = b"\xff" * len(slot)
                slots.put_nowait(slot)

            await peer.send(
                PageData(message.request_id, i, 1, header_of(b"")), [slot], release=release
            )

    client = await connect(await serve(handler))
    numbers = []
    async for _, frames in client.stream(get(100), timeout_s=WAIT_S):
        assert frames[0].nbytes == len(PAGE)
        assert frames[0][0] == frames[0][-1]
        numbers.append(frames[0][0])
    assert numbers == list(range(100))


async def test_every_release_is_called_once_whatever_happens(
    serve: Serve, connect: Connect
) -> None:
    server = await serve(hello)
    client = await connect(server)
    hold_credit(client)
    (peer,) = server.peers
    released: list[int] = []

    async def send(number: int, size: int) -> None:
        frames = [bytes(size), bytes(size)]
        message = PageData("id", 0, 1, header_of(b""))
        await peer.send(message, frames[:1], release=lambda: released.append(number))

    sizes = [0, 10, 65_536, 1 << 20]
    tasks = [asyncio.create_task(send(i, sizes[i % 4])) for i in range(200)]
    await asyncio.sleep(0.1)
    tasks[60].cancel()
    await client.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: len(released) == 200)
    assert sorted(released) == list(range(200))


async def test_closing_waits_for_lent_memory(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    hold_credit(await connect(server))
    (peer,) = server.peers
    released: list[None] = []
    page = bytearray(1 << 20)
    for _ in range(20):
        await peer.send(
            PageData("id", 0, 1, header_of(b"")), [page], release=lambda: released.append(None)
        )
    await server.close()
    assert len(released) == 20
