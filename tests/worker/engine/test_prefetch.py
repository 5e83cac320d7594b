"""What a request in the queue will want is in host memory when its turn comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from pie.tokens.tokenizer import Tokenizer
from pie.worker.batch import Batch, StepOutput
from tests.worker.engine.driver import Answer
from tests.worker.engine.threaded import DictPool
from tests.worker.engine.tiers import FULL, MIB, PAGE, PROMPT, Worker, Workers, opened
from tests.worker.engine.toys import toy_answer

LONG = 900
"""Tokens of an answer that others wait for until it is cancelled."""


@pytest.fixture
async def workers(tokenizer: Tokenizer) -> AsyncIterator[Workers]:
    workers = Workers(tokenizer)
    yield workers
    await workers.close()


@pytest.fixture
async def pool(workers: Workers) -> DictPool:
    """A pool that has the pages of `PROMPT`."""
    pool = DictPool()
    maker = await workers.start(opened(host=MIB), pool=pool)
    await maker.ask(PROMPT)
    await maker.settled()
    assert len(pool.pages) == FULL
    await workers.stop(maker)
    return pool


async def busy(workers: Workers, pool: DictPool, host: int = MIB) -> tuple[Worker, Answer]:
    """Start a worker with room for one request, which is running one."""
    worker = await workers.start(
        opened(host=host), pool=pool, pages=256, max_running=1, step_tokens=64
    )
    run = worker.runner.run

    def slowly(batch: Batch) -> StepOutput:
        time.sleep(0.01)
        return run(batch)

    worker.runner.run = slowly  # type: ignore[method-assign]
    first = worker.engine.submit([150, 151], LONG)
    await worker.engine.until(lambda: len(first.token_ids) > 0)
    return worker, first


def prefetched(worker: Worker) -> int:
    return worker.engine.engine.status.pages_prefetched


async def test_pages_are_loaded_before_a_request_is_admitted(
    workers: Workers, pool: DictPool
) -> None:
    worker, first = await busy(workers, pool)
    waiting = worker.engine.submit(PROMPT, 4)
    await worker.engine.until(lambda: prefetched(worker) == FULL)
    assert first.finish_reason is None
    assert worker.engine.engine.status.waiting == 1, "its turn has not come"
    assert worker.figure("tier_pages")["host"] >= FULL
    loads = pool.loads
    worker.engine.cancel(first)
    await worker.engine.until(lambda: waiting.finish_reason is not None)
    assert waiting.token_ids == toy_answer(PROMPT, 4)
    assert (waiting.cached.host, waiting.cached.pool) == (FULL * PAGE - 1, 0)
    assert pool.loads == loads


async def test_a_request_that_is_cancelled_or_admitted_ends_what_is_fetched_for_it(
    workers: Workers, pool: DictPool
) -> None:
    worker, first = await busy(workers, pool)
    pool.gate = asyncio.Event()
    gone = worker.engine.submit(PROMPT, 4)
    await worker.engine.until(lambda: pool.loads == 1)
    worker.engine.cancel(gone)
    other = worker.engine.submit(PROMPT, 4)
    await worker.engine.until(lambda: pool.loads == 2)
    worker.engine.cancel(first)
    await worker.engine.until(lambda: pool.loads == 3)
    pool.gate.set()
    await worker.engine.until(lambda: other.finish_reason is not None)
    assert other.token_ids == toy_answer(PROMPT, 4)
    assert prefetched(worker) == 0
    assert other.cached.pool == FULL * PAGE - 1, "it loads by itself once it runs"


async def test_nothing_leaves_host_memory_for_what_is_fetched_ahead(
    workers: Workers, pool: DictPool
) -> None:
    worker, first = await busy(workers, pool, host=32 << 10)
    await worker.engine.until(lambda: worker.figure("tier_pages")["host"] >= 3)
    waiting = worker.engine.submit([*PROMPT[:-1], 77], 4)
    await worker.engine.until(lambda: worker.engine.engine.status.waiting == 1)
    await asyncio.sleep(0.1)
    assert worker.figure("pages_tier_evicted") == 0
    worker.engine.cancel(first)
    await worker.engine.until(lambda: waiting.finish_reason is not None)
    assert waiting.token_ids == toy_answer([*PROMPT[:-1], 77], 4)


async def test_a_pool_that_fails_or_has_a_hole_is_a_miss(workers: Workers, pool: DictPool) -> None:
    (hole,) = [page for page, (header, _) in pool.pages.items() if header.index == 2]
    del pool.pages[hole]
    worker, first = await busy(workers, pool)
    waiting = worker.engine.submit(PROMPT, 4)
    await worker.engine.until(lambda: prefetched(worker) == 2)
    pool.error = ConnectionError("down")
    more = worker.engine.submit([9, *PROMPT], 4)
    worker.engine.cancel(first)
    await worker.engine.until(lambda: more.finish_reason is not None)
    assert waiting.token_ids == toy_answer(PROMPT, 4)
    assert waiting.cached.host == 2 * PAGE
    assert more.token_ids == toy_answer([9, *PROMPT], 4)
