"""Two routers that answer as one: quotas, responses and explanations, whichever a connection comes to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from pie.index.client import make_client
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.router.service import RouterService
from pie.tokens.tokenizer import Tokenizer
from tests.router.conftest import WAIT_S, Cluster, until
from tests.router.test_access import HELLO, Keys, bearer
from tests.support.mock_worker import REPLY
from tests.support.redis_server import own_redis_server

__all__ = ["own_redis_server"]

SAID = "The passphrase is xylophone marzipan. "


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


def refilled(per_minute: float, begun_s: float) -> float:
    """Return how much came in the meantime."""
    return (time.monotonic() - begun_s) * per_minute / 60


async def ask(cluster: Cluster, router: RouterService, key: str, **fields: Any) -> Any:
    client = cluster.openai(router, api_key=key)
    return await client.chat.completions.create(
        **({"model": "mock", "messages": HELLO, "max_tokens": 4} | fields)
    )


async def let_in(cluster: Cluster, routers: list[RouterService], key: str, most: int) -> int:
    """Return how many requests in turn come through until one is refused."""
    for count in range(most):
        try:
            await ask(cluster, routers[count % len(routers)], key)
        except openai.RateLimitError:
            return count
    return most


async def test_a_tenant_takes_no_more_from_two_routers_than_from_one(
    cluster: Cluster, keys: Keys
) -> None:
    cluster.mock("w0", token_delay_s=0.02)
    routers = [await cluster.router(1, keys_file=keys.file) for _ in range(2)]
    one, other = routers
    begun_s = time.monotonic()
    came = await let_in(cluster, routers, keys.make("few", requests_per_minute=5), 20)
    assert 5 <= came <= 5 + refilled(5, begun_s)

    short = keys.make("short", tokens_per_minute=50)
    await ask(cluster, one, short)
    with pytest.raises(openai.RateLimitError, match="50 tokens a minute"):
        await ask(cluster, other, short)

    slow = keys.make("slow", concurrent=2)
    stream = await ask(
        cluster, one, slow, stream=True, max_tokens=200, n=2, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    with pytest.raises(openai.RateLimitError, match="2 sequences in flight"):
        await ask(cluster, other, slow)
    await stream.close()
    await until(lambda: one.status().in_flight == 0)
    for turn in range(10):
        assert (await ask(cluster, routers[turn % 2], slow, n=2)).choices


async def test_many_at_once_are_let_in_as_by_one_router(cluster: Cluster, keys: Keys) -> None:
    cluster.mock("w0")
    routers = [await cluster.router(1, keys_file=keys.file, max_in_flight=400) for _ in range(2)]
    key = keys.make("many", requests_per_minute=20)
    begun_s = time.monotonic()
    async with httpx.AsyncClient(timeout=60) as client:
        answers = await asyncio.gather(
            *(
                client.post(
                    f"{routers[turn % 2].url}/v1/completions",
                    json={"model": "mock", "prompt": "word", "max_tokens": 1},
                    headers=bearer(key),
                )
                for turn in range(80)
            )
        )
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert 20 <= statuses.count(200) <= 20 + refilled(20, begun_s)


async def test_without_redis_each_router_has_its_share(
    tmp_path: Path, chat_folder: Path, own_redis_server: EmbeddedServer, keys: Keys
) -> None:
    server = own_redis_server
    index = IndexSettings(url=server.url, key_prefix="p", request_timeout_s=1.0, poll_s=0.05)
    cluster = Cluster(tmp_path, chat_folder, index)
    try:
        cluster.mock("w0")
        routers = [await cluster.router(1, keys_file=keys.file) for _ in range(2)]
        key = keys.make("few", requests_per_minute=6, concurrent=4)
        begun_s = time.monotonic()
        for router in routers:
            await ask(cluster, router, key)
        # Each has to have counted the other.
        for router in routers * 2:
            await router.quotas.count()
        server.kill()
        away_s = time.monotonic()
        assert 6 <= await let_in(cluster, routers, key, 20) <= 6 + refilled(6, away_s)
        assert all(router.status().routers_together == "degraded" for router in routers)
        server.start()
        await until(lambda: all(r.status().routers_together == "ok" for r in routers), 30)
        # What was let in meanwhile is counted: more than six, of which one is back every ten seconds.
        await until(lambda: all(router.quotas.is_told for router in routers))
        late = await let_in(cluster, routers, key, 20)
        assert late <= max(0.0, refilled(6, begun_s) - 2) + 1
    finally:
        await cluster.close()


@pytest.fixture
def sharing(cluster: Cluster) -> Cluster:
    """A cluster whose routers share a secret."""
    cluster.secret = bytes(range(32))
    return cluster


async def test_a_conversation_goes_on_at_another_router(sharing: Cluster) -> None:
    mock = sharing.mock("w0")
    clients = [sharing.openai(await sharing.router(1)) for _ in range(2)]
    said: list[str] = []
    last: str | None = None
    for turn in range(6):
        client = clients[turn % 2]
        fields: Any = {"model": "mock", "input": f"{SAID} {turn}?", "previous_response_id": last}
        if turn % 3 == 2:
            events = [event async for event in await client.responses.create(**fields, stream=True)]
            response: Any = events[-1].response
        else:
            response = await client.responses.create(**fields)
        last = response.id
        said += [f"{SAID} {turn}?", response.output_text]
        assert (await clients[(turn + 1) % 2].responses.retrieve(response.id)) == response
    roles = ("user", "assistant")
    await clients[0].chat.completions.create(
        model="mock",
        messages=[{"role": roles[at % 2], "content": text} for at, text in enumerate(said[:-1])],  # type: ignore[misc]
    )
    *_, asked, same = mock.events("generate")
    assert asked["tokens"] == same["tokens"]


async def test_a_response_that_one_router_deletes_is_gone_at_all(sharing: Cluster) -> None:
    sharing.mock("w0")
    clients = [sharing.openai(await sharing.router(1)) for _ in range(2)]
    response = await clients[0].responses.create(model="mock", input=SAID)
    await clients[1].responses.delete(response.id)
    for client in clients:
        for _ in range(2):
            with pytest.raises(openai.NotFoundError, match="is not kept"):
                await client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError, match="is not kept"):
            await client.responses.create(
                model="mock", input="And?", previous_response_id=response.id
            )


async def test_another_tenants_response_is_none_at_any_router(sharing: Cluster, keys: Keys) -> None:
    sharing.mock("w0")
    routers = [await sharing.router(1, keys_file=keys.file) for _ in range(2)]
    mine, theirs = keys.make("acme"), keys.make("globex")
    response = await sharing.openai(routers[0], api_key=mine).responses.create(
        model="mock", input=SAID
    )
    told = set()
    for router in routers:
        again = await sharing.openai(router, api_key=mine).responses.retrieve(response.id)
        assert again == response
        for name in (response.id, "resp_" + "0" * 24):
            with pytest.raises(openai.NotFoundError) as refused:
                await sharing.openai(router, api_key=theirs).responses.retrieve(name)
            told.add(str(refused.value).replace(name, "ID"))
        with pytest.raises(openai.NotFoundError):
            await sharing.openai(router, api_key=theirs).responses.delete(response.id)
    assert len(told) == 1
    again = await sharing.openai(routers[1], api_key=mine).responses.retrieve(response.id)
    assert again == response


async def test_a_cluster_of_another_secret_has_shelves_of_its_own(
    sharing: Cluster, http: httpx.AsyncClient
) -> None:
    sharing.mock("w0")
    ours = await sharing.router(1)
    response = await sharing.openai(ours).responses.create(model="mock", input=SAID)
    told = await told_of(http, ours, response.id)
    # Also what the same cluster is after its secret was changed.
    sharing.secret = bytes(reversed(range(32)))
    theirs = await sharing.router(1)
    client = sharing.openai(theirs)
    for ask in (
        client.responses.retrieve(response.id),
        client.responses.delete(response.id),
        client.responses.create(model="mock", input="And?", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    assert (await http.get(f"{theirs.url}/admin/requests/{response.id}")).status_code == 404
    listed = (await http.get(f"{theirs.url}/admin/requests")).json()["requests"]
    assert listed == []
    other = await client.responses.create(model="mock", input=SAID)
    assert (await told_of(http, theirs, other.id))["request_id"] in other.id
    with pytest.raises(openai.NotFoundError):
        await sharing.openai(ours).responses.retrieve(other.id)
    assert await sharing.openai(ours).responses.retrieve(response.id) == response
    assert await told_of(http, ours, response.id) == told


async def test_redis_never_sees_what_was_said(sharing: Cluster, http: httpx.AsyncClient) -> None:
    sharing.mock("w0")
    router = await sharing.router(1)
    response = await sharing.openai(router).responses.create(model="mock", input=SAID)
    await told_of(http, await sharing.router(1), response.id)
    seen: list[bytes] = []
    client: Any
    with make_client(sharing.index.url, sharing.index) as client:
        for key in client.keys(f"{sharing.index.key_prefix}:*"):
            kind = client.type(key)
            if kind == b"hash":
                seen += [part for pair in client.hgetall(key).items() for part in pair]
            elif kind == b"zset":
                seen += client.zrange(key, 0, -1)
        everything = b"".join(seen)
    assert len([part for part in seen if len(part) > 400]) >= 2
    for word in (b"marzipan", REPLY[:12].encode(), b"/v1/responses"):
        assert word not in everything


async def test_what_a_router_kept_outlives_it(sharing: Cluster, http: httpx.AsyncClient) -> None:
    sharing.mock("w0")
    first = await sharing.router(1)
    response = await sharing.openai(first).responses.create(model="mock", input=SAID)
    await first.close()
    again = await sharing.router(1)
    client = sharing.openai(again)
    assert await client.responses.retrieve(response.id) == response
    later = await client.responses.create(
        model="mock", input="And?", previous_response_id=response.id
    )
    assert later.previous_response_id == response.id
    assert (await told_of(http, again, response.id))["path"] == "/v1/responses"


async def test_who_comes_to_a_router_that_has_just_started_is_answered(
    sharing: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing.mock("w0")
    await sharing.router(1)
    load = Tokenizer.load

    def slowly(folder: Path) -> Tokenizer:
        time.sleep(0.3)
        return load(folder)

    monkeypatch.setattr(Tokenizer, "load", slowly)
    router = await sharing.router(0)
    body = {"model": "mock", "prompt": SAID, "max_tokens": 1}
    assert (await http.post(f"{router.url}/v1/completions", json=body)).status_code == 200


async def test_any_router_explains_any_request(sharing: Cluster, http: httpx.AsyncClient) -> None:
    sharing.mock("w0")
    routers = [await sharing.router(1) for _ in range(2)]
    names = []
    for router in routers:
        answer = await http.post(
            f"{router.url}/v1/completions", json={"model": "mock", "prompt": SAID}
        )
        names.append(answer.headers["x-pie-request-id"])
    for router in routers:
        told = [await told_of(http, router, name) for name in names]
        assert [one["request_id"] for one in told] == names
        listed = (await http.get(f"{router.url}/admin/requests")).json()
        assert listed["requests"][:2] == names[::-1]
        unknown = await http.get(f"{router.url}/admin/requests/none")
        assert unknown.status_code == 404


async def told_of(http: httpx.AsyncClient, router: RouterService, name: str) -> Any:
    """Return what a router says of a request, once it knows of it."""
    end_s = time.monotonic() + WAIT_S
    while True:
        answer = await http.get(f"{router.url}/admin/requests/{name}")
        if answer.status_code == 200 or time.monotonic() > end_s:
            assert answer.status_code == 200
            return answer.json()


async def test_without_redis_each_router_knows_its_own(
    tmp_path: Path, chat_folder: Path, own_redis_server: EmbeddedServer, http: httpx.AsyncClient
) -> None:
    server = own_redis_server
    index = IndexSettings(url=server.url, key_prefix="p", request_timeout_s=1.0, poll_s=0.05)
    cluster = Cluster(tmp_path, chat_folder, index)
    cluster.secret = bytes(32)
    try:
        cluster.mock("w0")
        routers = [await cluster.router(1) for _ in range(2)]
        own, other = (cluster.openai(router) for router in routers)
        before = await own.responses.create(model="mock", input=SAID)
        gone = await own.responses.create(model="mock", input=SAID)
        await other.responses.delete(gone.id)
        server.kill()
        # What others may have deleted nobody shows, goes on after, or says to be deleted.
        for name in (gone.id, before.id):
            with pytest.raises(openai.APIStatusError, match="at present") as refused:
                await own.responses.create(model="mock", input=SAID, previous_response_id=name)
            assert refused.value.status_code == 503
            for _ in range(2):
                with pytest.raises(openai.APIStatusError, match="at present") as refused:
                    await own.responses.delete(name)
                assert refused.value.status_code == 503
        response = await own.responses.create(model="mock", input=SAID)
        later = await own.responses.create(
            model="mock", input=SAID, previous_response_id=response.id
        )
        assert await own.responses.retrieve(response.id) == response
        for client, name in ((own, gone.id), (own, before.id), (other, response.id)):
            with pytest.raises(openai.APIStatusError, match="at present") as refused:
                await client.responses.retrieve(name)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"]
        await own.responses.delete(later.id)
        with pytest.raises(openai.APIStatusError, match="at present"):
            await own.responses.retrieve(later.id)
        assert (await http.get(f"{routers[1].url}/admin/requests/none")).status_code == 503
        server.start()
        await until(lambda: all(r.status().routers_together == "ok" for r in routers), 30)
        await own.responses.delete(before.id)
        for client in (own, other):
            for name in (gone.id, before.id, later.id):
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(name)
        assert await own.responses.retrieve(response.id) == response
        # What one router did without Redis is told when that is back.
        assert (await told_of(http, routers[1], response.id))["request_id"]
    finally:
        await cluster.close()


async def test_on_one_port_no_connection_matters(sharing: Cluster, keys: Keys) -> None:
    sharing.mock("w0")
    one = await sharing.router(0, keys_file=keys.file, routers=2)
    port = urlsplit(one.url).port
    other = await sharing.router(0, keys_file=keys.file, routers=2, port=port)
    for router in (one, other):
        await sharing.workers(router, 1)
    key = keys.make("acme", requests_per_minute=15, is_admin=True)
    last, let_in, used = None, 0, set[str]()
    begun_s = time.monotonic()
    for _ in range(30):
        async with httpx.AsyncClient(timeout=30, headers=bearer(key)) as client:
            body = {
                "model": "mock",
                "input": SAID,
                "previous_response_id": last,
                "max_output_tokens": 2,
            }
            answer = await client.post(f"{one.url}/v1/responses", json=body)
        if answer.status_code == 429:
            break
        assert answer.status_code == 200
        last, let_in = answer.json()["id"], let_in + 1
        used |= {
            str(at) for at, r in enumerate((one, other)) if r.metrics.total(r.metrics.requests)
        }
    assert used == {"0", "1"}
    assert 15 <= let_in <= 15 + refilled(15, begun_s)
    async with httpx.AsyncClient(timeout=30, headers=bearer(key)) as client:
        assert last is not None
        assert await told_of(client, one, last)
