"""Pages that come from another worker through a pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pie.page.key import RootKey
from pie.tokens.tokenizer import Tokenizer
from pie.worker import stalls, stores
from pie.worker.load_choice import LoadTier
from pie.worker.page_copies import PageNames
from pie.worker.rates import Rate
from tests.worker.engine.clock import Clock, stopped
from tests.worker.engine.threaded import DictPool, Threaded
from tests.worker.engine.toys import ToyRunner, toy_answer, toy_layout

PAGE = 4
ROOT = RootKey(b"r" * 32)


@dataclass
class Worker:
    engine: Threaded
    runner: ToyRunner

    async def stored(self, pages: int) -> None:
        """Wait until the pool took so many pages."""
        await self.engine.until(lambda: self.engine.engine.status.pages_stored >= pages)


def limit_loads(worker: Worker, limit_s: float) -> None:
    """Let the loads and stores of a worker take no longer than that from now on."""
    assert worker.engine.offload is not None
    worker.engine.offload._limit_s = limit_s


Start = Callable[..., Awaitable[Worker]]


@pytest.fixture
def pool() -> DictPool:
    return DictPool()


@pytest.fixture
async def start(tokenizer: Tokenizer, pool: DictPool) -> AsyncIterator[Start]:
    workers: list[Worker] = []

    async def start(pages: int = 64, **options: Any) -> Worker:
        runner = ToyRunner(pages, PAGE)
        engine = Threaded(
            runner, tokenizer, pages=pages, page_tokens=PAGE, root=ROOT, **({"eos": 999} | options)
        )
        engine.attach(pool, runner, PageNames(ROOT, toy_layout(PAGE)))
        engine.start()
        workers.append(Worker(engine, runner))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.engine.stop()


PROMPT = list(range(3, 25))
FULL = len(PROMPT) // PAGE


async def test_another_worker_goes_on_from_what_one_made(start: Start) -> None:
    maker, user = await start(), await start()
    first = await maker.engine.ask(PROMPT, 6)
    await maker.stored(FULL)
    second = await user.engine.ask(PROMPT, 6)
    assert second.token_ids == first.token_ids == toy_answer(PROMPT, 6)
    assert second.cached.pool == FULL * PAGE
    assert second.cached.device == 0
    assert second.started is not None
    assert second.started.load_ms > 0
    assert user.runner.batches[0].tokens == len(PROMPT) - FULL * PAGE


async def test_what_was_loaded_is_then_a_device_hit_and_not_stored_again(start: Start) -> None:
    maker, user = await start(), await start()
    await maker.engine.ask(PROMPT, 1)
    await maker.stored(FULL)
    await user.engine.ask(PROMPT, 1)
    again = await user.engine.ask(PROMPT, 1)
    assert (again.cached.device, again.cached.pool) == (FULL * PAGE, 0)
    assert user.engine.engine.status.pages_stored == 0


async def test_a_load_goes_on_after_the_device_match(start: Start) -> None:
    maker, user = await start(), await start()
    await maker.engine.ask(PROMPT, 1)
    await maker.stored(FULL)
    await user.engine.ask([*PROMPT[:8], 99], 1)
    answer = await user.engine.ask(PROMPT, 3)
    # The first two pages may themselves have come from the pool.
    assert answer.token_ids == toy_answer(PROMPT, 3)
    assert (answer.cached.device, answer.cached.pool) == (8, FULL * PAGE - 8)


async def test_a_fully_loaded_prompt_computes_its_last_token(start: Start) -> None:
    maker, user = await start(), await start()
    prompt = PROMPT[:16]
    await maker.engine.ask(prompt, 1)
    await maker.stored(4)
    answer = await user.engine.ask(prompt, 3)
    assert answer.token_ids == toy_answer(prompt, 3)
    assert answer.cached.pool == 15
    assert not user.runner.batches[0].passes[0].write


async def test_a_hole_ends_the_load_and_the_rest_is_computed(start: Start, pool: DictPool) -> None:
    maker, user = await start(), await start()
    await maker.engine.ask(PROMPT, 1)
    await maker.stored(FULL)
    (hole,) = [page for page, (header, _) in pool.pages.items() if header.index == 2]
    del pool.pages[hole]
    answer = await user.engine.ask(PROMPT, 3)
    assert answer.token_ids == toy_answer(PROMPT, 3)
    assert answer.cached.pool == 2 * PAGE


async def test_a_changed_page_changes_the_answer(start: Start, pool: DictPool) -> None:
    maker, user = await start(), await start()
    await maker.engine.ask(PROMPT, 1)
    await maker.stored(FULL)
    first, second = (page for page, (header, _) in pool.pages.items() if header.index in (1, 2))
    one, two = pool.pages[first], pool.pages[second]
    pool.pages[first], pool.pages[second] = (one[0], two[1]), (two[0], one[1])
    assert (await user.engine.ask(PROMPT, 4)).token_ids != toy_answer(PROMPT, 4)


async def test_a_page_of_another_size_is_a_miss(start: Start, pool: DictPool) -> None:
    maker, user = await start(), await start()
    await maker.engine.ask(PROMPT, 1)
    await maker.stored(FULL)
    for page, (header, payload) in list(pool.pages.items()):
        if header.index == 1:
            pool.pages[page] = (header, payload + b"more")
    answer = await user.engine.ask(PROMPT, 3)
    assert answer.token_ids == toy_answer(PROMPT, 3)
    assert answer.cached.pool == PAGE


async def test_a_pool_that_fails_costs_nothing_but_the_work(
    start: Start, pool: DictPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "AGAIN_S", 0.001)
    worker = await start()
    pool.error = OSError("the network is down")
    answer = await worker.engine.ask(PROMPT, 1)
    assert answer.token_ids == toy_answer(PROMPT, 1)
    await worker.engine.until(lambda: worker.engine.engine.status.pages_store_dropped == FULL)


async def test_a_load_that_stalls_is_given_up_for_computing(start: Start, pool: DictPool) -> None:
    maker, user = await start(), await start()
    await maker.engine.ask(PROMPT, 1)
    await maker.stored(FULL)
    limit_loads(user, 0.2)
    pool.load_delay_s = 60
    answer = await user.engine.ask(PROMPT, 3)
    assert answer.token_ids == toy_answer(PROMPT, 3)
    assert answer.cached.pool == 0


async def test_a_pool_that_hangs_costs_one_request_its_time_and_not_each(
    start: Start, pool: DictPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No request comes so late that the pause is over.
    monkeypatch.setattr(stalls, "_FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(stalls, "_LONGEST_PAUSE_S", 30_000.0)
    worker = await start()
    offload = worker.engine.offload
    assert offload is not None
    limit_loads(worker, 0.2)
    pool.load_delay_s = 60
    for number in range(4):
        await worker.engine.ask([number, *PROMPT], 1)
    assert (pool.loads, worker.engine.engine.status.loads_skipped) == (1, 3)
    paused = offload.stalls[LoadTier.POOL]
    assert paused.next_s == 2000.0
    paused.until_s = 0.0  # the pause is over
    await worker.engine.ask([50, *PROMPT], 1)
    assert pool.loads == 2
    assert paused.next_s == 4000.0
    paused.until_s = pool.load_delay_s = 0.0
    limit_loads(worker, 30.0)
    await worker.engine.ask([51, *PROMPT], 1)
    await worker.engine.ask([52, *PROMPT], 1)
    assert pool.loads == 4, "a quick miss is no reason to wait"


def slowed(copy: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """Return a copy of pages that takes its time for each."""

    def slow(*arguments: Any) -> Any:
        clock.sleep(0.05)
        return copy(*arguments)

    return slow


async def test_a_store_keeps_to_its_time_and_what_is_left_is_offered_again(
    start: Start, pool: DictPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "AGAIN_S", 0.01)
    clock = stopped(monkeypatch)
    worker = await start()
    limit_loads(worker, 0.18)
    worker.runner.export = slowed(worker.runner.export, clock)  # type: ignore[method-assign]
    await worker.engine.ask(list(range(3, 43)), 1)
    await worker.stored(10)
    assert worker.engine.engine.status.pages_store_dropped == 0
    assert pool.stores == [2] * 5, "half of the time is for sending them"


async def test_a_load_keeps_to_its_time_copying_included(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stopped(monkeypatch)
    maker, user = await start(), await start()
    prompt = list(range(3, 43))
    await maker.engine.ask(prompt, 1)
    await maker.stored(10)
    limit_loads(user, 0.18)
    user.runner.load = slowed(user.runner.load, clock)  # type: ignore[method-assign]
    answer = await user.engine.ask(prompt, 3)
    assert answer.token_ids == toy_answer(prompt, 3)
    assert answer.cached.pool == 4 * PAGE, "what was begun in time is finished"
    assert answer.started is not None
    assert answer.started.load_ms == pytest.approx(200)


async def test_others_go_on_while_one_loads(start: Start, pool: DictPool) -> None:
    worker = await start()
    pool.gate = asyncio.Event()
    worker.engine.engine._times.prefill = Rate(1.0)  # so that the load has time
    loading = worker.engine.submit(PROMPT, 3)
    other = await worker.engine.ask([50, 51], 5)
    assert other.token_ids == toy_answer([50, 51], 5)
    assert worker.engine.engine.status.loading == 1
    assert loading.deltas == 0
    pool.gate.set()
    await worker.engine.until(lambda: loading.finish_reason is not None)
    assert loading.token_ids == toy_answer(PROMPT, 3)


async def test_cancelling_a_load_frees_its_pages_when_it_ends(start: Start, pool: DictPool) -> None:
    worker = await start()
    pool.gate = asyncio.Event()
    worker.engine.engine._times.prefill = Rate(1.0)
    answer = worker.engine.submit(PROMPT, 3)
    await worker.engine.until(lambda: worker.engine.engine.status.pages_loading > 0)
    worker.engine.cancel(answer)
    await worker.engine.until(lambda: worker.engine.engine.status.cancelled == 1)
    assert worker.engine.engine.status.pages_loading == FULL
    pool.gate.set()
    await worker.engine.until(lambda: worker.engine.engine.status.pages_free == 64)


async def test_loads_slower_than_computing_are_not_tried_but_now_and_then(
    start: Start, pool: DictPool
) -> None:
    worker = await start()
    assert worker.engine.offload is not None
    for _ in range(2):
        worker.engine.offload.choice.times[LoadTier.POOL].saw(100, 100.0)
    for number in range(20):
        await worker.engine.ask([number, *PROMPT], 1)
    status = worker.engine.engine.status
    assert status.loads_skipped == 19
    assert pool.loads == 1


async def test_few_pages_and_a_busy_pool(start: Start, pool: DictPool) -> None:
    maker = await start()
    prompts = [[number % 3] * 10 + list(range(number, number + 9)) for number in range(24)]
    for prompt in prompts[::2]:
        await maker.engine.ask(prompt, 4)
    worker = await start(pages=14, max_running=4, step_tokens=16)
    answers = [worker.engine.submit(prompt, 12) for prompt in prompts]
    await worker.engine.until(lambda: all(one.finish_reason for one in answers), timeout_s=120)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == toy_answer(prompt, 12)
    assert worker.engine.engine.status.pages_loaded["pool"]
