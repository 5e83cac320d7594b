"""A request waits for pages that another worker computes, and no longer than it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pie.index.settings import IndexSettings
from pie.wire.messages import RefusalCode
from pie.worker.status import WorkerStatus
from tests.support.models import tiny_module
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.clock import Clock
from tests.worker.engine.places import PAGE, Places, model_folder, until
from tests.worker.engine.test_models import expect

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PREFIX = [token % 200 for token in range(3, 3 + 40 * PAGE)]
PROMPT = [*PREFIX, 7, 8, 9]
PAGES = 40


@pytest.fixture
async def places(
    index_settings: IndexSettings, tmp_path: Path, tokenizer_folder: Path
) -> AsyncIterator[Places]:
    places = Places(index_settings, model_folder(tmp_path, tokenizer_folder))
    await places.start()
    yield places
    await places.close()


async def test_pages_that_come_are_loaded_and_not_computed(places: Places) -> None:
    await places.pool()
    first, second = (
        await places.worker("w0", attention="torch"),
        await places.worker("w1", attention="torch"),
    )
    there, here = await places.asker(first), await places.asker(second)
    waiting = [(await here.send(PROMPT, await_pages=PAGES, await_s=30.0))[1] for _ in range(3)]
    await until(lambda: second.status().awaiting == 3)
    assert second.status().requests == 0, "they are not in the queue yet"
    made = await there.ask([*PREFIX, 5])
    for answer in waiting:
        await here.ended(answer)
        expect(tiny_module("llama"), PROMPT, answer)
    assert made.finish_reason is not None
    status: WorkerStatus = second.status()
    assert (status.awaiting, status.awaited, status.awaited_in_vain) == (0, 3, 0)
    assert waiting[0].cached.pool == len(PREFIX)
    assert status.prefill_tokens <= 3 * (len(PROMPT) - len(PREFIX))


async def test_what_does_not_come_is_computed_at_the_limit(places: Places) -> None:
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker = await places.asker(worker)
    answer = await asker.ask(PROMPT, await_pages=PAGES, await_s=0.3, deadline_s=250.0)
    assert answer.refused is None
    expect(tiny_module("llama"), PROMPT, answer)
    status = worker.status()
    assert (status.awaited, status.awaited_in_vain, status.prefill_tokens) == (0, 1, len(PROMPT))


async def test_after_a_wait_for_nothing_nobody_waits_for_a_while(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.worker.awaiting.time", clock := Clock())
    monkeypatch.setattr("pie.worker.awaiting.asyncio", limits := Limits())
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker = await places.asker(worker)
    for paused_s in (1.0, 2.0, 4.0):
        # What it computes itself goes to the pool.
        first, second = [[int(paused_s), one, *PROMPT] for one in (1, 2)]
        in_vain = worker.status().awaited_in_vain
        both = [await asker.send(first, 1, await_pages=PAGES, await_s=60.0) for _ in range(2)]
        await until(lambda: worker.status().awaiting == 2)
        limits.end()
        for _, answer in both:
            await asker.ended(answer)
        assert worker.status().awaited_in_vain == in_vain + 2
        clock.now_s += paused_s - 0.1
        answer = await asker.ask(second, 1, await_pages=PAGES, await_s=60.0)
        assert answer.refused is None
        assert worker.status().awaited_in_vain == in_vain + 2, "it did not wait"
        clock.now_s += 0.2


class Limits:
    """`asyncio` with limits that end when a test says so."""

    def __init__(self) -> None:
        self._begun: list[asyncio.Timeout] = []

    def timeout(self, seconds: float) -> asyncio.Timeout:
        self._begun.append(asyncio.timeout(seconds))
        return self._begun[-1]

    def end(self) -> None:
        for one in self._begun:
            one.reschedule(0.0)
        self._begun.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


async def test_without_a_pool_nobody_waits(places: Places) -> None:
    worker = await places.worker("w0", pool=False, attention="torch")
    asker = await places.asker(worker)
    answer = await asker.ask(PROMPT, await_pages=PAGES, await_s=600.0)
    expect(tiny_module("llama"), PROMPT, answer)
    assert worker.status().awaited_in_vain == 0


async def test_one_that_is_cancelled_while_it_waits_is_gone(places: Places) -> None:
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker = await places.asker(worker)
    cancelled, _ = await asker.send(PROMPT, await_pages=PAGES, await_s=60.0)
    other = await places.asker(worker)
    await other.send(PROMPT, await_pages=PAGES, await_s=60.0)
    await until(lambda: worker.status().awaiting == 2)
    await asker.cancel(cancelled)
    await until(lambda: worker.status().awaiting == 1)
    await other.client.close()
    await until(lambda: worker.status().awaiting == 0)
    await asker.ask([1, 2, 3], 1)
    assert worker.status().requests == 1
    assert worker.status().prefill_tokens == 3


async def test_a_worker_that_drains_lets_nobody_wait(places: Places) -> None:
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker = await places.asker(worker)
    _, answer = await asker.send(PROMPT, await_pages=PAGES, await_s=60.0)
    await until(lambda: worker.status().awaiting == 1)
    await asyncio.wait_for(worker.drain(60), 60)
    await asker.ended(answer)
    assert answer.refused is not None
    assert answer.refused.code is RefusalCode.DRAINING, "the router sends it elsewhere"


async def test_no_more_wait_than_the_queue_has_room_for(places: Places) -> None:
    await places.pool()
    worker = await places.worker("w0", max_waiting=2, attention="torch")
    asker = await places.asker(worker)
    for _ in range(2):
        await asker.send(PROMPT, await_pages=PAGES, await_s=60.0)
    await until(lambda: worker.status().awaiting == 2)
    third = await asker.ask(PROMPT, await_pages=PAGES, await_s=60.0)
    expect(tiny_module("llama"), PROMPT, third)


async def test_a_bad_request_is_refused_at_once(places: Places) -> None:
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker = await places.asker(worker)
    answer = await asker.ask([1, 2, 999_999], await_pages=PAGES, await_s=60.0)
    assert answer.refused is not None
    assert answer.refused.code is RefusalCode.BAD_MESSAGE
