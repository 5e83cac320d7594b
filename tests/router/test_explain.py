"""A request can be asked afterwards where it went and why: through HTTP, with real mirrors."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI
from pydantic import SecretStr

from pie.router import explain
from pie.router.api.explained import Explained
from pie.router.service import RouterService
from pie.wire.messages import MissReason
from tests.router.conftest import Cluster, until
from tests.router.test_tries import InOrder

pytestmark = pytest.mark.live
SECRET_WORDS = "the passphrase is xylophone marzipan"
LONG = SECRET_WORDS + " and again" * 60


def asked(text: str = LONG, **more: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": text}], **more}


async def answered(client: AsyncOpenAI, **body: Any) -> str:
    raw = await client.chat.completions.with_raw_response.create(**body)
    return str(raw.headers["x-pie-request-id"])


async def explained(http: httpx.AsyncClient, router: RouterService, request_id: str) -> Explained:
    answer = await http.get(f"{router.url}/admin/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Explained, strict=True)


def told(record: Explained) -> list[tuple[MissReason, int]]:
    delivered = record.sequences[0].delivered
    assert delivered is not None
    return [(miss.reason, miss.tokens) for miss in delivered.misses]


async def test_a_cold_and_a_warm_request_say_what_was_computed_and_why(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    client = cluster.openai(router)
    cold = await explained(http, router, await answered(client, **asked()))
    [sequence] = cold.sequences
    full = sequence.prompt_tokens // 16 * 16
    assert told(cold) == [
        (MissReason.NEVER_COMPUTED, full),
        (MissReason.PARTIAL_PAGE, sequence.prompt_tokens - full),
    ]
    [attempt] = sequence.attempts
    assert (attempt.place, attempt.ending, attempt.predicted_tokens) == ("w0", "done", 0)
    assert (attempt.policy, attempt.policy_failure) == ("cost", "")
    [candidate] = attempt.candidates
    assert candidate.cost is not None
    assert candidate.cost.prefill_ms > 0
    assert (cold.status, cold.path) == (200, "/v1/chat/completions")
    warm = await explained(http, router, await answered(client, **asked()))
    assert warm.sequences[0].delivered is not None
    assert warm.sequences[0].delivered.cached_tokens == {"device": full}
    assert warm.sequences[0].attempts[0].predicted_tokens == full
    assert told(warm) == [(MissReason.PARTIAL_PAGE, sequence.prompt_tokens - full)]


async def test_a_request_that_lost_its_worker_tells_of_both(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0", token_delay_s=0.01, die_after_tokens=5)
    cluster.mock("w1")
    router = await cluster.router(2, routing=InOrder("w0", "w1"))
    record = await explained(http, router, await answered(cluster.openai(router), **asked()))
    first, second = record.sequences[0].attempts
    assert (first.ending, second.ending) == ("gone", "done")
    assert second.place == "w1"
    assert second.after_tokens > 0


async def test_a_second_tenant_misses_because_it_is_another(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    client = cluster.openai(router)
    for salt, reason in (
        ("first", MissReason.NEVER_COMPUTED),
        ("second", MissReason.TENANT),
        (None, MissReason.TENANT),
        ("third", MissReason.TENANT),
    ):
        extra: dict[str, Any] = {} if salt is None else {"extra_body": {"cache_salt": salt}}
        record = await explained(http, router, await answered(client, **asked(**extra)))
        assert told(record)[0][0] is reason
        assert bool(record.tenant_tag) is (salt is not None)
    # Not for more pages than that: the names that they have without a salt are made for it alone.
    monkeypatch.setattr(explain, "_MOST_PAGES", 2)
    extra = {"prompt": [[*range(5, 90)], [*range(6, 91)]], "max_tokens": 1}
    names = []
    for salt in ("first", "second"):
        answer = await client.completions.with_raw_response.create(
            model="mock", extra_body={"cache_salt": salt}, **extra
        )
        names.append(answer.headers["x-pie-request-id"])
    record = await explained(http, router, names[-1])
    by_tenant = [
        sum(miss.tokens for miss in one.delivered.misses if miss.reason is MissReason.TENANT)
        for one in record.sequences
        if one.delivered is not None
    ]
    assert by_tenant == [32, 0]


async def test_nothing_of_a_text_or_a_salt_is_kept(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    request_id = await answered(
        cluster.openai(router),
        **asked(user="someone@example.org", extra_body={"cache_salt": "saltsaltsalt"}),
    )
    text = (await http.get(f"{router.url}/admin/requests/{request_id}")).text
    for words in ("passphrase", "xylophone", "brown fox", "saltsaltsalt", "someone"):
        assert words not in text


async def test_an_answers_own_id_finds_it_and_the_list_names_it_first(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    client = cluster.openai(router)
    answer = await client.chat.completions.create(**asked())
    record = await explained(http, router, answer.id)
    assert answer.id == f"chatcmpl-{record.request_id}"
    listed = (await http.get(f"{router.url}/admin/requests")).json()
    assert listed["requests"][0] == record.request_id


async def test_an_unknown_request_is_a_404_with_a_sentence(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    router = await cluster.router(0)
    answer = await http.get(f"{router.url}/admin/requests/nothing")
    assert answer.status_code == 404
    assert "router.explained_requests" in answer.json()["error"]["message"]


async def test_admin_needs_the_token(cluster: Cluster, http: httpx.AsyncClient) -> None:
    router = await cluster.router(0, api_token=SecretStr("secret"))
    for path in ("/admin/requests", "/admin/requests/x"):
        assert (await http.get(router.url + path)).status_code == 401
        allowed = await http.get(router.url + path, headers={"authorization": "Bearer secret"})
        assert allowed.status_code in (200, 404)


async def test_every_answer_names_its_request(cluster: Cluster, http: httpx.AsyncClient) -> None:
    router = await cluster.router(0)
    bad = await http.post(f"{router.url}/v1/chat/completions", content=b"{")
    good = await http.get(f"{router.url}/health")
    names = {answer.headers["x-pie-request-id"] for answer in (bad, good)}
    assert len(names) == 2


async def test_a_client_that_hung_up_is_told_of_too(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0", token_delay_s=3600)
    router = await cluster.router(1)
    client = cluster.openai(router)
    stream = await client.chat.completions.create(**asked(), stream=True)
    await anext(aiter(stream))
    await stream.close()
    names: list[str] = []

    async def named() -> None:
        names[:] = (await http.get(f"{router.url}/admin/requests")).json()["requests"]

    await named()
    await until(lambda: router.status().in_flight == 0)
    await named()
    record = await explained(http, router, names[0])
    assert record.status == 499
    assert record.sequences[0].attempts[0].ending == "cancelled"
