"""Requests sent ahead, bodies without an end, and clients that say no more but listen."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from pie.router.service import RouterService
from tests.router.conftest import Cluster, until
from tests.router.sockets import GET, JSON, Client, Clients
from tests.support.mock_worker import MockWorker

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
SENT_AHEAD = 8


@pytest.fixture
def mock(cluster: Cluster) -> MockWorker:
    return cluster.mock("w0", reply="a few words", token_delay_s=0.02)


@pytest.fixture
async def router(cluster: Cluster, mock: MockWorker) -> RouterService:
    return await cluster.router(1)


@pytest.fixture
async def clients(router: RouterService) -> AsyncIterator[Clients]:
    clients = Clients(router.url)
    yield clients
    clients.close()


def chat(*, stream: bool = False, version: str = "1.1") -> bytes:
    """Return a whole request that generates."""
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": "mock", "messages": messages, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/{version}\r\n{JSON}host: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(body: bytes) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\n{JSON}host: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        + body
    )


@pytest.mark.parametrize("first", [GET, chat(), chat(stream=False) + MODELS])
async def test_who_sends_too_many_requests_ahead_is_answered_in_order_and_then_refused(
    clients: Clients, first: bytes
) -> None:
    client = await clients.new(first + MODELS * 1000)
    for _ in range(SENT_AHEAD + 1):
        assert (await client.one())[0] == 200
    status, error = await client.answer()
    assert (status, error["code"]) == (429, "overloaded")


async def test_requests_sent_ahead_keep_their_order(clients: Clients) -> None:
    client = await clients.new(chat() + GET + MODELS)
    contents = [json.loads((await client.one())[1]) for _ in range(3)]
    assert contents[0]["object"] == "chat.completion"
    assert contents[1] == {"status": "ok"}
    assert contents[2]["object"] == "list"
    assert await client.get() == 200


async def test_what_is_no_http_is_refused_after_the_answers_before_it(clients: Clients) -> None:
    client = await clients.new(chat() + GET + b"\x16\x03\x01\r\n\r\n" + GET)
    assert (await client.one())[0] == 200
    assert (await client.one())[0] == 200
    assert (await client.answer())[0] == 400


@pytest.mark.parametrize(
    "body", [b"zz\r\n{}\r\n", b"2\r\n{}!\r\n", b"1\r\n{\r\n-1\r\n", b"f" * 20 + b"\r\n"]
)
@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_a_body_that_is_not_well_chunked_is_told(
    clients: Clients, body: bytes, ahead: int
) -> None:
    client = await clients.new(GET * ahead + chunked(body) + GET)
    for _ in range(ahead):
        assert (await client.one())[0] == 200
    status, error = await client.answer()
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "chunk" in error["message"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_says_no_more_gets_its_answer(clients: Clients, version: str) -> None:
    client = await clients.new(chat(version=version))
    client.writer.write_eof()
    status, content = await client.one()
    assert status == 200
    assert json.loads(content)["choices"][0]["finish_reason"]
    assert await client.is_closed()


async def test_a_client_that_says_no_more_gets_its_whole_stream(
    clients: Clients, mock: MockWorker
) -> None:
    early, late = await clients.new(chat(stream=True)), await clients.new(chat(stream=True))
    early.writer.write_eof()
    await late.reader.readuntil(b"content")
    late.writer.write_eof()
    for client in (early, late):
        assert b"data: [DONE]" in await client.whole()
    assert not mock.events("cancel")


async def test_a_client_that_says_no_more_gets_all_answers(clients: Clients) -> None:
    client = await clients.new(chat() + MODELS + GET)
    client.writer.write_eof()
    for _ in range(3):
        assert (await client.one())[0] == 200
    assert await client.is_closed()


async def test_half_a_request_is_not_waited_for_when_no_more_comes(clients: Clients) -> None:
    for half in (b"", b"GET /he", chat()[:-5]):
        client = await clients.new(chat() + half)
        client.writer.write_eof()
        assert (await client.one())[0] == 200
        assert await client.is_closed()
        client = await clients.new(half)
        client.writer.write_eof()
        assert await client.whole() == b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "end and close"])
async def test_a_client_that_has_gone_is_not_worked_for(
    cluster: Cluster, stream: bool, begun: bool, how: str
) -> None:
    mock = cluster.mock("w0", reply="word " * 1000, token_delay_s=3600 if not begun else 0.05)
    router = await cluster.router(1)
    clients = Clients(router.url)
    client = await clients.new(chat(stream=stream))
    await until(lambda: bool(mock.events("generate")))
    if stream and begun:
        await client.reader.readuntil(b"content")
    _end(client, how)
    await until(lambda: bool(mock.events("cancel")))
    await until(lambda: router.status().in_flight == 0)


async def test_all_requests_sent_ahead_end_with_their_client(
    cluster: Cluster, mock: MockWorker
) -> None:
    slow = cluster.mock("w1", token_delay_s=3600)
    mock.kill()
    router = await cluster.router(1)
    client = await Clients(router.url).new(chat() + GET + GET)
    await until(lambda: bool(slow.events("generate")))
    _end(client, "close")
    await until(lambda: bool(slow.events("cancel")))


def _end(client: Client, how: str) -> None:
    """Be gone, in one of the ways in which sockets end."""
    if how == "reset":
        at_once = struct.pack("ii", 1, 0)
        peer = client.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    if how == "end and close":
        client.writer.write_eof()
    client.writer.close()
