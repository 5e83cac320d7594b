"""Bad input over plain sockets: an OpenAI-shaped answer at once, and the next request works."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from urllib.parse import quote, urlsplit

import httpx
import pytest

from pie.router.service import RouterService
from tests.router.conftest import WAIT_S, Cluster
from tests.router.sockets import JSON, Clients

pytestmark = pytest.mark.live
CHAT = "/v1/chat/completions"
GOOD = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}
"""Each takes a few milliseconds; the rest is for a busy machine."""


@pytest.fixture
async def router(cluster: Cluster) -> RouterService:
    cluster.mock("w0")
    return await cluster.router(1, body_timeout_s=WAIT_S, body_total_timeout_s=WAIT_S)


def told(response: httpx.Response) -> dict[str, str]:
    """Return the error of an answer, in OpenAI's shape."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b'{"model": "mock", "messages": []}', 400, "messages"),
        (
            b'{"model": "mock", "messages": [{"role": "king", "content": ""}]}',
            400,
            "messages[0].role",
        ),
        (b'{"model": "mock", "messages": [{"role": "user", "content": "\xff"}]}', 400, None),
        (b'{"model": "mock", "messages": [{"role": "user"', 400, None),
        (json.dumps(GOOD | {"temperature": "hot"}).encode(), 400, "temperature"),
        (json.dumps(GOOD | {"max_tokens": -5}).encode(), 400, "max_tokens"),
        (json.dumps(GOOD | {"max_tokens": 10**12}).encode(), 400, "max_tokens"),
        (json.dumps(GOOD | {"n": 1000}).encode(), 400, "n"),
        (json.dumps(GOOD | {"model": "none"}).encode(), 404, "model"),
    ],
)
async def test_bad_bodies(
    router: RouterService, http: httpx.AsyncClient, content: bytes, status: int, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    response = await http.post(router.url + CHAT, content=content, headers=headers)
    assert response.status_code == status
    assert told(response)["param"] == param
    assert (await http.post(router.url + CHAT, json=GOOD)).status_code == 200


async def test_messages_where_there_are_none_are_an_unknown_field(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "messages": GOOD["messages"]}, "messages"),
        ("/v1/completions", {"prompt": "a", "messages": 5}, "messages"),
        ("/detokenize", {"tokens": [1], "messages": 5}, "messages"),
        ("/tokenize", {"prompt": "a", "messages": GOOD["messages"]}, "prompt"),
    ):
        response = await http.post(router.url + path, json={"model": "mock"} | body)
        assert response.status_code == 400
        error = told(response)
        assert (error["code"], error["param"]) == ("unknown_parameter", param)


async def test_a_completion_of_no_tokens_names_its_field(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    body = {"model": "mock", "prompt": "a", "max_tokens": 0}
    response = await http.post(router.url + "/v1/completions", json=body)
    assert (response.status_code, told(response)["param"]) == (400, "max_tokens")


async def test_what_is_no_number_of_json_is_refused(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    headers = {"content-type": "application/json"}
    for number in ("NaN", "Infinity", "-Infinity"):
        for path, text in (
            ("/tokenize", f'{{"prompt": "hi", "messages": {number}}}'),
            (CHAT, json.dumps(GOOD)[:-1] + f', "metadata": {{"\\\\": {number}}}}}'),
        ):
            response = await http.post(router.url + path, content=text, headers=headers)
            assert (response.status_code, told(response)["code"]) == (400, "invalid_json")
    said = {"model": "mock", "messages": [{"role": "user", "content": '"NaN \\" Infinity'}]}
    assert (await http.post(router.url + CHAT, json=said)).status_code == 200


async def test_a_compressed_body_is_refused(router: RouterService, http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(json.dumps(GOOD).encode())
    response = await http.post(router.url + CHAT, content=content, headers=headers)
    assert (response.status_code, told(response)["code"]) == (415, "unsupported_media_type")
    headers["content-encoding"] = "identity"
    response = await http.post(router.url + CHAT, content=json.dumps(GOOD), headers=headers)
    assert response.status_code == 200


async def test_a_request_has_one_host(router: RouterService) -> None:
    clients = Clients(router.url)
    for head, status in (
        (b"HTTP/1.1\r\nhost: a\r\nHost: b\r\n", b"400"),
        (b"HTTP/1.1\r\n", b"400"),
        (b"HTTP/1.1\r\nhost: a\r\nconnection: close\r\n", b"200"),
        (b"HTTP/1.0\r\n", b"200"),
    ):
        client = await clients.new(b"GET /health " + head + b"\r\n")
        assert (await client.whole()).split()[1] == status
    clients.close()


async def test_a_stream_of_http_1_0_ends_with_its_connection(router: RouterService) -> None:
    content = json.dumps(GOOD | {"stream": True}).encode()
    clients = Clients(router.url)
    client = await clients.new(
        f"POST {CHAT} HTTP/1.0\r\n{JSON}content-length: {len(content)}\r\n\r\n".encode() + content
    )
    head, _, events = (await client.whole()).partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")
    assert all(not line or line.startswith(b"data: ") for line in events.split(b"\n"))
    clients.close()


async def test_a_body_that_says_it_is_too_large_is_refused_unread(router: RouterService) -> None:
    host = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {100 * 2**20}\r\n\r\n".encode()
    )
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert b" 413 " in head
    writer.close()


async def test_a_body_that_grows_too_large_is_refused_while_it_is_read(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    sent = 0

    async def endless() -> asyncio.AsyncIterator[bytes]:  # type: ignore[name-defined]
        nonlocal sent
        while sent < 100 * 2**20:
            sent += 2**20
            yield bytes(2**20)

    headers = {"content-type": "application/json"}
    response = await http.post(router.url + CHAT, content=endless(), headers=headers)
    assert response.status_code == 413
    assert told(response)["code"] == "request_too_large"
    assert (await http.post(router.url + CHAT, json=GOOD)).status_code == 200


async def test_a_body_that_does_not_come_is_given_up(cluster: Cluster) -> None:
    router = await cluster.router(0, body_timeout_s=0.3)
    host = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{JSON}content-length: 50\r\n\r\n{{".encode())
    async with asyncio.timeout(WAIT_S):
        answer = await reader.read()
    assert b" 408 " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    writer.close()


async def test_other_content_types_are_refused(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    response = await http.post(router.url + CHAT, data={"model": "mock"})
    assert response.status_code == 415
    assert "application/json" in told(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/audio/speech", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_paths_and_wrong_methods(
    router: RouterService, http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, router.url + path)
    assert response.status_code == status
    assert response.headers["x-pie-request-id"]
    error = told(response)
    assert path in error["message"]
    if status == 405:
        assert error["code"] == "method_not_allowed"
        assert response.headers["allow"].partition(",")[0] in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/responses/x", "DELETE, GET, HEAD"),
        ("DELETE", "/admin/policies", "GET, HEAD, POST"),
        ("PUT", "/v1/inferlets", "GET, HEAD, POST"),
    ],
)
async def test_all_that_a_path_takes_is_told(
    router: RouterService, http: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await http.request(method, router.url + path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert allowed.replace(", ", " or ") in told(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, GOOD | {"model": "m" * 50_000}),
        ("GET", "/v1/models/" + "m" * 50_000, None),
        ("GET", "/" + "m" * 50_000, None),
        ("M" * 50_000, CHAT, None),
        ("POST", CHAT, GOOD | {"m" * 50_000: 1}),
        ("POST", CHAT, GOOD | {"logit_bias": {"m" * 50_000: 1}}),
    ],
)
async def test_no_answer_repeats_at_length_what_was_asked(
    router: RouterService, http: httpx.AsyncClient, method: str, path: str, body: object
) -> None:
    response = await http.request(method, router.url + path, json=body)
    assert response.status_code >= 400
    assert len(told(response)["message"]) < 300


async def test_no_answer_repeats_a_header_at_length(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    for header in ("x-pie-place", "content-type"):
        headers = {"content-type": "application/json", header: "m" * 50_000}
        response = await http.post(router.url + CHAT, content=json.dumps(GOOD), headers=headers)
        assert len(told(response)["message"]) < 300


async def test_garbage_and_half_requests_leave_the_router_well(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    host = urlsplit(router.url)
    for garbage in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST", b""):
        _, writer = await asyncio.open_connection(host.hostname, host.port)
        writer.write(garbage)
        await writer.drain()
        writer.close()
    assert (await http.post(router.url + CHAT, json=GOOD)).status_code == 200


async def test_the_document_describes_both_endpoints(
    router: RouterService, http: httpx.AsyncClient
) -> None:
    document = (await http.get(router.url + "/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for path in (CHAT, "/v1/completions"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert "temperature" in schemas[name]["properties"]
    used = set(_refs(document))
    assert used <= {f"#/components/schemas/{name}" for name in schemas}


def _refs(node: object) -> list[str]:
    if isinstance(node, dict):
        return [
            ref
            for key, value in node.items()
            for ref in ([value] if key == "$ref" else _refs(value))
        ]
    return [ref for item in node for ref in _refs(item)] if isinstance(node, list) else []


async def test_nothing_that_a_client_made_up_reaches_a_log(
    router: RouterService, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pie")
    forged = "forged\n2026-11-30 ERROR pie: all is lost"
    await http.post(router.url + CHAT, json=GOOD | {forged: 1})
    await http.post(router.url + CHAT, json=GOOD | {"model": forged})
    await http.post(router.url + CHAT, json=GOOD | {"temperature": forged})
    await http.post(router.url + CHAT, json=GOOD | {"logit_bias": {forged: 1}})
    await http.post(router.url + "/v1/responses", json={"model": "mock", "metadata": {forged: 1}})
    await http.get(router.url + "/v1/models/forged%20ERROR%1b")
    await http.get(router.url + "/admin/requests/forged%20ERROR%1b")
    await http.get(router.url + f"/{quote(forged)}")
    told = [one.getMessage() for one in caplog.records if one.name.startswith("pie.router.end")]
    assert len(told) == 7
    assert any("param temperature" in one for one in told)
    assert not [one for one in told if "forged" in one or "\n" in one]
