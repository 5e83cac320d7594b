"""Completions that begin with their prompts, and what is told of the prompts' tokens."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from pie.router.api.scoring import PromptLogprob, prompt_logprobs
from pie.wire.messages import PositionLogprobs, TokenLogprob
from tests.router.conftest import Cluster

PROMPTS = ["The cat — naïve 😀 — sat", "on"]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncOpenAI:
    cluster.mock("w0")
    return cluster.openai(await cluster.router(1))


async def test_each_choice_begins_with_its_prompt(client: AsyncOpenAI, cluster: Cluster) -> None:
    asked: dict[str, Any] = {"model": "mock", "max_tokens": 3, "n": 2}
    plain = await client.completions.create(prompt=PROMPTS, **asked)
    echoed = await client.completions.create(prompt=PROMPTS, echo=True, **asked)
    assert [choice.text for choice in echoed.choices] == [
        PROMPTS[choice.index // 2] + choice.text for choice in plain.choices
    ]
    assert echoed.usage
    assert plain.usage
    assert echoed.usage.total_tokens == plain.usage.total_tokens
    ids = cluster.tokenizer(cluster.mocks[0]).encode(PROMPTS[0])
    of_ids = await client.completions.create(model="mock", max_tokens=3, prompt=ids, echo=True)
    assert of_ids.choices[0].text == echoed.choices[0].text
    texts = ["", "", "", ""]
    async for event in await client.completions.create(
        prompt=PROMPTS, echo=True, stream=True, **asked
    ):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in echoed.choices]


async def test_log_probabilities_of_the_prompt_come_before_the_answers(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    answer = await client.completions.create(
        model="mock", prompt=PROMPTS, max_tokens=3, n=2, echo=True, logprobs=1
    )
    ids = [cluster.tokenizer(cluster.mocks[0]).encode(prompt) for prompt in PROMPTS]
    for choice in answer.choices:
        told, prompt = choice.logprobs, ids[choice.index // 2]
        assert told is not None
        assert told.token_logprobs is not None
        assert told.text_offset is not None
        assert told.tokens is not None
        count = len(prompt)
        assert told.token_logprobs[:count] == [None, *(-float(at) for at in range(1, count))]
        assert told.token_logprobs[count:] == [-0.25] * 3
        assert told.text_offset[0] == 0
        assert told.text_offset == sorted(told.text_offset)
        assert told.text_offset[count] == len(PROMPTS[choice.index // 2])
        assert len(told.tokens) == len(told.text_offset) == count + 3
    wanted = [event["prompt_logprobs"] for event in cluster.mocks[0].events("generate")]
    assert sorted(wanted, key=str) == [1, 1, None, None]


async def test_an_echo_is_of_the_tokens_that_are_kept(
    client: AsyncOpenAI, cluster: Cluster
) -> None:
    tokenizer = cluster.tokenizer(cluster.mocks[0])
    ids = tokenizer.encode(PROMPTS[0])
    asked: dict[str, Any] = {"model": "mock", "max_tokens": 2, "echo": True, "logprobs": 0}
    # All cuts, some of them within a character, and none.
    for keep in range(1, len(ids) + 2):
        kept = ids[-keep:]
        text = b"".join(map(tokenizer.token_bytes, kept)).decode(errors="replace")
        for prompt in (PROMPTS[0], ids):
            answer = await client.completions.create(
                prompt=prompt, extra_body={"truncate_prompt_tokens": keep}, **asked
            )
            (choice,) = answer.choices
            assert choice.text.startswith(text)
            told = choice.logprobs
            assert told
            assert told.tokens
            assert told.text_offset
            assert len(told.tokens) == len(kept) + 2
            assert told.text_offset[len(kept)] == len(text)
            for token, offset in zip(told.tokens, told.text_offset, strict=True):
                assert choice.text.startswith(token, offset) or token.startswith("bytes:")


@pytest.mark.parametrize("more", [{"stream": True}, {"best_of": 2}])
async def test_what_cannot_be_told_is_refused(client: AsyncOpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="echo: with logprobs neither") as refused:
        await client.completions.create(model="mock", prompt="a", echo=True, logprobs=1, **more)
    assert refused.value.param == "echo"


async def ask(cluster: Cluster, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as http:
        url = f"{cluster.routers[0].url}/v1/{path}"
        return await http.post(url, json={"model": "mock", **body})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_may_be_echoed(
    client: AsyncOpenAI, cluster: Cluster, stream: bool
) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS[0], "echo": True, "max_tokens": 0}
    if stream:
        text, finish, usage = "", None, None
        async for event in await client.completions.create(
            model="mock", stream=True, stream_options={"include_usage": True}, **asked
        ):
            for choice in event.choices:
                text += choice.text
                finish = choice.finish_reason or finish
            usage = event.usage
        assert (text, finish) == (PROMPTS[0], "length")
        assert usage
        assert usage.completion_tokens == 0
        return
    answer = await client.completions.create(model="mock", logprobs=2, **asked)
    (choice,), ids = answer.choices, cluster.tokenizer(cluster.mocks[0]).encode(PROMPTS[0])
    assert (choice.text, choice.finish_reason) == (PROMPTS[0], "length")
    assert choice.logprobs
    assert choice.logprobs.token_logprobs == [None, *(-float(at) for at in range(1, len(ids)))]
    assert answer.usage
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(ids))


@pytest.mark.usefixtures("client")
async def test_what_a_prompts_tokens_cost_is_told_in_vllms_shape(cluster: Cluster) -> None:
    tokenizer = cluster.tokenizer(cluster.mocks[0])
    ids = tokenizer.encode(PROMPTS[0])
    expected = [
        None,
        *(
            {
                str(token): {
                    "logprob": -float(at),
                    "rank": None,
                    "decoded_token": tokenizer.token_bytes(token).decode(errors="replace"),
                }
            }
            for at, token in enumerate(ids[1:], start=1)
        ),
    ]
    answer = (
        await ask(cluster, "completions", prompt=PROMPTS, max_tokens=2, n=2, prompt_logprobs=1)
    ).json()
    assert [choice["prompt_logprobs"] == expected for choice in answer["choices"]] == [
        *[True] * 2,
        *[False] * 2,
    ]
    assert answer["choices"][0]["logprobs"] is None
    alone = (await ask(cluster, "completions", prompt=ids, max_tokens=0, prompt_logprobs=0)).json()
    assert alone["choices"][0]["prompt_logprobs"] == expected
    assert alone["choices"][0]["text"] == ""
    assert alone["usage"]["completion_tokens"] == 0
    messages = [{"role": "user", "content": "Hi"}]
    chat = (await ask(cluster, "chat/completions", messages=messages, prompt_logprobs=1)).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    plain = (await ask(cluster, "chat/completions", messages=messages)).json()
    assert "prompt_logprobs" not in plain


def test_ranks_are_those_among_the_likeliest() -> None:
    chosen, other = TokenLogprob(7, b"seven", -2.0), TokenLogprob(8, b"\xff", -math.inf)
    best = TokenLogprob(9, b"nine", -0.5)
    positions = [
        PositionLogprobs(chosen, (best, chosen, other)),
        PositionLogprobs(other, (best, chosen)),
    ]
    first, second = prompt_logprobs(positions, 2)[1:]
    assert first == {"9": PromptLogprob(-0.5, 1, "nine"), "7": PromptLogprob(-2.0, 2, "seven")}
    assert second is not None
    assert second["8"] == PromptLogprob(-9999.0, None, "\ufffd")
    assert list(second) == ["9", "7", "8"]
    assert prompt_logprobs(positions, 0)[1] == {"7": PromptLogprob(-2.0, None, "seven")}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        ("completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt": "a", "prompt_logprobs": 1, "best_of": 2}, "prompt_logprobs"),
        ("chat/completions", {"messages": [], "max_tokens": 0}, "max_tokens"),
        ("responses", {"input": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
@pytest.mark.usefixtures("client")
async def test_what_makes_no_sense_of_a_prompt_is_refused(
    cluster: Cluster, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await ask(cluster, path, **body)
    assert answer.status_code == 400
    assert param in answer.json()["error"]["message"]
