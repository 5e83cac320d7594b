"""`/tokenize` and `/detokenize` say what generating requests would send to workers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from pie.router import tokenizing
from pie.router.api import bulk
from pie.router.api.tokens import Tokenized
from pie.router.key_file import editing
from pie.tokens.tokenizer import Tokenizer
from tests.router.conftest import WAIT_S, Cluster

MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]


async def test_ids_are_those_that_a_worker_gets_and_their_text_comes_back(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = cluster.mock("w0")
    router = await cluster.router(1)

    async def post(path: str, **body: Any) -> Any:
        answer = await http.post(router.url + path, json=body)
        return answer.json() | {"status": answer.status_code}

    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "add_generation_prompt": False}),
        ("/v1/completions", {"prompt": "naïve <s> text"}),
    )
    for path, body in asked:
        await post(path, model="mock", max_tokens=1, **body)
        told = await post("/tokenize", **body)
        assert told["tokens"] == mock.events("generate")[-1]["tokens"]
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 8192)
        assert told["token_strs"] is None
        back = await post("/detokenize", tokens=told["tokens"])
        assert body.get("prompt", "Why is the sky blue?") in back["prompt"]
    spelled = await post("/tokenize", prompt="<s>hi", model="mock", return_token_strs=True)
    assert spelled["token_strs"][0] == "<s>"
    assert len(spelled["token_strs"]) == spelled["count"]
    seen: set[int] = set()
    spell = Tokenizer.token

    def watched(self: Tokenizer, id_: int) -> str | None:
        seen.add(threading.get_ident())
        return spell(self, id_)

    monkeypatch.setattr(Tokenizer, "token", watched)
    long = await post("/tokenize", prompt="a b " * 40_000, return_token_strs=True)
    # Beside the event loop, and in pieces that are put together without a seam.
    assert seen
    assert threading.get_ident() not in seen
    assert long["count"] == len(long["tokens"]) > long["max_model_len"]
    tokenizer = cluster.tokenizer(mock)
    assert long["token_strs"] == [spell(tokenizer, id_) or "" for id_ in long["tokens"]]
    assert set(long) == {*Tokenized.__struct_fields__, "status"}
    monkeypatch.setattr(tokenizing, "_MOST_TOLD", 1000)
    told = await post("/tokenize", prompt="a b " * 40_000)
    assert (told["status"], told["error"]["code"]) == (400, "too_large")
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "none"}, "model"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/v1/embeddings", {"model": "mock", "input": "a"}, "model"),
    ):
        wrong = await post(path, **body)
        assert 400 <= wrong["status"] < 500
        assert wrong["error"]["param"] == param


async def test_a_prompt_that_gets_no_thread_waits_no_longer_than_a_request_may_take(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1, request_timeout_s=0.5)
    free, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        free.wait(WAIT_S)

    held = [router._threads.submit(hold) for _ in range(2)]
    try:
        for _ in held:
            await asyncio.to_thread(begun.acquire)
        long = "a b " * 40_000
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
            ("/v1/completions", {"prompt": long}),
            ("/tokenize", {"prompt": long}),
            ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ):
            answer = await http.post(router.url + path, json={"model": "mock"} | body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout"), path
        assert router.status().in_flight == 0
    finally:
        free.set()


async def test_of_a_quota_tokenizing_takes_a_request_and_no_tokens(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    with editing(file) as edited:
        content = edited.content.with_tenant("acme", requests_per_minute=3, tokens_per_minute=1_000)
        edited.content, _, key = content.with_key("acme", is_admin=False, note="")
    cluster.mock("w0")
    router = await cluster.router(1, keys_file=file)
    long = "a b " * 40_000
    statuses = []
    for path, body in (
        ("/tokenize", {"prompt": long}),
        ("/detokenize", {"tokens": [1] * 5_000}),
        # A prompt that fits into a minute's tokens is let in, for none are owed.
        ("/v1/completions", {"prompt": "a b " * 100, "model": "mock", "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await http.post(
            router.url + path, json=body, headers={"authorization": f"Bearer {key}"}
        )
        statuses.append(answer.status_code)
    assert statuses == [200, 200, 200, 429, 429]


async def test_large_bodies_are_parsed_beside_the_event_loop(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    seen: list[bool] = []
    ours, scan = threading.get_ident(), bulk._scanned

    def watched(data: bytes) -> object:
        seen.append(threading.get_ident() == ours)
        return scan(data)

    monkeypatch.setattr(bulk, "_scanned", watched)
    long = "a b " * 100_000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/responses", {"input": [{"role": "nobody", "content": long}]}),
        ("/v1/responses", {"input": long}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ("/detokenize", {"tokens": [1] * 100_000}),
        ("/v1/embeddings", {"input": long}),
    ):
        seen.clear()
        await http.post(router.url + path, json={"model": "mock"} | body)
        assert set(seen) == {False}, path
        seen.clear()
        await http.post(router.url + path, json={"model": "mock", "input": "a b " * 10_000})
        assert set(seen) == {True}, path
