"""OpenAI's own client against the router: shapes, usage, streams, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import SecretStr

from pie.router.settings import RouterSettings
from tests.router.conftest import Cluster
from tests.support.mock_worker import REPLY

pytestmark = pytest.mark.live
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncOpenAI:
    cluster.mock("w0")
    return cluster.openai(await cluster.router(1))


async def collected(stream: AsyncIterator[ChatCompletionChunk]) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in stream]


async def test_a_chat_is_answered(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="mock", messages=HELLO)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content == REPLY
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_chat_streams(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="mock", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = await collected(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == REPLY
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finishes[-1] == "stop"
    assert not any(finishes[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_the_headers_say_who_answered(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="mock", messages=HELLO)
    assert raw.headers["x-pie-worker"] == "w0"
    assert raw.headers["x-pie-request-id"]
    assert raw.headers["x-pie-cached-tokens"] == "0"
    assert raw.headers["x-pie-cached-from"] == ""
    messages: Any = [{"role": "user", "content": "hello to all of you " * 9}]
    for _ in range(2):
        raw = await client.chat.completions.with_raw_response.create(
            model="mock", messages=messages
        )
    cached = raw.headers["x-pie-cached-tokens"]
    assert int(cached) > 0
    assert raw.headers["x-pie-cached-from"] == f"device={cached}"


async def test_turns_two_and_three_hit_what_came_before(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me about foxes, please. " * 10}]
    before = 0
    for turn in range(3):
        answer = await client.chat.completions.create(model="mock", messages=messages)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        if turn:
            # All full pages of the last prompt and its answer.
            assert cached >= (before // 16) * 16
        before = answer.usage.total_tokens - 1
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "And then?"},
        ]


async def test_several_choices_are_told_apart(client: AsyncOpenAI, cluster: Cluster) -> None:
    answer = await client.chat.completions.create(model="mock", messages=HELLO, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens % 3 == 0
    seeds = [event["seed"] for event in cluster.mocks[0].events("generate")]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


async def test_choices_are_forks_of_the_first_at_the_same_worker(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    await client.chat.completions.create(model="mock", messages=HELLO, n=3)
    asked = [mock.events("generate") for mock in cluster.mocks]
    [(first, *others)] = [events for events in asked if events]
    assert first["fork_of"] is None
    assert [event["fork_of"] for event in others] == [first["request"]] * 2


async def test_best_of_answers_the_likeliest_and_counts_all_that_was_made(
    client: AsyncOpenAI,
) -> None:
    asked: Any = {"model": "mock", "prompt": ["one", "two"], "max_tokens": 4}
    answer = await client.completions.create(**asked, n=2, best_of=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 3 * 4


async def test_several_choices_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="mock", messages=HELLO, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
    assert texts == [REPLY, REPLY]


async def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="mock", messages=HELLO, stop=["fox", "zebra"]
    )
    assert answer.choices[0].message.content == REPLY[: REPLY.index("fox")]
    assert answer.choices[0].finish_reason == "stop"


async def test_max_tokens_bounds_the_answer(client: AsyncOpenAI) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        options: Any = {field: 3}
        answer = await client.chat.completions.create(model="mock", messages=HELLO, **options)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


async def test_chat_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="mock", messages=HELLO, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    spelled = bytes(byte for token in logprobs.content for byte in token.bytes or [])
    assert spelled.decode() == REPLY
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)
    assert logprobs.content[0].logprob == -0.25


async def test_chat_logprobs_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="mock", messages=HELLO, logprobs=True, stream=True, max_tokens=5
    )
    tokens = [
        token
        for chunk in await collected(stream)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert len(tokens) == 5
    assert tokens[0].top_logprobs == []


async def test_a_text_is_completed(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="mock", prompt="Once", max_tokens=4)
    assert answer.object == "text_completion"
    assert REPLY.startswith(answer.choices[0].text)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_sixteen_tokens_are_a_completions_default(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="mock", prompt="Once")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", [["a", "b"], [5, 6, 7], [[5, 6], [7]]])
async def test_every_spelling_of_a_prompt(client: AsyncOpenAI, prompt: Any) -> None:
    answer = await client.completions.create(model="mock", prompt=prompt, n=2)
    prompts = len(prompt) if not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in answer.choices] == list(range(2 * prompts))
    assert answer.usage is not None
    # A prompt counts once, whatever its choices.
    assert answer.usage.prompt_tokens == (3 if isinstance(prompt[-1], int | list) else 2)


async def test_completion_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="mock", prompt="Once", logprobs=2, max_tokens=40)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == 40
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert answer.choices[0].text[offset:].startswith(token)


async def test_a_completion_streams(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="mock", prompt=["a", "b"], stream=True, max_tokens=300
    )
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [REPLY, REPLY]


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    page = await client.models.list()
    assert [model.id for model in page.data] == ["mock"]
    assert (await client.models.retrieve("mock")).id == "mock"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_a_prompt_longer_than_the_context(client: AsyncOpenAI) -> None:
    for text in ("word " * 9000, "word " * 2_000_000):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": text}]
            )
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="mock", prompt=[5] * 9000)
    assert caught.value.code == "context_length_exceeded"


async def test_more_tokens_than_the_context_has_room_for(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="mock", messages=HELLO, max_tokens=8192)
    assert caught.value.param == "max_tokens"


async def test_token_ids_outside_the_vocabulary(client: AsyncOpenAI) -> None:
    for prompt in ([-1], [10**9], [2**70]):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="mock", prompt=prompt)
        assert caught.value.param == "prompt"


async def test_one_request_can_be_directed_at_one_worker(cluster: Cluster) -> None:
    for place in ("w0", "w1", "w2"):
        cluster.mock(place)
    client = cluster.openai(await cluster.router(3))
    for place in ("w2", "w0", "w1", "w1"):
        raw = await client.chat.completions.with_raw_response.create(
            model="mock", messages=HELLO, extra_headers={"x-pie-place": place}
        )
        assert raw.headers["x-pie-worker"] == place
    with pytest.raises(openai.BadRequestError, match="w0, w1, w2"):
        await client.chat.completions.create(
            model="mock", messages=HELLO, extra_headers={"x-pie-place": "w9"}
        )


async def test_a_router_may_choose_workers_itself(cluster: Cluster) -> None:
    cluster.mock("w0")
    client = cluster.openai(await cluster.router(1, allow_place_header=False))
    for place in ("w0", "w9"):
        with pytest.raises(openai.BadRequestError, match="allow_place_header") as caught:
            await client.chat.completions.create(
                model="mock", messages=HELLO, extra_headers={"x-pie-place": place}
            )
        assert "w0" not in caught.value.message
        assert caught.value.param == "x-pie-place"
    assert (await client.chat.completions.create(model="mock", messages=HELLO)).choices


@pytest.mark.parametrize(
    ("host", "allowed", "takes"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("0.0.0.0", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_only_on_loopback_may_clients_choose_unless_that_is_set(
    host: str, allowed: bool | None, takes: bool
) -> None:
    settings = RouterSettings(host=host, api_token=SecretStr("secret"), allow_place_header=allowed)
    assert settings.takes_place_header is takes


async def test_a_salt_and_vllms_extras_reach_the_worker(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "cache_salt": "tenant",
        "session_id": "s",
        "ignore_eos": True,
    }
    answer = await client.chat.completions.create(
        model="mock", messages=HELLO, max_tokens=300, extra_body=extra
    )
    assert answer.choices[0].finish_reason == "length"
    assert cluster.mocks[0].events("generate")[-1]["salt"] == "tenant"


async def test_the_next_request_hits_only_under_its_own_salt(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the same words " * 20}]

    async def cached(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt else None
        answer = await client.chat.completions.create(
            model="mock", messages=messages, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached("a") == 0
    assert await cached("b") == 0
    assert await cached(None) == 0
    assert await cached("a") > 0


async def test_an_answer_that_a_stop_string_ended_is_hit_up_to_there(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me about foxes, please. " * 3}]
    first = await client.chat.completions.create(model="mock", messages=messages, stop="lazy")
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = await client.chat.completions.create(model="mock", messages=messages)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    stopped = 6
    assert cached >= (first.usage.total_tokens - stopped) // 16 * 16


async def test_more_sequences_than_ever_fit_is_no_matter_of_waiting(cluster: Cluster) -> None:
    cluster.mock("w0")
    client = cluster.openai(await cluster.router(1, max_in_flight=4))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="mock", prompt=["a"] * 3, n=2)
    assert caught.value.param == "n"


async def test_a_rare_spelling_of_an_answer_is_remembered(cluster: Cluster) -> None:
    # Token by token the mock spells its text with one id a byte, as no tokenizer would.
    cluster.mock("w0", spelled_by_bytes=True)
    client = cluster.openai(await cluster.router(1))
    messages: Any = [{"role": "user", "content": "Hello there. " * 5}]
    first = await client.chat.completions.create(model="mock", messages=messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = await client.chat.completions.create(model="mock", messages=messages)
    assert first.choices[0].message.content == REPLY
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= (first.usage.total_tokens - 1) // 16 * 16
