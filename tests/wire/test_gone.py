"""Whoever ends, however it ends, is noticed: by its end, not by its silence, unless that is all there is."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from subprocess import Popen

import pytest

from pie.page.events import Epoch
from pie.page.key import PageKey
from pie.wire import Peer, PeerGone, WireClient, WireSettings, new_request_id
from pie.wire.messages import Cancel, Lookup, Message, PutPages

from .conftest import EPOCH, SECRET, Connect, Serve
from .helpers import WAIT_S, eventually, header_of, line_of, start_process
from .other_end import SETTINGS, STALL, STALL_S

Start = Callable[..., Awaitable[tuple["Popen[str]", str]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    processes: list[Popen[str]] = []

    async def run(*arguments: str) -> tuple[Popen[str], str]:
        process = start_process(*arguments)
        processes.append(process)
        return process, await line_of(process)

    yield run
    for process in processes:
        process.kill()
        process.communicate()


async def hello(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
    pass


def unanswered() -> Lookup:
    return Lookup(new_request_id(), EPOCH, ())


def answered() -> Lookup:
    return Lookup(new_request_id(), EPOCH, ((PageKey(b"k"), 0),))


async def test_a_killed_server_is_noticed_and_its_requests_fail(
    address: str, settings: WireSettings, start: Start
) -> None:
    process, real = await start("serve", address)
    gone: list[None] = []
    client = WireClient(real, secret=SECRET, on_gone=lambda: gone.append(None), settings=settings)
    await client.start()
    waiting = asyncio.create_task(client.request(unanswered(), timeout_s=WAIT_S))
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    await eventually(lambda: gone)
    with pytest.raises(PeerGone):
        await waiting
    assert not client.is_up
    with pytest.raises(PeerGone):
        await client.send(Cancel("x"))
    with pytest.raises(PeerGone):
        await client.request(answered(), timeout_s=WAIT_S)
    await client.close()
    assert len(gone) == 1


async def test_a_client_finds_a_server_that_starts_again(
    folder: object, settings: WireSettings, start: Start
) -> None:
    address = f"ipc://{folder}/again"
    process, _ = await start("serve", address, "7")
    ups: list[Epoch] = []
    client = WireClient(address, on_up=ups.append, settings=settings)
    await client.start()
    waiting = asyncio.create_task(client.request(unanswered(), timeout_s=WAIT_S))
    await asyncio.sleep(0.1)
    process.kill()
    await start("serve", address, "8")
    await eventually(lambda: client.is_up)
    assert client.epoch == 8
    with pytest.raises(PeerGone):
        await waiting
    question = Lookup(new_request_id(), Epoch(8), ((PageKey(b"k"), 0),))
    await client.request(question, timeout_s=WAIT_S)
    assert ups == [7, 8]
    await client.close()


async def test_a_killed_client_is_noticed(serve: Serve, start: Start) -> None:
    server = await serve(hello)
    process, _ = await start("connect", server.address)
    await eventually(lambda: server.peers)
    (peer,) = server.peers
    gone: list[None] = []
    peer.on_gone(lambda: gone.append(None))
    process.send_signal(signal.SIGKILL)
    await eventually(lambda: gone)
    assert peer.is_gone
    assert server.peers == ()
    with pytest.raises(PeerGone):
        await peer.send(Cancel("x"))
    late: list[None] = []
    peer.on_gone(lambda: late.append(None))
    await eventually(lambda: late)
    assert len(gone) == 1


@pytest.fixture
def impatient(settings: WireSettings) -> WireSettings:
    return settings.model_copy(update={"silent_after_s": 0.5})


async def test_a_server_that_stands_still_is_noticed_and_found_again(
    address: str, impatient: WireSettings, start: Start
) -> None:
    gone: list[None] = []
    process, real = await start("serve", address)
    client = WireClient(real, secret=SECRET, on_gone=lambda: gone.append(None), settings=impatient)
    await client.start()
    process.send_signal(signal.SIGSTOP)
    await eventually(lambda: gone)
    process.send_signal(signal.SIGCONT)
    await eventually(lambda: client.is_up)
    await client.close()


async def test_a_client_that_stands_still_is_noticed(
    serve: Serve, impatient: WireSettings, start: Start
) -> None:
    gone: list[None] = []
    server = await serve(hello, settings=impatient)
    process, _ = await start("connect", server.address)
    await eventually(lambda: server.peers)
    server.peers[0].on_gone(lambda: gone.append(None))
    process.send_signal(signal.SIGSTOP)
    await eventually(lambda: gone)
    process.send_signal(signal.SIGCONT)


async def test_a_server_that_stalls_under_load_is_not_gone(
    address: str, settings: WireSettings, start: Start
) -> None:
    _, real = await start("serve", address)
    gone: list[None] = []
    stern = settings.model_copy(update={"gone_after_s": SETTINGS.gone_after_s})
    client = WireClient(real, secret=SECRET, on_gone=lambda: gone.append(None), settings=stern)
    await client.start()
    stall = Lookup(new_request_id(), EPOCH, ((PageKey(STALL), 0),))
    stalling = asyncio.create_task(client.request(stall, timeout_s=WAIT_S))
    await asyncio.sleep(0.1)
    big = PutPages(new_request_id(), EPOCH, (header_of(b""),) * 32)
    await client.send(big, [bytes(1 << 20)] * 32)
    await asyncio.gather(*(client.request(answered(), timeout_s=WAIT_S) for _ in range(3000)))
    await stalling
    assert 2 * stern.gone_after_s < STALL_S
    assert not gone
    await client.close()


async def test_a_client_that_closes_is_noticed_at_once(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    client = await connect(server)
    (peer,) = server.peers
    gone: list[None] = []
    peer.on_gone(lambda: gone.append(None))
    await client.close()
    await eventually(lambda: gone)
    assert server._peers == {}


async def test_a_server_that_closes_is_noticed_at_once(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    gone: list[None] = []
    client = await connect(server, on_gone=lambda: gone.append(None))
    waiting = asyncio.create_task(client.request(unanswered(), timeout_s=WAIT_S))
    await asyncio.sleep(0.05)
    (peer,) = server.peers
    await server.close()
    assert peer.is_gone
    await eventually(lambda: gone)
    with pytest.raises(PeerGone):
        await waiting


async def test_only_the_one_that_went_is_gone(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    clients = [await connect(server) for _ in range(5)]
    before = server.peers
    await clients[2].close()
    await eventually(lambda: len(server.peers) == 4)
    await asyncio.sleep(0.3)
    assert sum(not peer.is_gone for peer in before) == 4
    assert all(client.is_up for client in clients if client is not clients[2])


async def test_a_quiet_connection_stays(
    serve: Serve, connect: Connect, settings: WireSettings
) -> None:
    gone: list[None] = []
    few_s = settings.model_copy(update={"silent_after_s": 1.5})
    server = await serve(hello, settings=few_s)
    client = await connect(server, on_gone=lambda: gone.append(None), settings=few_s)
    await asyncio.sleep(few_s.silent_after_s + 0.5)
    assert client.is_up
    assert not gone
    assert not server.peers[0].is_gone


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0"])
async def test_who_stood_still_itself_takes_nobody_for_silent(
    serve: Serve, connect: Connect, impatient: WireSettings
) -> None:
    gone: list[None] = []
    server = await serve(hello, settings=impatient)
    client = await connect(server, on_gone=lambda: gone.append(None), settings=impatient)
    (peer,) = server.peers
    time.sleep(2 * impatient.silent_after_s)  # noqa: ASYNC251 - as a process that is stopped
    await asyncio.sleep(3 * impatient.heartbeat_s)
    assert client.is_up
    assert not gone
    assert not peer.is_gone


async def test_a_client_whose_loop_hangs_is_dropped_and_comes_back(
    serve: Serve, connect: Connect, impatient: WireSettings
) -> None:
    server = await serve(hello, settings=impatient)
    ups: list[Epoch] = []
    client = await connect(server, on_up=ups.append)
    (peer,) = server.peers
    # Its loop sends no heartbeat.
    client._link._ping = lambda: True  # type: ignore[method-assign]
    await eventually(lambda: peer.is_gone)
    del client._link._ping
    await eventually(lambda: len(ups) >= 2)
    assert server.peers
    assert server.peers[0] is not peer


async def test_a_server_whose_loop_hangs_is_left_and_found_again(
    serve: Serve, connect: Connect, impatient: WireSettings
) -> None:
    server = await serve(hello)
    gone: list[None] = []
    client = await connect(server, on_gone=lambda: gone.append(None), settings=impatient)
    (peer,) = server.peers
    push, probe = Peer.push, Peer.probe
    try:
        Peer.push = Peer.probe = lambda self, message: True  # type: ignore[method-assign]
        await eventually(lambda: gone)
        assert not client.is_up
    finally:
        Peer.push, Peer.probe = push, probe  # type: ignore[method-assign]
    await eventually(lambda: client.is_up)
    await eventually(lambda: peer.is_gone)


async def test_many_clients_that_come_and_go_leave_nothing(serve: Serve, connect: Connect) -> None:
    server = await serve(hello)
    for _ in range(3):
        clients = [await connect(server) for _ in range(20)]
        await asyncio.gather(*(client.close() for client in clients))
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        clients = [await connect(server) for _ in range(20)]
        await asyncio.gather(*(client.close() for client in clients))
    await eventually(lambda: server._peers == {})
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)  # noqa: PTH208
