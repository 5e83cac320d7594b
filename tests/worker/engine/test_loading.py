"""Loads beside each other, from tiers that answer and from ones that do not."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pie.page.events import Part
from pie.page.key import page_keys
from pie.pool.tier import PageId
from pie.pool.wrappers import SlowTier
from pie.tokens.tokenizer import Tokenizer
from pie.worker import storing
from pie.worker.in_pool import InPool
from pie.worker.load_choice import LoadTier, Run
from pie.worker.load_job import LoadJob
from pie.worker.offload import Offload
from pie.worker.rates import Rate
from tests.worker.engine.clock import Clock, Hanging, stopped
from tests.worker.engine.threaded import DictPool
from tests.worker.engine.tiers import (
    FULL,
    MIB,
    PAGE,
    PROMPT,
    ROOT,
    Unmeasured,
    Worker,
    Workers,
    disk_tier,
    host_tier,
    opened,
    stacked,
)
from tests.worker.engine.toys import toy_answer

FOLLOW_UP = [*PROMPT, 60, 61]


@pytest.fixture
async def workers(tokenizer: Tokenizer) -> AsyncIterator[Workers]:
    workers = Workers(tokenizer)
    yield workers
    await workers.close()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What loads take for the time: a busy machine makes none of them late."""
    return stopped(monkeypatch)


def offload_of(worker: Worker) -> Offload:
    assert worker.engine.offload is not None
    return worker.engine.offload


async def test_a_burst_of_loads_is_no_stall(workers: Workers, clock: Clock) -> None:
    pause_s, all_wait = 0.0, threading.Event()
    all_wait.set()

    def pause(_seconds: float) -> None:
        assert all_wait.wait(60)
        clock.sleep(pause_s)

    slow = SlowTier(host_tier(4 * MIB), 1.0, pause)
    worker = await workers.start(stacked(slow), pages=160, limit_s=20)
    prompts = [[number, *PROMPT] for number in range(10)]
    for prompt in prompts:
        await worker.ask(prompt)
        await worker.settled()
    await worker.forget()
    # Each load takes a sixth of its time, all of them together more than one has.
    worker.engine.engine._times.prefill = Unmeasured(len(PROMPT) / 0.6)
    pause_s = 0.01
    all_wait.clear()
    answers = [worker.engine.submit(prompt, 3) for prompt in prompts]
    queue = offload_of(worker)._loading[LoadTier.HOST]._work
    await worker.engine.until(lambda: queue.qsize() == len(prompts) - 1)
    all_wait.set()
    await worker.engine.until(lambda: all(one.finish_reason for one in answers))
    assert [one.cached.host for one in answers] == [FULL * PAGE] * 10
    assert not offload_of(worker).stalls[LoadTier.HOST].is_paused
    took = [
        one.started.load.sources[0].took_ms for one in answers if one.started and one.started.load
    ]
    assert max(took) > 600, "the wait is told"


async def on_both(
    workers: Workers, clock: Clock, tmp_path: Path, **options: Any
) -> tuple[Worker, threading.Event]:
    """Return a worker with five of its pages in host memory and on disk, the others on disk alone.

    Until the event is set its disk hangs.
    """
    disk = Hanging(clock)
    slow = SlowTier(disk_tier(tmp_path), 1.0, disk)
    worker = await workers.start(stacked(host_tier(), slow), pages=40, limit_s=5, **options)
    await worker.ask(PROMPT)
    await worker.settled()
    await worker.forget()
    worker.tiers.save(float("inf"))
    for key in page_keys(ROOT, PROMPT, PAGE)[5:]:
        assert worker.tiers._cache._tiers[0].remove(PageId(key, Part.FULL))
    worker.tiers._cache.reconcile()
    disk.on = True
    return worker, disk.over


async def test_a_disk_that_hangs_after_host_memory_gave_its_part_is_left_alone(
    workers: Workers, clock: Clock, tmp_path: Path
) -> None:
    worker, over = await on_both(workers, clock, tmp_path)
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert (answer.cached.host, answer.cached.disk) == (5 * PAGE, 0)
    stalls = offload_of(worker).stalls
    assert [tier.value for tier in LoadTier if stalls[tier].is_paused] == ["disk"]
    over.set()


async def test_what_a_paused_disk_has_comes_from_the_pool(
    workers: Workers, clock: Clock, tmp_path: Path
) -> None:
    pool = DictPool()
    worker, over = await on_both(workers, clock, tmp_path, pool=pool)
    await worker.engine.until(lambda: len(pool.pages) >= FULL)
    offload_of(worker).stalls[LoadTier.DISK].gave_up(clock.monotonic())
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert (answer.cached.host, answer.cached.pool) == (5 * PAGE, (FULL - 5) * PAGE)
    over.set()


class SomeRuns:
    """Lower tiers that have eight pages, half of them on disk."""

    in_pool = InPool()

    def runs(self, _keys: object, *, held: int) -> list[Run]:
        return [Run(LoadTier.HOST, 4), Run(LoadTier.DISK, 4)]


@pytest.mark.parametrize("pool", [None, DictPool()])
async def test_of_a_recurrent_model_nothing_is_loaded_without_its_snapshot(
    pool: DictPool | None, clock: Clock
) -> None:
    layout = SimpleNamespace(page_tokens=PAGE, parts=(Part.FULL, Part.STATE))
    copies: Any = SimpleNamespace(names=SimpleNamespace(layout=layout))
    tiers: Any = SomeRuns()
    one = Offload(copies, pool=pool, tiers=tiers, put=print, limit_s=5)
    working_set = SimpleNamespace(loadable_keys=list(range(9)), frozen=0)
    sequence: Any = SimpleNamespace(working_set=working_set, load_wish=None, load_decision=None)
    assert one.wish(sequence, Rate(1000.0)) == 8
    one.stalls[LoadTier.DISK].gave_up(clock.monotonic())
    assert one.wish(sequence, Rate(1000.0)) == (0 if pool is None else 9)
    assert sequence.load_decision is None, "nothing has begun"
    assert one.counts.paused == 1
    await one.close()


async def test_a_load_that_breaks_is_a_miss_and_its_sequence_goes_on(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("unforeseen")

    worker = await workers.start(opened(host=MIB))
    await worker.ask(PROMPT)
    await worker.forget()
    monkeypatch.setattr(Offload, "_load_from_tier", broken)
    answer = await worker.ask(FOLLOW_UP, 5)
    assert (answer.token_ids, answer.cached.total) == (toy_answer(FOLLOW_UP, 5), 0)
    assert worker.engine.engine.status.loads_missed == 1


async def test_a_cancelled_load_is_not_a_missed_one(
    workers: Workers, clock: Clock, tmp_path: Path
) -> None:
    disk = Hanging(clock, 0.0)
    worker = await workers.start(stacked(SlowTier(disk_tier(tmp_path), 1.0, disk)))
    await worker.ask(PROMPT)
    await worker.settled()
    await worker.forget()
    disk.on = True
    worker.engine.engine._times.prefill = Unmeasured(1.0)
    answer = worker.engine.submit(FOLLOW_UP, 5)
    await worker.engine.until(lambda: worker.engine.engine.status.loading == 1)
    worker.engine.cancel(answer)
    await worker.engine.until(lambda: worker.engine.engine.status.cancelled == 1)
    disk.over.set()
    await worker.settled()
    assert worker.engine.engine.status.loads_missed == 0
    assert not offload_of(worker).stalls[LoadTier.DISK].is_paused


async def test_closing_leaves_a_disk_behind_that_hangs(
    workers: Workers, clock: Clock, tmp_path: Path
) -> None:
    worker, over = await on_both(workers, clock, tmp_path)
    await worker.ask(FOLLOW_UP, 5)
    await offload_of(worker).close(0.01)
    over.set()


async def test_no_more_of_a_batch_is_copied_out_at_once_than_may_be(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DictPool()
    worker = await workers.start(opened(host=MIB), pool=pool)
    layout = offload_of(worker).layout
    monkeypatch.setattr(storing, "_COPY_BYTES", 3 * layout.page_bytes)
    await worker.ask(PROMPT)
    await worker.settled()
    assert pool.stores == [3, 3, 3, 1]
    assert worker.engine.engine.status.pages_stored == FULL
    assert worker.engine.engine.status.pages_store_dropped == 0


def test_a_job_knows_what_it_still_wants_from_a_tier() -> None:
    runs: Any = [
        SimpleNamespace(tier=LoadTier.HOST, pages=range(4)),
        SimpleNamespace(tier=LoadTier.DISK, pages=range(3)),
        SimpleNamespace(tier=LoadTier.HOST, pages=range(2)),
    ]
    nothing: Any = None
    job = LoadJob(nothing, runs, nothing, wanted_s=1, limit_s=2)
    seen = []
    for job.pages in (0, 3, 5, 9):
        seen.append((job.waiting_in(LoadTier.HOST), job.waiting_in(LoadTier.DISK)))
    assert seen == [(6, 3), (3, 3), (2, 2), (0, 0)]
