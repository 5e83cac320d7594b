"""Completions that begin with their prompts, and what is told of the prompts' tokens."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

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


@pytest.mark.parametrize("more", [{"stream": True}, {"best_of": 2}])
async def test_what_cannot_be_told_is_refused(client: AsyncOpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="echo: with logprobs neither") as refused:
        await client.completions.create(model="mock", prompt="a", echo=True, logprobs=1, **more)
    assert refused.value.param == "echo"
