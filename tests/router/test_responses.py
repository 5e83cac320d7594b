"""`/v1/responses` through OpenAI's client: text, streams, tools, and going on after a response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pie.index.errors import IndexNotAskedError, IndexUnavailableError
from pie.index.shelf import MemoryShelf, ShelfLimits
from pie.router.errors import ApiError
from pie.router.responding import Kept, ResponseStore
from pie.router.service import RouterService
from tests.router.conftest import Cluster
from tests.router.test_access import Keys
from tests.support.chat_folder import write_chat_folder
from tests.support.mock_worker import REPLY
from tests.tokens.chat import TEMPLATES

CALLS = """Let me look.
<tool_call>
{"name": "weather", "arguments": {"city": "Bergen"}}
</tool_call>"""
TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
ASK = "Why is the sky blue?"


async def test_a_response_is_text_with_usage_and_can_be_read_again_until_it_is_deleted(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    client = cluster.openai(router)
    response = await client.responses.create(
        model="mock", input=ASK, instructions="Be kind.", metadata={"for": "a test"}
    )
    assert response.output_text == REPLY
    assert (response.status, response.metadata) == ("completed", {"for": "a test"})
    assert response.usage
    assert response.usage.output_tokens > 5
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    again = await client.responses.retrieve(response.id)
    assert again == response
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="is not kept"):
        await client.responses.retrieve(response.id)
    explained = await http.get(f"{router.url}/admin/requests/{response.id}")
    assert explained.status_code == 200
    assert (await http.get(f"{router.url}/status")).json()["requests"] == 1
    short = await client.responses.create(model="mock", input=ASK, max_output_tokens=3, store=False)
    assert short.status == "incomplete"
    assert short.incomplete_details
    assert short.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(short.id)


async def test_a_stream_says_all_that_the_response_says(cluster: Cluster) -> None:
    cluster.mock("w0", token_delay_s=0.001)
    router = await cluster.router(1)
    client = cluster.openai(router)
    events = [
        event async for event in await client.responses.create(model="mock", input=ASK, stream=True)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == REPLY
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == REPLY
    assert last.response.usage
    assert await client.responses.retrieve(last.response.id) == last.response


async def test_the_next_response_goes_on_where_the_last_one_ended(cluster: Cluster) -> None:
    mock = cluster.mock("w0")
    router = await cluster.router(1)
    client = cluster.openai(router)
    first = await client.responses.create(model="mock", input=ASK * 20, instructions="Once.")
    second = await client.responses.create(
        model="mock", input="And at night?", previous_response_id=first.id, max_output_tokens=4
    )
    chat = await client.chat.completions.create(
        model="mock",
        messages=[
            {"role": "user", "content": ASK * 20},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And at night?"},
        ],
        max_tokens=4,
    )
    asked, said = mock.events("generate")[-2:]
    assert asked["tokens"] == said["tokens"]
    assert chat.choices[0].message.content == second.output_text
    third = await client.responses.create(
        model="mock", input="Why?", previous_response_id=second.id, max_output_tokens=4
    )
    assert third.usage
    assert second.usage
    # Without instructions the second began otherwise than the first; the third goes on after it.
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens // 16 * 16
    assert third.previous_response_id == second.id


async def session_of(http: httpx.AsyncClient, router: RouterService, response: Any) -> str:
    told = await http.get(f"{router.url}/admin/requests/{response.id}")
    return str(told.json()["session_tag"])


async def test_a_first_response_is_of_the_session_of_those_that_go_on_after_it(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    client, known = cluster.openai(router), router._chooser.conversations
    first = await client.responses.create(model="mock", input=ASK, max_output_tokens=4)
    assert len(known) == 1
    name, tags = first.id, [await session_of(http, router, first)]
    for fields in ({}, {"user": ""}, {"store": False}):
        following = await client.responses.create(
            model="mock", input="Why?", previous_response_id=name, extra_body=fields
        )
        tags.append(await session_of(http, router, following))
        assert len(known) == 1
    assert tags[0]
    assert len(set(tags)) == 1
    # Another one is another conversation; what nobody can go on after is none.
    other = await client.responses.create(model="mock", input=ASK)
    assert await session_of(http, router, other) not in ("", tags[0])
    assert len(known) == 2
    alone = await client.responses.create(model="mock", input=ASK, store=False)
    assert await session_of(http, router, alone) == ""
    assert len(known) == 2

    # One that names its session is that one's, and so are those after it.
    for field in ("session_id", "prompt_cache_key", "user"):
        named = {field: "mine"}
        first = await client.responses.create(model="mock", input=ASK, extra_body=named)
        second = await client.responses.create(
            model="mock", input=ASK, previous_response_id=first.id
        )
        chat = await client.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": ASK}], extra_body=named
        )
        found = {await session_of(http, router, one) for one in (first, second, chat)}
        assert len(found - {*tags, ""}) == 1
    assert len(known) == 3
    keeps_none = await cluster.router(1, responses_bytes=0)
    response = await cluster.openai(keeps_none).responses.create(model="mock", input=ASK)
    assert await session_of(http, keeps_none, response) == ""


async def test_a_response_that_fails_leaves_no_conversation(cluster: Cluster) -> None:
    cluster.mock("w0", fail_after_tokens=2)
    router = await cluster.router(1)
    client, known = cluster.openai(router), router._chooser.conversations
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model="mock", input=ASK)
    assert len(known) == 0
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model="mock", input=ASK, user="me")
    assert len(known) == 1


async def test_what_chats_take_responses_take_as_well(cluster: Cluster) -> None:
    mock = cluster.mock("w0")
    client = cluster.openai(await cluster.router(1))
    taken: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "user": "me",
        "cache_salt": "s" * 16,
        "prompt_cache_key": "k",
        "session_id": "mine",
        "service_tier": "auto",
        "priority": 3,
        "top_k": 5,
        "min_p": 0.1,
        "bad_words": ["lazy"],
        "logit_bias": {"5": 1},
        "parallel_tool_calls": True,
        "top_logprobs": 0,
        "n": 1,
    }
    for fields in (taken, *({name: value} for name, value in taken.items())):
        body = {"model": "mock", "input": ASK, "max_output_tokens": 2} | fields
        answer: Any = await client.post("/responses", body=body, cast_to=object)
        assert answer["status"] == "incomplete", fields
    first = mock.events("generate")[0]
    assert (first["seed"], first["salt"], first["priority"]) == (7, "s" * 16, 3)


async def test_a_response_is_its_tenants_alone(cluster: Cluster, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    cluster.mock("w0")
    router = await cluster.router(1, keys_file=keys.file)
    one, two = (cluster.openai(router, api_key=keys.make(name)) for name in ("one", "two"))
    response = await one.responses.create(model="mock", input=ASK)
    with pytest.raises(openai.NotFoundError):
        await two.responses.create(model="mock", input="?", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError):
        await two.responses.retrieve(response.id)
    await one.responses.create(model="mock", input="?", previous_response_id=response.id)


async def test_calls_are_items_and_their_results_go_on(cluster: Cluster, tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "qwen")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATES["qwen3"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    mock = cluster.mock("w0", reply=f"<think>\nHm.\n</think>\n\n{CALLS}", tokenizer=str(folder))
    client = cluster.openai(await cluster.router(1))
    asked: dict[str, Any] = {"model": "mock", "input": ASK, "tools": TOOLS}
    response = await client.responses.create(**asked)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    thought, message, call = response.output
    assert thought.content[0].text.strip() == "Hm."
    assert message.content[0].text.strip() == "Let me look."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bergen"})
    streamed = ""
    async with client.responses.stream(**asked) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                streamed += event.delta
        final = await stream.get_final_response()
    assert json.loads(streamed) == {"city": "Bergen"}
    assert [item.type for item in final.output] == [item.type for item in response.output]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    await client.responses.create(
        model="mock", input=[result], previous_response_id=response.id, tools=TOOLS
    )
    sent: Any = mock.events("generate")[-1]["tokens"]
    text = cluster.tokenizer(mock).decode(sent, skip_special_tokens=False)
    assert '{"name": "weather", "arguments": {"city": "Bergen"}}' in text
    assert "It rains." in text
    # The same, with all items in the input.
    items: list[Any] = [item.to_dict() for item in response.output]
    await client.responses.create(
        model="mock", input=[{"role": "user", "content": ASK}, *items, result], tools=TOOLS
    )
    before, now = mock.events("generate")[-2:]
    assert now["tokens"] == before["tokens"]


async def test_what_is_wrong_is_told_in_a_responses_words(cluster: Cluster) -> None:
    cluster.mock("w0", context_tokens=256)
    router = await cluster.router(1)
    client = cluster.openai(router)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "image"}]}, "input[0]"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "temperature": "hot"}, "temperature"),
        ({"input": "a", "seed": 2**70}, "seed"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "best_of": 2}, "best_of"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "colour": 1}, "colour"),
        ({"input": "a" * 5000}, "input"),
        ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": 7}}},
            "text.format.schema",
        ),
        ({"input": "a", "text": {"format": {"type": "json_object", "a": 1}}}, "text.format.a"),
    )
    for body, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body={"model": "mock"} | body, cast_to=object)
        assert refused.value.param == param, refused.value
        assert param in refused.value.message
        assert "unknown field" not in refused.value.message or param in (
            "messages",
            "colour",
            "text.format.a",
        )
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="mock", input="a", previous_response_id="resp_none")
    assert unknown.value.code == "previous_response_not_found"


async def test_what_is_kept_is_bounded_and_forgotten_when_asked() -> None:
    shelf = MemoryShelf(ShelfLimits(99, 2_000, 60, by_use=True))
    store = ResponseStore(shelf, None, secret=bytes(32), retry_after_s=1)
    for number in range(5):
        await store.put("", str(number), Kept(b"r" * 100, b"m" * 100, "s"))
    assert (await store.get("", "4", "x")).session == "s"
    with pytest.raises(ApiError, match="is not kept"):
        await store.get("", "0", "x")
    with pytest.raises(ApiError, match="is not kept"):
        await store.get("another", "4", "x")
    await store.put("", "big", Kept(b"r" * 3_000, b"", "s"))
    await store.drop("", "4")
    for _ in range(2):
        with pytest.raises(ApiError, match="is not kept"):
            await store.drop("", "4")
    shelf.check()


KEPT = Kept(b"{}", b"[]", "s")


class Far(MemoryShelf):
    """What routers share, in this process, which can go away."""

    def __init__(self, budget_bytes: int = 20_000) -> None:
        super().__init__(ShelfLimits(99, budget_bytes, 3600, by_use=True))
        self.away: type[IndexUnavailableError] | None = None
        self.loses_answers = False

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        if self.away:
            raise self.away("Redis: away")
        await super().put(values)
        if self.loses_answers:
            raise IndexUnavailableError("Redis: no answer")

    async def get(self, name: str) -> bytes | None:
        if self.away:
            raise self.away("Redis: away")
        return await super().get(name)

    def lose_all(self) -> None:
        for name in list(self._kept):
            self.drop_now(name)


def router_beside(far: Far) -> ResponseStore:
    near = MemoryShelf(ShelfLimits(99, 50_000, 3600, by_use=True))
    return ResponseStore(near, far, secret=bytes(32), retry_after_s=1)


async def status(store: ResponseStore, name: str) -> int:
    try:
        await store.get("t", name, "x")
    except ApiError as error:
        return error.status
    return 200


async def deleted(store: ResponseStore, name: str) -> int:
    try:
        await store.drop("t", name)
    except ApiError as error:
        return error.status
    return 200


async def test_what_another_router_deleted_never_comes_back() -> None:
    far = Far()
    a, b = router_beside(far), router_beside(far)
    for name in ("evicted", "away", "lost"):
        await a.put("t", name, KEPT)
        assert await status(b, name) == 200
        assert await deleted(b, name) == 200
        if name == "evicted":
            for number in range(200):
                await b.put("t", f"later {number}", KEPT)
        elif name == "away":
            for far.away in (IndexUnavailableError, IndexNotAskedError):
                assert await status(a, name) == 503
            far.away = None
        else:
            far.lose_all()
        assert await status(a, name) == 404
        assert await deleted(a, name) == 404


async def test_one_that_may_have_come_to_all_is_not_one_routers_own() -> None:
    far = Far()
    a, b = router_beside(far), router_beside(far)
    far.loses_answers = True
    await a.put("t", "r", KEPT)
    far.loses_answers = False
    assert await status(a, "r") == await status(b, "r") == 200
    await b.drop("t", "r")
    far.lose_all()
    assert await status(a, "r") == 404


async def test_what_was_made_while_redis_is_away_or_is_too_large_is_one_routers_own() -> None:
    far = Far()
    a, b = router_beside(far), router_beside(far)
    far.away = IndexNotAskedError
    await a.put("t", "made away", KEPT)
    far.away = None
    await a.put("t", "larger", Kept(b"r" * 15_000, b"r" * 5_000, "s"))
    for name in ("made away", "larger"):
        for far.away in (IndexNotAskedError, None):
            assert await status(a, name) == 200
            assert await status(b, name) == (503 if far.away else 404)
    far.away = IndexNotAskedError
    assert await deleted(a, "larger") == 200
    far.away = None
    assert await status(a, "larger") == 404


async def test_a_response_is_deleted_once_redis_knows() -> None:
    far = Far()
    a, b = router_beside(far), router_beside(far)
    await a.put("t", "r", KEPT)
    far.away = IndexNotAskedError
    assert [await deleted(one, "r") for one in (a, a, b)] == [503, 503, 503]
    far.away = None
    assert [await status(one, "r") for one in (a, b)] == [200, 200]
    assert await deleted(a, "r") == 200
    assert [await status(one, "r") for one in (a, b)] == [404, 404]
