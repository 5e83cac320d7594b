"""Clients that take memory, time or connections before anybody knows who they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from pie.router.service import RouterService
from tests.router.conftest import WAIT_S, Cluster
from tests.router.sockets import GET, JSON, Clients

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
LIMIT_BYTES = 16 * 1024
LATE_S = 0.5
LONG_S = 10 * WAIT_S


@pytest.fixture
async def router(cluster: Cluster) -> RouterService:
    """A router without workers, with a token, narrow limits and time for everybody."""
    return await cluster.router(
        0,
        api_token="secret",
        max_head_bytes=LIMIT_BYTES,
        head_timeout_s=LONG_S,
        body_timeout_s=LONG_S,
        body_total_timeout_s=LONG_S,
        max_connections=8,
    )


@pytest.fixture
async def clients(router: RouterService) -> AsyncIterator[Clients]:
    clients = Clients(router.url)
    yield clients
    clients.close()


@pytest.fixture
async def hurried(cluster: Cluster) -> AsyncIterator[Clients]:
    """Clients of a router that has little time for any of them."""
    router = await cluster.router(
        0,
        api_token="secret",
        head_timeout_s=LATE_S,
        body_timeout_s=LATE_S,
        body_total_timeout_s=2 * LATE_S,
    )
    clients = Clients(router.url)
    yield clients
    clients.close()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a" * 4096),
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 4096),
        (b"GET / HTTP/1.1\r\n", b"x: " + b"a" * 4091 + b"\r\n"),
        (b"GET / HTTP/1.1\r\n", b"x:\r\n" * 64),
        (b"\r\n", b"\r\n" * 2048),
    ],
    ids=["address", "one header", "large headers", "empty headers", "nothing"],
)
async def test_headers_without_end_are_refused(clients: Clients, begin: bytes, more: bytes) -> None:
    client = await clients.new()
    await client.send(begin)
    await client.send(more, times=1000, pause_s=0.001)
    status, error = await client.answer()
    assert (status, error["code"]) == (431, "headers_too_large")
    assert client.sent_bytes < 10 * LIMIT_BYTES


async def test_large_headers_that_come_at_once_are_refused(clients: Clients) -> None:
    client = await clients.new()
    await client.send(b"GET /health HTTP/1.1\r\nx: " + b"a" * 2 * LIMIT_BYTES + b"\r\n\r\n")
    assert (await client.answer())[0] == 431


async def test_trailers_without_end_are_refused(clients: Clients) -> None:
    client = await clients.new()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{JSON}authorization: Bearer secret\r\n".encode()
    await client.send(head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ")
    await client.send(b"a" * 4096, times=1000, pause_s=0.001)
    assert await client.is_closed()
    assert client.sent_bytes < 10 * LIMIT_BYTES


async def test_a_body_may_be_larger_than_headers(router: RouterService, clients: Clients) -> None:
    client = await clients.new()
    body = b'{"model": "' + b"m" * 4 * LIMIT_BYTES + b'", "messages": []}'
    for chunk in (len(body), 1000):
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{JSON}authorization: Bearer secret\r\n".encode()
        parts = [body[at : at + chunk] for at in range(0, len(body), chunk)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        client.writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            answer = await client.reader.readuntil(b"\r\n\r\n")
            length = int(answer.partition(b"content-length: ")[2].split()[0])
            await client.reader.readexactly(length)
        assert b" 400 " in answer
    assert await client.get() == 200


async def test_headers_that_come_byte_by_byte_run_out_of_time(hurried: Clients) -> None:
    client = await hurried.new()
    await client.send(b"GET /")
    await client.send(b"a", times=1000, pause_s=LATE_S / 10)
    status, error = await client.answer()
    assert (status, error["code"]) == (408, "request_timeout")
    assert client.sent_bytes < 1000


async def test_a_second_request_runs_out_of_time_as_well(hurried: Clients) -> None:
    client = await hurried.new()
    assert await client.get() == 200
    await client.send(b"GET /")
    await client.send(b"a", times=1000, pause_s=LATE_S / 10)
    assert (await client.answer())[0] == 408


async def test_a_connection_that_says_nothing_is_closed(hurried: Clients) -> None:
    client = await hurried.new()
    assert await client.is_closed()


@pytest.mark.parametrize("token", ["secret", "wrong"])
async def test_a_body_that_comes_byte_by_byte_runs_out_of_time(
    hurried: Clients, token: str
) -> None:
    client = await hurried.new()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{JSON}authorization: Bearer {token}\r\ncontent-length: 1000\r\n\r\n"
    await client.send(head.encode())
    await client.send(b" ", times=1000, pause_s=LATE_S / 10)
    assert await client.is_closed()
    assert client.sent_bytes < len(head) + 1000


async def test_an_idle_connection_lives_longer_than_headers_may_take(hurried: Clients) -> None:
    client = await hurried.new()
    for _ in range(2):
        assert await client.get() == 200
        await asyncio.sleep(2 * LATE_S)


async def test_connections_that_ask_for_nothing_leave_room_for_others(
    clients: Clients, http: httpx.AsyncClient, router: RouterService
) -> None:
    idle = [await clients.new() for _ in range(8)]
    for client in idle:
        assert await client.get() == 200
    assert (await http.get(router.url + "/health")).status_code == 200
    # The one that was idle for longest made room.
    assert await idle[0].is_closed()
    assert await idle[-1].get() == 200


@pytest.mark.parametrize("said", [b"", b"G", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
async def test_connections_that_say_nothing_or_half_of_it_leave_room_for_others(
    clients: Clients, said: bytes
) -> None:
    silent = [await clients.new(said) for _ in range(20)]
    newest = await clients.new()
    assert await newest.get() == 200
    for client in silent[:12]:
        assert await client.is_closed()


async def test_who_has_said_nothing_makes_room_before_who_has_said_half(
    cluster: Cluster,
) -> None:
    router = await cluster.router(0, max_connections=2)
    clients = Clients(router.url)
    half = await clients.new(GET[:10])
    silent = await clients.new()
    assert await (await clients.new()).get() == 200
    assert await silent.is_closed()
    half.writer.write(GET[10:])
    assert await half.get(b"") == 200
    clients.close()


async def test_one_connection_too_many_is_told_so(clients: Clients) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{JSON}authorization: Bearer secret\r\ncontent-length: 9\r\n\r\n"
    for _ in range(8):
        await clients.new(head.encode())
    refused = await clients.new()
    status, error = await refused.answer()
    assert (status, error["code"]) == (503, "overloaded")
    assert "max_connections" in error["message"]


async def test_what_is_no_http_is_told_in_the_usual_shape(clients: Clients) -> None:
    client = await clients.new()
    await client.send(b"\x16\x03\x01 hello\r\n\r\n")
    status, error = await client.answer()
    assert (status, error["type"]) == (400, "invalid_request_error")


OFFERS = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQ\r\n",
    b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\n",
]


def _post(offer: bytes, body: bytes, *, chunked: bool = False) -> tuple[bytes, bytes]:
    """Return head and body of a request that comes with an offer."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{JSON}authorization: Bearer secret\r\n".encode()
        + offer
    )
    if chunked:
        parts = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (5, body[:5], len(body) - 5, body[5:])
        return head + b"transfer-encoding: chunked\r\n\r\n", parts
    return head + b"content-length: %d\r\n\r\n" % len(body), body


async def test_an_offer_of_another_protocol_changes_nothing_about_a_request(
    clients: Clients,
) -> None:
    client = await clients.new()
    for offer in OFFERS:
        for chunked in (False, True):
            head, body = _post(offer, b'{"temperature": "as it is"}', chunked=chunked)
            for parts in ((head + body + GET,), (head, body + GET)):
                for part in parts:
                    client.writer.write(part)
                    await asyncio.sleep(0.02)
                status, content = await client.one()
                assert status == 400
                assert b"temperature" in content
                assert (await client.one())[0] == 200
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
        assert (await client.one())[0] == 200
        assert await client.get() == 200


async def test_a_body_after_an_offer_is_no_request_and_a_tunnel_is_refused(
    clients: Clients,
) -> None:
    client = await clients.new()
    head, body = _post(b"connection: close, upgrade\r\nupgrade: h2c\r\n", GET)
    client.writer.write(head)
    await asyncio.sleep(0.02)
    await client.send(body)
    whole = await client.whole()
    assert whole.count(b"HTTP/1.1 ") == 1
    assert b" 400 " in whole
    client = await clients.new()
    await client.send(b"CONNECT a.example:443 HTTP/1.1\r\nhost: a.example\r\n\r\n" + GET)
    status, error = await client.answer()
    assert (status, error["code"]) == (405, "method_not_allowed")
