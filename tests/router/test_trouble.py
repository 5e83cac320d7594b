"""Workers that die, refuse and fall silent, clients that hang up, and a router that starts anew."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from pie.router.errors import PortBusyError
from tests.router.conftest import WAIT_S, Cluster, until
from tests.router.sockets import JSON
from tests.support.mock_worker import REPLY, MockWorker

pytestmark = pytest.mark.live
HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
GOOD = {"model": "mock", "messages": HELLO}
DELAY_S = 0.01


async def streamed(client: AsyncOpenAI, **options: Any) -> tuple[str, str | None, int]:
    """Return the text, the finish reason and the number of tokens of a streamed chat."""
    stream = await client.chat.completions.create(
        model="mock",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    text, finish, tokens = "", None, 0
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return text, finish, tokens


# A dash, quotes and an emoji of several tokens lie around the middle.
@pytest.mark.parametrize("dies_after", [1, 18, 19, 20, 21, 33, 34, 60])
async def test_no_text_is_repeated_or_lost_wherever_a_worker_dies(
    cluster: Cluster, dies_after: int
) -> None:
    dying = cluster.mock("w0", token_delay_s=DELAY_S, die_after_tokens=dies_after)
    router = await cluster.router(1)
    answer = asyncio.ensure_future(streamed(cluster.openai(router), seed=11, stop=["lazy cat"]))
    await until(lambda: bool(dying.events("generate")))
    other = cluster.mock("w1", token_delay_s=DELAY_S)
    text, finish, tokens = await answer
    assert (text, finish) == (REPLY, "stop")
    [first] = dying.events("generate")
    [second] = other.events("generate")
    assert second["output_start"] == first["output_start"]
    assert second["seed"] == first["seed"] == 11
    assert second["max_tokens"] == first["max_tokens"]
    sent = second["tokens"]
    assert isinstance(sent, list)
    assert len(sent) - int(str(second["output_start"])) == dies_after
    assert tokens > dies_after
    assert router.metrics.total(router.metrics.resumes) == 1


async def test_a_killed_workers_requests_go_to_another(cluster: Cluster) -> None:
    killed = cluster.mock("w0", silent=True)
    router = await cluster.router(1)
    client = cluster.openai(router)
    answer = asyncio.ensure_future(
        client.chat.completions.with_raw_response.create(model="mock", messages=HELLO)
    )
    await until(lambda: bool(killed.events("generate")))
    cluster.mock("w1")
    killed.kill()
    raw = await answer
    assert raw.headers["x-pie-worker"] == "w1"
    assert raw.parse().choices[0].message.content == REPLY
    assert router.metrics.total(router.metrics.retries) == 1


async def test_a_worker_that_starts_again_is_used_again(cluster: Cluster) -> None:
    first = cluster.mock("w0", epoch=1, silent=True)
    router = await cluster.router(1)
    client = cluster.openai(router)
    answer = asyncio.ensure_future(client.chat.completions.create(model="mock", messages=HELLO))
    await until(lambda: bool(first.events("generate")))
    first.kill()
    cluster.mock("w0", epoch=2)
    assert (await answer).choices[0].message.content == REPLY
    again = await client.chat.completions.create(model="mock", messages=HELLO)
    assert again.choices[0].message.content == REPLY


async def test_a_silent_worker_is_given_up(cluster: Cluster) -> None:
    silent = cluster.mock("w0", silent=True)
    router = await cluster.router(
        1, first_token_timeout_s=2, retry_after_s=WAIT_S, worker_wait_s=WAIT_S
    )
    answer = asyncio.ensure_future(
        cluster.openai(router).chat.completions.create(model="mock", messages=HELLO)
    )
    await until(lambda: bool(silent.events("generate")))
    cluster.mock("w1")
    assert (await answer).choices[0].message.content == REPLY
    await until(lambda: bool(silent.events("cancel")))


async def test_a_failed_attempt_is_tried_elsewhere_once(cluster: Cluster) -> None:
    failing = cluster.mock("w0", fail_after_tokens=20, token_delay_s=DELAY_S)
    # It comes back to the failing one only after so long, and by then the other one is there.
    router = await cluster.router(1, retry_after_s=WAIT_S, worker_wait_s=WAIT_S)
    answer = asyncio.ensure_future(streamed(cluster.openai(router)))
    await until(lambda: bool(failing.events("generate")))
    cluster.mock("w1", token_delay_s=DELAY_S)
    assert (await answer)[:2] == (REPLY, "stop")


async def test_an_answer_that_cannot_go_on_ends_with_an_error(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.mock("w0", fail_after_tokens=20, token_delay_s=DELAY_S)
    client = cluster.openai(await cluster.router(1, worker_wait_s=0.1))
    with pytest.raises(openai.APIError, match="as the test wants"):
        await streamed(client)
    with pytest.raises(openai.InternalServerError, match="as the test wants"):
        await client.chat.completions.create(model="mock", messages=HELLO)
    # What a worker says may repeat what was asked or answered.
    assert "worker w0 failed" in caplog.text
    assert "as the test wants" not in caplog.text


async def test_full_workers_are_429_with_retry_after(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0", refuse="overloaded")
    cluster.mock("w1", refuse="overloaded")
    router = await cluster.router(2)
    response = await http.post(router.url + CHAT, json=GOOD)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"
    # Both were asked.
    assert all(mock.events("generate") for mock in cluster.mocks)


async def test_a_full_worker_leaves_the_request_to_another(cluster: Cluster) -> None:
    cluster.mock("w0", refuse="overloaded")
    cluster.mock("w1")
    client = cluster.openai(await cluster.router(2))
    for _ in range(4):
        answer = await client.chat.completions.create(model="mock", messages=HELLO)
        assert answer.choices[0].message.content == REPLY


async def test_the_routers_own_cap_is_429_with_retry_after(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    mock = cluster.mock("w0", silent=True)
    router = await cluster.router(1, max_in_flight=2, retry_after_s=3)
    waiting = [asyncio.ensure_future(http.post(router.url + CHAT, json=GOOD)) for _ in range(2)]
    await until(lambda: len(mock.events("generate")) == 2)
    response = await http.post(router.url + CHAT, json=GOOD)
    assert not any(request.done() for request in waiting), "it does not wait for room"
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    for request in waiting:
        request.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: router.status().in_flight == 0)


async def test_without_workers_it_is_503_with_retry_after(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    router = await cluster.router(0)
    for path in (CHAT, "/ready"):
        content = GOOD if path == CHAT else None
        response = await http.request("POST" if content else "GET", router.url + path, json=content)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["message"]
    assert (await http.get(router.url + "/health")).status_code == 200


async def test_readiness_comes_with_a_worker_and_goes_with_it(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    mock = cluster.mock("w0")
    router = await cluster.router(1)
    response = await http.get(router.url + "/ready")
    assert (response.status_code, response.json()["workers"]) == (200, 1)
    mock.kill()
    await until(lambda: router.status().usable_workers == 0)
    assert (await http.get(router.url + "/ready")).status_code == 503
    response = await http.post(router.url + CHAT, json=GOOD)
    assert response.status_code == 503


async def _hang_up(mock: MockWorker, url: str, *, stream: bool) -> None:
    """Ask, hang up, and wait until the worker is told."""
    host = urlsplit(url)
    body = json.dumps(GOOD | {"stream": stream}).encode()
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\n{JSON}host: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    asked = len(mock.events("generate"))
    await until(lambda: len(mock.events("generate")) > asked)
    if stream:
        await reader.readuntil(b"content")
    cancels = len(mock.events("cancel"))
    writer.close()
    await until(lambda: len(mock.events("cancel")) > cancels)


async def test_a_client_that_hangs_up_frees_the_worker_before_another_token(
    cluster: Cluster,
) -> None:
    mock = cluster.mock("w0", token_delay_s=3600)
    router = await cluster.router(1)
    for stream in (True, False):
        await _hang_up(mock, router.url, stream=stream)
    await until(lambda: router.status().in_flight == 0)
    assert router.metrics.total(router.metrics.disconnects) == 2


async def test_a_slow_client_gets_everything_and_holds_up_nobody(cluster: Cluster) -> None:
    cluster.mock("w0", reply="many words " * 40_000, token_delay_s=1e-9, context_tokens=500_000)
    router = await cluster.router(1)
    host = urlsplit(router.url)
    body = json.dumps(GOOD | {"stream": True, "max_tokens": 20_000}).encode()
    reader, writer = await asyncio.open_connection(host.hostname, host.port, limit=2**16)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\n{JSON}host: x\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await reader.readuntil(b"\r\n\r\n")
    # It reads nothing while another client is served.
    answer = await cluster.openai(router).chat.completions.create(
        model="mock", messages=HELLO, max_tokens=50
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 50
    rest = await reader.read(-1)
    assert b"data: [DONE]" in rest
    events = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    assert len(text) > 20_000
    assert ("many words " * 40_000).startswith(text)
    # What it did not take was merged.
    assert len(events) < 20_000
    writer.close()


async def test_a_router_that_starts_anew_knows_what_workers_hold(cluster: Cluster) -> None:
    cluster.mock("w0")
    cluster.mock("w1")
    messages: Any = [{"role": "user", "content": "a rather long question, " * 20}]

    async def asked(client: AsyncOpenAI) -> tuple[str, int]:
        raw = await client.chat.completions.with_raw_response.create(
            model="mock", messages=messages
        )
        return raw.headers["x-pie-worker"], int(raw.headers["x-pie-cached-tokens"])

    first = await cluster.router(2)
    place, cached = await asked(cluster.openai(first))
    assert cached == 0
    await asyncio.sleep(0.2)
    await first.close()
    second = await cluster.router(2)
    client = cluster.openai(second)
    await until(
        lambda: any(
            sum(one.pages.values()) for one in second.status().workers if one.place == place
        )
    )
    for _ in range(3):
        again, cached = await asked(client)
        assert again == place
        assert cached > 100


async def test_draining_refuses_new_requests_and_waits_for_running_ones(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    mock = cluster.mock("w0", token_delay_s=DELAY_S)
    router = await cluster.router(1)
    answer = asyncio.ensure_future(streamed(cluster.openai(router)))
    await until(lambda: bool(mock.events("generate")))
    draining = asyncio.ensure_future(router.drain(WAIT_S))
    await asyncio.sleep(0.05)
    assert (await http.post(router.url + CHAT, json=GOOD)).status_code == 503
    assert await draining
    assert (await answer)[0] == REPLY


async def test_closing_tells_clients_and_waits_for_no_worker(cluster: Cluster) -> None:
    mock = cluster.mock("w0", silent=True)
    router = await cluster.router(1)
    client = cluster.openai(router)
    answer = asyncio.ensure_future(client.chat.completions.create(model="mock", messages=HELLO))
    await until(lambda: bool(mock.events("generate")))
    await router.close()
    with pytest.raises(openai.InternalServerError, match="stopping"):
        await answer


async def test_a_busy_port_is_said_in_one_sentence(cluster: Cluster) -> None:
    router = await cluster.router(0)
    port = urlsplit(router.url).port
    with pytest.raises(PortBusyError, match=f"port {port} on 127.0.0.1 is in use"):
        await cluster.router(0, port=port)


async def test_a_token_is_asked_for_where_one_is_set(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1, api_token="secret")
    with pytest.raises(openai.AuthenticationError):
        await cluster.openai(router).models.list()
    client = cluster.openai(router, api_key="secret")
    assert (await client.models.list()).data
    for path, status in (("/metrics", 401), ("/status", 401), ("/health", 200), ("/ready", 200)):
        assert (await http.get(router.url + path)).status_code == status


async def test_metrics_and_status_tell_what_happened(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    await http.post(router.url + CHAT, json=GOOD)
    await http.post(router.url + CHAT, json=GOOD | {"n": -1})
    text = (await http.get(router.url + "/metrics")).text
    assert f'pie_router_requests_total{{path="{CHAT}",status="200"}} 1.0' in text
    assert f'pie_router_requests_total{{path="{CHAT}",status="400"}} 1.0' in text
    assert "pie_router_workers 1.0" in text
    assert "pie_router_in_flight 0.0" in text
    assert 'pie_router_index_mode{mode="ok"} 1.0' in text
    status = (await http.get(router.url + "/status")).json()
    assert status["ready"]
    assert status["models"] == ["mock"]
    assert status["workers"][0]["place"] == "w0"
    assert status["output_tokens"] > 0
    assert status["requests"] == 2
