"""Nothing that a stranger sends takes a server down."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import pytest
import zmq

from pie.page.key import PageKey
from pie.wire import Peer, WireServer, WireSettings, new_request_id
from pie.wire.address import endpoint_of, is_encrypted
from pie.wire.codec import decode, encode
from pie.wire.curve import wire_keys
from pie.wire.errors import MessageTooLarge
from pie.wire.messages import (
    Credit,
    Generate,
    Lookup,
    LookupResult,
    Message,
    Ping,
    Pong,
    RefusalCode,
    Refused,
)
from pie.wire.program_runs import TellProgram

from .conftest import EPOCH, SECRET, Connect, Serve
from .helpers import WAIT_S, eventually

LIMITS = WireSettings()


async def echo(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
    if isinstance(message, Lookup):
        await peer.send(LookupResult(message.request_id, (1,)))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


async def still_works(server: WireServer, connect: Connect) -> None:
    client = await connect(server)
    question = Lookup(new_request_id(), EPOCH, ((PageKey(b"k"), 0),))
    await client.request(question, timeout_s=WAIT_S)


def reach(dealer: zmq.Socket[bytes], server: WireServer) -> None:
    """Connect, with the cluster's keys where they are asked for."""
    if is_encrypted(server.address):
        wire_keys(SECRET).present(dealer)
    dealer.connect(endpoint_of(server.address))


def stranger(context: zmq.Context[zmq.Socket[bytes]], server: WireServer) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    reach(dealer, server)
    return dealer


async def answer(dealer: zmq.Socket[bytes]) -> Message:
    """Return the next message that is no heartbeat."""
    while True:
        await eventually(lambda: dealer.poll(0))
        message = decode(dealer.recv_multipart()[0], [], LIMITS)
        if message != Pong("", EPOCH):
            return message


@pytest.mark.parametrize(
    ("parts", "request_id"),
    [
        ([b""], ""),
        ([b"garbage"], ""),
        ([b"\x91" * 10_000], ""),
        ([b"\xdd\xff\xff\xff\xff"], ""),
        ([encode(Ping("p")), b"frame"], "p"),
        ([encode(Generate("g", EPOCH, 0, 1))], "g"),
        ([encode(Generate("g", EPOCH, 0, 1)), b"abc"], "g"),
        ([encode(Generate("g", EPOCH, 0, 1)), *[b"abcd"] * 5000], "g"),
    ],
    ids=["empty", "text", "deep", "huge list", "extra", "none", "odd", "many"],
)
async def test_a_bad_message_is_refused_in_words(
    parts: list[bytes],
    request_id: str,
    serve: Serve,
    connect: Connect,
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    server = await serve(echo)
    with stranger(context, server) as dealer:
        dealer.send_multipart(parts)
        refusal = await answer(dealer)
        assert isinstance(refusal, Refused)
        assert refusal.code is RefusalCode.BAD_MESSAGE
        assert refusal.request_id == request_id
        # The same connection goes on.
        dealer.send(encode(Ping("again")))
        assert await answer(dealer) == Pong("again", EPOCH)
    await still_works(server, connect)


async def test_a_flood_of_garbage_is_weathered(
    serve: Serve, connect: Connect, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    server = await serve(echo)
    dice = random.Random(0)
    whole = [encode(Ping("x")), encode(Credit(3)), encode(Lookup("x", EPOCH, ()))]
    dealers = [stranger(context, server) for _ in range(4)]
    for i in range(2000):
        header = bytearray(dice.choice(whole) if i % 2 else dice.randbytes(dice.randrange(80)))
        if header:
            header[dice.randrange(len(header))] ^= dice.randrange(256)
        frames = [dice.randbytes(dice.randrange(50)) for _ in range(dice.randrange(3))]
        # They read nothing of what they are told.
        dealers[i % 4].send_multipart([bytes(header), *frames])
        if not i % 100:
            await asyncio.sleep(0)
    await eventually(lambda: server.counters.messages_in >= 2000)
    assert server.counters.bad_messages > 1000
    await still_works(server, connect)
    for dealer in dealers:
        dealer.close()
    await eventually(lambda: len(server._peers) == 1)


async def test_a_credit_that_lies_does_no_harm(
    serve: Serve, connect: Connect, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    server = await serve(echo)
    with stranger(context, server) as dealer:
        for messages in (-1, 0, 2**62):
            dealer.send(encode(Credit(messages)))
        dealer.send(encode(Ping("x")))
        assert await answer(dealer) == Pong("x", EPOCH)
        (peer,) = server.peers
        assert peer._credits.used == (0, 0)


async def test_a_client_that_reads_nothing_does_not_hold_others_up(
    serve: Serve, connect: Connect, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    async def talk(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        for _ in range(20):
            await peer.send(LookupResult(message.request_id, (1,) * 1000))  # type: ignore[union-attr]

    server = await serve(talk)
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvhwm = 1
    reach(dealer, server)
    with dealer:
        for i in range(1500):
            dealer.send(encode(Lookup(f"{i}", EPOCH, ())))
        await eventually(lambda: server.counters.messages_in >= 1500)
        client = await connect(server)
        question = Lookup(new_request_id(), EPOCH, ())
        _ = await client.request(question, timeout_s=WAIT_S)


async def test_a_frame_far_beyond_the_limit_ends_the_connection(
    serve: Serve, connect: Connect, settings: WireSettings, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    small = settings.model_copy(update={"max_frame_bytes": 4096, "max_header_bytes": 4096})
    server = await serve(echo, settings=small)
    with stranger(context, server) as dealer:
        dealer.send(encode(Ping("x")))
        assert await answer(dealer) == Pong("x", EPOCH)
        (peer,) = server.peers
        dealer.send(bytes(40 << 20))
        await eventually(lambda: peer.is_gone)
    await still_works(server, connect)


@pytest.mark.parametrize("size", [5000, 12 << 20])
async def test_what_is_too_large_is_refused_by_its_id_and_the_connection_goes_on(
    serve: Serve, settings: WireSettings, context: zmq.Context[zmq.Socket[bytes]], size: int
) -> None:
    small = settings.model_copy(update={"max_frame_bytes": 4096, "max_header_bytes": 4096})
    server = await serve(echo, settings=small)
    with stranger(context, server) as dealer:
        dealer.send(encode(TellProgram("told", EPOCH, "p", "x" * size)))
        refused = await answer(dealer)
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.code) == ("told", RefusalCode.BAD_MESSAGE)
        dealer.send_multipart([encode(Ping("y")), bytes(size)])
        refused = await answer(dealer)
        assert isinstance(refused, Refused)
        assert refused.request_id == "y"
        dealer.send(encode(Ping("x")))
        assert await answer(dealer) == Pong("x", EPOCH)


async def test_a_client_sends_nothing_that_its_server_would_not_take(
    serve: Serve, connect: Connect, settings: WireSettings
) -> None:
    small = settings.model_copy(update={"max_header_bytes": 4096})
    server = await serve(echo, settings=small)
    client = await connect(server, server_limits=small)
    before = server.counters.messages_in
    with pytest.raises(MessageTooLarge, match="at most 4096"):
        await client.request(TellProgram("told", EPOCH, "p", "x" * 5000), timeout_s=WAIT_S)
    _ = await client.request(Lookup(new_request_id(), EPOCH, ()), timeout_s=WAIT_S)
    assert server.counters.bad_messages == 0
    assert server.counters.messages_in <= before + 3


async def test_a_flood_waits_at_its_sender_while_the_server_is_busy(
    serve: Serve, settings: WireSettings, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    few = settings.model_copy(update={"receive_queue_messages": 8})
    server = await serve(echo, settings=few)
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.sndhwm, dealer.sndtimeo = 0, 8, 500
        reach(dealer, server)
        sent = 0
        # This blocks the server's loop: nobody takes anything in the meantime.
        with contextlib.suppress(zmq.Again):
            for _ in range(300):
                dealer.send(bytes(1 << 20))
                sent += 1
    assert sent < 100


async def test_another_protocol_at_the_port_is_weathered(serve: Serve, connect: Connect) -> None:
    server = await serve(echo, address="tcp://127.0.0.1:0")
    port = urlsplit(server.address).port
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\xff" * 64, random.randbytes(5000)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(text)
            await asyncio.sleep(0.02)
    await still_works(server, connect)
    assert len(server.peers) == 1
