"""Long work is done tenant by tenant in turn, and what nobody wants any more is dropped."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from pie.router.errors import ApiError
from pie.router.turns import Turns
from tests.router.conftest import WAIT_S, Cluster, until


class Held:
    """Threads that do nothing until they are let go, and what was done in which order."""

    def __init__(self, threads: ThreadPoolExecutor, at_once: int, most: int) -> None:
        self.turns = Turns(threads, at_once=at_once, most_waiting=most)
        self.free = threading.Event()
        self.begun: list[str] = []
        self.tasks: list[asyncio.Task[str]] = []

    def ask(self, tenant: str, count: int = 1) -> list[asyncio.Task[str]]:
        def work() -> str:
            self.begun.append(tenant)
            assert self.free.wait(WAIT_S)
            return tenant

        tasks = [asyncio.create_task(self.turns.run(tenant, work)) for _ in range(count)]
        self.tasks += tasks
        return tasks

    async def all(self) -> list[str | BaseException]:
        self.free.set()
        return await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    helds: list[Held] = []
    executors: list[ThreadPoolExecutor] = []

    def make(at_once: int = 1, most: int = 1000) -> Held:
        executors.append(ThreadPoolExecutor(at_once))
        helds.append(Held(executors[-1], at_once, most))
        return helds[-1]

    yield make
    for held in helds:
        held.free.set()
    for executor in executors:
        executor.shutdown()


async def test_a_tenants_many_prompts_keep_others_from_none_of_their_turns(
    hold: Callable[..., Held],
) -> None:
    held = hold()
    held.ask("a", 30)
    await until(lambda: held.begun == ["a"])
    held.ask("b", 2)
    held.ask("c", 1)
    assert await held.all() == ["a"] * 30 + ["b"] * 2 + ["c"]
    assert held.begun[:6] == ["a", "a", "b", "c", "a", "b"]
    assert held.turns.waiting == 0


async def test_a_named_tenant_leaves_a_thread_to_others(hold: Callable[..., Held]) -> None:
    held = hold(at_once=2)
    held.ask("a", 30)
    await until(lambda: held.begun == ["a"])
    held.ask("b")
    # Though nothing of the first one's has come to an end.
    await until(lambda: held.begun == ["a", "b"])
    assert held.turns.waiting == 29
    await held.all()


async def test_without_tenants_all_threads_are_used(hold: Callable[..., Held]) -> None:
    held = hold(at_once=2)
    held.ask("", 3)
    await until(lambda: held.begun == ["", ""])
    await held.all()


async def test_what_is_cancelled_while_it_waits_is_never_begun(hold: Callable[..., Held]) -> None:
    held = hold(most=2)
    (running,) = held.ask("a")
    await until(lambda: held.begun == ["a"])
    one, two = held.ask("b", 2)
    await until(lambda: held.turns.waiting == 2)
    (refused,) = held.ask("b")
    with pytest.raises(ApiError) as error:
        await refused
    assert (error.value.status, error.value.headers["retry-after"]) == (429, "2")
    one.cancel()
    # It runs, and keeps its thread.
    running.cancel()
    await asyncio.gather(one, running, return_exceptions=True)
    assert held.turns.waiting == 1
    held.ask("c")
    await held.all()
    assert held.begun == ["a", "b", "c"]
    assert await two == "b"


async def test_an_error_reaches_whoever_asked(hold: Callable[..., Held]) -> None:
    held = hold()
    with pytest.raises(ZeroDivisionError):
        await held.turns.run("a", lambda: 1 // 0)
    assert await held.turns.run("a", lambda: 1) == 1


async def test_what_waits_at_the_end_is_dropped(hold: Callable[..., Held]) -> None:
    held = hold()
    held.ask("a", 3)
    await until(lambda: held.begun == ["a"] and held.turns.waiting == 2)
    held.turns.close()
    done = await held.all()
    assert [isinstance(one, asyncio.CancelledError) for one in done] == [False, True, True]
    assert held.begun == ["a"]


LONG = "a b " * 25_000
LARGE = "a b " * 100_000
"""Waits to be parsed already."""
MESSAGES = [{"role": "user", "content": LONG}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": "short", "bad_words": ["word " * 200] * 100}),
    ("/v1/completions", {"prompt": [1] * 8000, "echo": True, "max_tokens": 1}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/completions", {"prompt": LARGE}),
    ("/v1/responses", {"input": LARGE}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [1] * 8000}),
]


async def test_a_client_that_goes_while_its_prompt_waits_leaves_nothing(cluster: Cluster) -> None:
    mock = cluster.mock("w0")
    router = await cluster.router(1)
    at = urlsplit(router.url)
    free, begun = threading.Event(), threading.Semaphore(0)

    def stay() -> None:
        begun.release()
        assert free.wait(WAIT_S)

    staying = [asyncio.create_task(router._turns.run("", stay)) for _ in range(2)]
    try:
        for _ in staying:
            await asyncio.to_thread(begun.acquire)
        for path, body in BODIES:
            _, writer = await asyncio.open_connection(at.hostname, at.port)
            content = json.dumps({"model": "mock"} | body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            await until(lambda: router._turns.waiting == 1)
            assert router.status().in_flight == (LARGE.encode() not in content), path
            writer.close()
            await until(lambda: router.status().in_flight == router._turns.waiting == 0)
    finally:
        free.set()
        await asyncio.gather(*staying)
    assert not mock.events("generate")
