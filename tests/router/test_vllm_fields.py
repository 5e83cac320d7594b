"""`bad_words` and `truncate_prompt_tokens`, as vLLM's users know them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.router.conftest import Cluster

MESSAGES: Any = [{"role": "user", "content": "one two three " * 30}]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncOpenAI:
    cluster.mock("w0", context_tokens=300)
    return cluster.openai(await cluster.router(1))


async def test_a_prompt_is_cut_to_its_end(client: AsyncOpenAI, cluster: Cluster) -> None:
    def sent() -> Any:
        return cluster.mocks[0].events("generate")[-1]["tokens"]

    tokenizer = cluster.tokenizer(cluster.mocks[0])
    text = "one two three " * 200
    ids = tokenizer.encode(text, add_special_tokens=True)
    for prompt in (text, ids):
        for keep, left in ((7, 7), (-1, 299)):
            answer = await client.completions.create(
                model="mock",
                prompt=prompt,
                max_tokens=1,
                extra_body={"truncate_prompt_tokens": keep},
            )
            assert sent() == ids[-left:]
            assert answer.usage
            assert answer.usage.prompt_tokens == left
    await client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=1, extra_body={"truncate_prompt_tokens": 20}
    )
    short = sent()
    assert len(short) == 20
    assert tokenizer.decode(short).endswith("assistant\n")
    for keep in (0, -2, 400):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(
                model="mock", prompt=text, extra_body={"truncate_prompt_tokens": keep}
            )


async def test_bad_words_reach_the_worker_as_tokens(client: AsyncOpenAI, cluster: Cluster) -> None:
    tokenizer = cluster.tokenizer(cluster.mocks[0])
    await client.completions.create(
        model="mock", prompt="a", max_tokens=1, extra_body={"bad_words": ["cat", " sat"]}
    )
    sent = cluster.mocks[0].events("generate")[-1]["bad_words"]
    assert sent == [tokenizer.encode(text) for text in ("cat", " cat", "sat", " sat")]
    for wrong in (["a"] * 200, [""], "a", ["a" * 2000]):
        with pytest.raises(openai.BadRequestError, match="bad_words"):
            await client.completions.create(
                model="mock", prompt="a", extra_body={"bad_words": wrong}
            )
