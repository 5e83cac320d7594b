"""Pages that leave device memory for host memory and disk, and come back from there."""

from __future__ import annotations

import errno
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pie.page.header import PageHeader
from pie.page.key import RootKey, page_keys
from pie.pool.wrappers import FaultyTier, SlowTier
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import PutStatus
from pie.worker import stores
from pie.worker.load_choice import LoadTier
from pie.worker.load_times import LoadTimes
from pie.worker.rates import Rate
from tests.pool.faults import FaultyFiles
from tests.worker.engine.clock import Clock, Hanging, stopped
from tests.worker.engine.threaded import DictPool
from tests.worker.engine.tiers import (
    FULL,
    MIB,
    PAGE,
    PROMPT,
    ROOT,
    Workers,
    disk_tier,
    flip,
    host_tier,
    opened,
    page_files,
    stacked,
)
from tests.worker.engine.toys import toy_answer


@pytest.fixture
async def workers(tokenizer: Tokenizer) -> AsyncIterator[Workers]:
    workers = Workers(tokenizer)
    yield workers
    await workers.close()


FOLLOW_UP = [*PROMPT, 60, 61]


async def test_an_idle_conversation_comes_back_from_host_memory(workers: Workers) -> None:
    worker = await workers.start(opened(host=MIB))
    await worker.ask(PROMPT)
    await worker.forget()
    before = len(worker.runner.batches)
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert (answer.cached.device, answer.cached.host) == (0, FULL * PAGE)
    assert worker.runner.batches[before].tokens == 2
    status = worker.engine.engine.status
    assert (status.cached_tokens_host, status.pages_loaded["host"]) == (FULL * PAGE, FULL)
    assert worker.figure("pages_lost") == 0
    assert worker.engine.engine.status.pages_evicted >= FULL


async def test_and_from_disk(workers: Workers, tmp_path: Path) -> None:
    worker = await workers.start(opened(tmp_path, disk=4 * MIB), limit_s=10)
    await worker.ask(PROMPT)
    await worker.settled()
    await worker.forget()
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert (answer.cached.host, answer.cached.disk) == (0, FULL * PAGE)


async def test_what_host_memory_has_no_room_for_goes_to_disk(
    workers: Workers, tmp_path: Path
) -> None:
    worker = await workers.start(opened(tmp_path, host=40_000, disk=4 * MIB), limit_s=10)
    await worker.ask(PROMPT)
    await worker.settled()
    for seed in range(4):
        await worker.forget(seed)
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert answer.cached.disk > 0
    assert answer.cached.total == FULL * PAGE
    await worker.engine.until(lambda: worker.figure("pages_demoted") > 0)


async def test_without_lower_tiers_what_leaves_is_computed_again(workers: Workers) -> None:
    worker = await workers.start(opened())
    assert worker.engine.tiers is None
    await worker.ask(PROMPT)
    await worker.forget()
    status = worker.engine.engine.status
    assert status.pages_lost == status.pages_evicted >= FULL
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert answer.cached.total == 0


@pytest.mark.parametrize("takes", [True, False])
async def test_with_a_pool_alone_what_leaves_is_lost_where_that_has_not_taken_it(
    workers: Workers, takes: bool
) -> None:
    pool = PromisedPool()
    pool.is_promised = not takes
    worker = await workers.start(opened(), pool=pool)
    await worker.ask(PROMPT)
    await worker.engine.until(lambda: len(pool.pages) >= FULL if takes else pool.offers > 0)
    await worker.settled()
    await worker.ask([100] * ((worker.engine.table.total - 1) * PAGE))
    status = worker.engine.engine.status
    assert status.pages_evicted == FULL - 1
    assert status.pages_lost == (0 if takes else FULL - 1)


async def test_a_page_that_must_leave_before_its_copy_was_made_is_copied_then(
    workers: Workers,
) -> None:
    worker = await workers.start(opened(host=MIB))
    worker.engine.engine._stores._limit_pages = 0
    await worker.ask(PROMPT)
    await worker.forget()
    assert worker.figure("pages_copied_late") >= FULL
    assert worker.figure("pages_written_behind") == 0
    assert (await worker.ask(FOLLOW_UP, 5)).cached.host == FULL * PAGE


async def test_what_finds_no_room_is_counted_as_lost(workers: Workers, tmp_path: Path) -> None:
    worker = await workers.start(opened(tmp_path, disk=4 * MIB))
    worker.engine.engine._stores._limit_pages = 0
    await worker.ask(PROMPT)
    await worker.forget()
    assert worker.figure("pages_lost") >= FULL
    answer = await worker.ask(FOLLOW_UP, 5)
    assert (answer.token_ids, answer.cached.total) == (toy_answer(FOLLOW_UP, 5), 0)


async def test_a_small_host_memory_keeps_what_left_last(workers: Workers) -> None:
    worker = await workers.start(opened(host=120_000))
    for number in range(12):
        await worker.ask([number] * (12 * PAGE))
    await worker.settled()
    await worker.ask(PROMPT)
    await worker.forget()
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.cached.host == FULL * PAGE


async def test_the_disk_is_found_again_after_a_restart(workers: Workers, tmp_path: Path) -> None:
    make = opened(tmp_path, host=MIB, disk=4 * MIB)
    first = await workers.start(make)
    await first.ask(PROMPT)
    await first.settled()
    first.tiers.save(until_s=float("inf"))
    await workers.stop(first)
    second = await workers.start(make)
    assert len(second.tiers.entries()) >= FULL, "they are announced again"
    answer = await second.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert answer.cached.disk == FULL * PAGE


async def test_the_rest_of_a_prompt_comes_from_the_pool(workers: Workers) -> None:
    pool = DictPool()
    maker = await workers.start(opened(), pool=pool)
    await maker.ask(FOLLOW_UP[:-2])
    await maker.engine.until(lambda: len(pool.pages) >= FULL)
    worker = await workers.start(opened(host=MIB), pool=pool)
    await worker.ask(PROMPT[:20])
    await worker.forget()
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert (answer.cached.host, answer.cached.pool) == (20, FULL * PAGE - 20)
    assert answer.started is not None
    assert answer.started.load is not None
    told = [
        (one.tier, one.pages, one.chosen, one.loaded_pages) for one in answer.started.load.sources
    ]
    assert told == [("host", 5, True, 5), ("pool", FULL - 5, True, FULL - 5)]
    assert all(one.compute_ms > 0 and one.took_ms > 0 for one in answer.started.load.sources)


async def test_a_tier_that_is_slower_than_computing_is_not_asked(workers: Workers) -> None:
    worker = await workers.start(opened(host=MIB))
    await worker.ask(PROMPT)
    await worker.forget()
    assert worker.engine.offload is not None
    slow = worker.engine.offload.choice.times[LoadTier.HOST] = LoadTimes()
    for _ in range(2):
        slow.saw(100, 100.0)
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.cached.total == 0
    assert answer.started is not None
    assert answer.started.load is not None
    (source,) = answer.started.load.sources
    assert not source.chosen
    assert source.load_ms > source.compute_ms
    assert worker.engine.engine.status.loads_skipped == 1


async def test_a_load_that_hangs_is_given_up_and_the_tier_left_alone(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Hanging(stopped(monkeypatch))
    worker = await workers.start(stacked(SlowTier(disk_tier(tmp_path), 1.0, disk)), pages=40)
    await worker.ask(PROMPT)
    await worker.forget()
    disk.on = True
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert answer.cached.total == 0
    assert answer.started is not None
    assert answer.started.load is not None
    assert answer.started.load.overran
    assert worker.engine.offload is not None
    assert worker.engine.offload.stalls[LoadTier.DISK].is_paused
    assert worker.engine.engine.status.loads_overran == 1
    # Its page may be lent at last; nothing is written into device memory any more.
    disk.over.set()
    assert (await worker.ask(FOLLOW_UP, 5)).token_ids == toy_answer(FOLLOW_UP, 5)


async def test_a_load_that_overruns_its_estimate_keeps_what_came(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stopped(monkeypatch, 0.15)
    pause_s = 0.0
    slow = SlowTier(disk_tier(tmp_path), 1.0, lambda _: clock.sleep(pause_s))
    worker = await workers.start(stacked(slow), pages=40)
    await worker.ask(PROMPT)
    await worker.forget()
    assert worker.engine.offload is not None
    # Computing would take much longer, so that only the estimate ends the load.
    worker.engine.engine._times.prefill = Rate(1.0)
    fast = worker.engine.offload.choice.times[LoadTier.DISK] = LoadTimes()
    for tokens in (10, 100, 1000, 10_000):
        fast.saw(tokens, tokens * 1e-5)
    pause_s = 0.1
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert 0 < answer.cached.disk < FULL * PAGE
    assert answer.started is not None
    assert answer.started.load is not None
    assert answer.started.load.overran
    (source,) = answer.started.load.sources
    assert source.loaded_pages * PAGE == answer.cached.disk


async def test_a_disk_that_hangs_at_a_store_keeps_nobody(workers: Workers, tmp_path: Path) -> None:
    disk = Hanging(Clock())
    disk.on = True
    slow = SlowTier(disk_tier(tmp_path), 1.0, disk)
    worker = await workers.start(stacked(slow), limit_s=0.2)
    for number in range(20):
        prompt = [number, *PROMPT]
        assert (await worker.ask(prompt, 3)).token_ids == toy_answer(prompt, 3)
    await worker.settled()
    disk.over.set()


@pytest.mark.parametrize("seed", range(3))
async def test_pages_may_be_missing_at_any_load(
    workers: Workers, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    fails: Callable[[str], bool] = lambda call: call == "prepare_load" and chance.random() < 0.2  # noqa: E731
    worker = await workers.start(
        stacked(FaultyTier(host_tier(40_000), fails), FaultyTier(disk_tier(tmp_path), fails)),
        limit_s=10,
    )
    prompts = [[number % 4] * 20 + list(range(number, number + 9)) for number in range(24)]
    for _ in range(2):
        for prompt in prompts:
            assert (await worker.ask(prompt, 3)).token_ids == toy_answer(prompt, 3)
    assert sum(worker.engine.engine.status.pages_loaded.values()) > 0


def in_header(file: bytes) -> int:
    """Return where the name of the model stands that readers take."""
    return file.rindex(ROOT.hex().encode()) + 3


@pytest.mark.parametrize("reason", ["checksum", "header", "truncated", "missing"])
@pytest.mark.parametrize("keep", [False, True])
async def test_a_damaged_page_file_is_a_counted_miss_and_taken_away(
    workers: Workers, tmp_path: Path, reason: str, keep: bool
) -> None:
    make = opened(tmp_path, disk=16 * MIB, keep_bad_pages=keep)
    worker = await workers.start(make, wide=True, limit_s=20)
    await worker.ask(PROMPT)
    await worker.forget()
    first = page_keys(ROOT, PROMPT, PAGE)[0].hex()
    (path,) = [path for path in page_files(tmp_path) if path.name.startswith(first)]
    whole = path.read_bytes()
    match reason:
        case "checksum":
            flip(path, 40_000)
        case "header":
            flip(path, in_header(whole))
        case "truncated":
            path.write_bytes(whole[:30_000])
        case _:
            path.unlink()
    answer = await worker.ask(FOLLOW_UP, 5)
    assert answer.token_ids == toy_answer(FOLLOW_UP, 5)
    assert answer.cached.total == 0
    assert sum(worker.figure("disk_bad_pages").values()) == 1
    await worker.settled()
    assert path.read_bytes() == whole, "it was computed and stored again"
    assert len(set_aside(tmp_path)) == (1 if keep and reason != "missing" else 0)


def set_aside(folder: Path) -> list[Path]:
    return list(folder.glob("*/bad/*"))


async def test_pages_of_another_model_are_removed_at_the_start(
    workers: Workers, tmp_path: Path
) -> None:
    make = opened(tmp_path, disk=16 * MIB)
    first = await workers.start(make, wide=True, limit_s=20)
    await first.ask(PROMPT)
    await first.settled()
    await workers.stop(first)
    assert page_files(tmp_path)
    second = await workers.start(make, wide=True, root=RootKey(b"o" * 32))
    assert second.figure("disk_bad_pages")["other_model"] == FULL
    assert not page_files(tmp_path)
    assert (await second.ask(PROMPT, 3)).token_ids == toy_answer(PROMPT, 3)


async def test_a_folder_that_another_process_uses_turns_the_disk_off(
    workers: Workers, tmp_path: Path
) -> None:
    make = opened(tmp_path, host=MIB, disk=4 * MIB)
    await workers.start(make)
    second = await workers.start(make)
    assert second.figure("disk_folders")["off"] == 1
    await second.ask(PROMPT)
    await second.forget()
    assert (await second.ask(FOLLOW_UP, 5)).cached.host == FULL * PAGE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("host", [0, 40_000])
async def test_a_disk_that_takes_no_pages_is_told_and_serving_goes_on(
    workers: Workers, tmp_path: Path, number: int, host: int
) -> None:
    files = FaultyFiles()
    worker = await workers.start(opened(tmp_path, host=host, disk=4 * MIB, files=files), limit_s=10)
    await worker.ask(PROMPT)
    await worker.settled()
    for name in ("write_new", "write_at", "append", "make_folder"):
        files.numbers[name] = number
    for seed in range(3):
        await worker.forget(seed)
    assert (await worker.ask(FOLLOW_UP, 5)).token_ids == toy_answer(FOLLOW_UP, 5)
    assert worker.figure("disk_folders")["read_only"] == 1
    assert sum(worker.figure("disk_errors").values()) > 0


async def test_a_disk_that_cannot_be_read_is_off_and_its_pages_are_withdrawn(
    workers: Workers, tmp_path: Path
) -> None:
    files = FaultyFiles()
    worker = await workers.start(opened(tmp_path, disk=4 * MIB, files=files), limit_s=10)
    await worker.ask(PROMPT)
    await worker.settled()
    await worker.forget()
    files.numbers["read_at"] = files.numbers["read"] = errno.ENODEV
    answer = await worker.ask(FOLLOW_UP, 5)
    assert (answer.token_ids, answer.cached.total) == (toy_answer(FOLLOW_UP, 5), 0)
    assert worker.figure("disk_folders")["off"] == 1
    await worker.engine.until(lambda: not worker.tiers.entries())


async def test_a_sequence_that_yields_goes_on_from_where_it_was(workers: Workers) -> None:
    worker = await workers.start(opened(host=MIB), pages=12, max_running=2)
    worker.engine.engine._times.prefill = Rate(1000.0)
    asked = [[50] * 18, [51] * 6]
    answers = [worker.engine.submit(prompt, 22) for prompt in asked]
    await worker.engine.until(lambda: all(one.finish_reason for one in answers))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == toy_answer(prompt, 22)
    status = worker.engine.engine.status
    assert status.preemptions > 0
    assert status.suspended == status.preemptions
    assert status.suspended_bytes == 0
    # The room for a load may be made by evicting what comes right after it: a page at most.
    made = sum(batch.tokens for batch in worker.runner.batches)
    once = sum(len(prompt) + 21 for prompt in asked)
    assert once <= made <= once + PAGE * status.preemptions


async def test_without_room_for_its_last_page_that_is_computed_again(workers: Workers) -> None:
    worker = await workers.start(opened(host=MIB), pages=12, max_running=2, suspended_bytes=0)
    asked = [[50] * 18, [51] * 6]
    answers = [worker.engine.submit(prompt, 22) for prompt in asked]
    await worker.engine.until(lambda: all(one.finish_reason for one in answers))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == toy_answer(prompt, 22)
    made = sum(batch.tokens for batch in worker.runner.batches)
    again = made - sum(len(prompt) + 21 for prompt in asked)
    assert 0 <= again < PAGE * worker.engine.engine.status.preemptions + 1


class PromisedPool(DictPool):
    """Another writer has promised every page, until it is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_promised = True
        self.offers = 0

    async def store(
        self, headers: Sequence[PageHeader], *args: Any, **kwargs: Any
    ) -> list[PutStatus]:
        self.offers += 1
        if self.is_promised:
            return [PutStatus.PENDING] * len(headers)
        return await super().store(headers, *args, **kwargs)


async def test_a_page_that_another_only_promised_is_not_taken_for_the_pools(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "AGAIN_S", 0.1)
    pool = PromisedPool()
    worker = await workers.start(opened(host=MIB), pool=pool)
    await worker.ask(PROMPT)
    await worker.engine.until(lambda: pool.offers > 0)
    assert not len(worker.tiers.in_pool)
    pool.is_promised = False
    # By itself: no request comes meanwhile.
    await worker.engine.until(lambda: len(pool.pages) >= FULL)
    # The engine is told a moment after the pool has them.
    await worker.engine.until(lambda: worker.engine.engine.status.pages_stored >= FULL)
    assert len(worker.tiers.in_pool) >= FULL
