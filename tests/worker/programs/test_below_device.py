"""A program's prompt comes from host memory, disk and the pool as a request's does.

What it says must be what transformers' `generate` says, and exchanging a page on the way must show.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pie.page.key import page_keys
from pie.tokens.tokenizer import Tokenizer
from pie.wire.programs import Rows
from pie.worker import offload
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.engine.test_models import expect
from tests.worker.engine.test_pool_fed import SECRET, Cluster, Subject, long_prompts, tiny
from tests.worker.engine.test_tiers_equal import SwappingTier, damaged_files, host_tier
from tests.worker.engine.threaded import DictPool
from tests.worker.engine.tiers import opened, stacked
from tests.worker.programs.threaded_lane import ThreadedLane

HOST = 64 << 20
DISK = 64 << 20

Start = Callable[..., ThreadedLane]


@pytest.fixture(params=["llama", "gemma3", "mamba2", "falcon_h1"])
def subject(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Subject:  # noqa: F811
    return tiny(request.param, tokenizer)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not turn a load into a miss."""
    monkeypatch.setattr(offload, "_LEAST_LOAD_S", 30.0)


@pytest.fixture
async def start(subject: Subject) -> AsyncIterator[Start]:
    started: list[ThreadedLane] = []

    def start(**options: object) -> ThreadedLane:
        one = ThreadedLane(subject, **options)  # type: ignore[arg-type]
        started.append(one)
        one.start()
        one.begin("p")
        return one

    yield start
    for one in started:
        one.end("p")
        if one.thread._thread.is_alive():
            await one.settled()
            await one.stop()
        assert not len(one.ledger)


def saved(subject: Subject, prompt: list[int]) -> int:
    """Return how many tokens of a prompt need not be computed: its last one runs in any case."""
    return (len(prompt) - 1) // subject.page_tokens * subject.page_tokens


def prompts(subject: Subject) -> tuple[list[int], list[int]]:
    """Return two prompts that differ throughout and leave room for answers in 20 pages."""
    one, other = long_prompts(subject)
    room = 20 * subject.page_tokens - subject.answer_tokens - 1
    return one[:room], other[:room]


async def test_from_host_memory(start: Start, subject: Subject) -> None:
    prompt, _ = prompts(subject)
    lane = start(tiers=opened(host=HOST, secret=SECRET))
    cold, cached = await lane.write(prompt, subject.answer_tokens)
    assert cached == 0
    await lane.forget()
    warm, cached = await lane.write(prompt, subject.answer_tokens)
    assert cached == saved(subject, prompt)
    assert lane.engine.status.pages_loaded["host"] > 0
    assert warm.token_ids == cold.token_ids
    expect(subject.reference, prompt, warm)


async def test_from_disk_and_again_after_a_restart(
    start: Start, subject: Subject, tmp_path: Path
) -> None:
    prompt, _ = prompts(subject)
    make = opened(tmp_path, disk=DISK, secret=SECRET)
    lane = start(tiers=make)
    await lane.write(prompt, subject.answer_tokens)
    await lane.forget()
    for again in (lane, None):
        one = again or start(tiers=make)
        answer, cached = await one.write(prompt, subject.answer_tokens)
        assert cached == saved(subject, prompt)
        assert one.engine.status.pages_loaded["disk"] > 0
        expect(subject.reference, prompt, answer)
        await one.settled()
        await one.stop()


async def test_from_a_pool_that_another_worker_filled(start: Start, subject: Subject) -> None:
    prompt, _ = prompts(subject)
    cluster = Cluster(subject)
    try:
        pool = await cluster.pool()
        await cluster.store(pool, [prompt])
        lane = start(pool=pool)
        answer, cached = await lane.write(prompt, subject.answer_tokens)
        assert cached == saved(subject, prompt)
        assert lane.engine.status.pages_loaded["pool"] > 0
        expect(subject.reference, prompt, answer)
        await lane.settled()
        await lane.stop()
    finally:
        await cluster.close()


async def test_what_a_program_left_below_is_a_requests_and_the_other_way_round(
    start: Start, subject: Subject
) -> None:
    prompt, other = prompts(subject)
    lane = start(tiers=opened(host=HOST, secret=SECRET))
    await lane.write(prompt, 1)
    await lane.asked(other)
    await lane.forget()
    asked = await lane.asked(prompt)
    assert asked.cached.host == subject.full(prompt)
    answer, cached = await lane.write(other, subject.answer_tokens)
    assert cached == saved(subject, other)
    expect(subject.reference, other, answer)


async def test_with_damaged_files_it_computes(
    start: Start, subject: Subject, tmp_path: Path
) -> None:
    prompt, _ = prompts(subject)
    lane = start(tiers=opened(tmp_path, disk=DISK, secret=SECRET))
    await lane.write(prompt, 1)
    await lane.forget()
    for path in damaged_files(tmp_path):
        data = bytearray(path.read_bytes())
        for at in range(1000, len(data), 2000):
            data[at] ^= 1
        path.write_bytes(data)
    answer, cached = await lane.write(prompt, subject.answer_tokens)
    assert cached < saved(subject, prompt)
    expect(subject.reference, prompt, answer)


async def test_a_page_that_is_exchanged_on_the_way_shows(start: Start, subject: Subject) -> None:
    prompt, other = prompts(subject)
    tier = SwappingTier(host_tier())
    lane = start(tiers=stacked(tier))
    for text in (prompt, other):
        await lane.write(text, 1)
    await lane.forget()
    root, size = subject.model.model_root, subject.page_tokens
    at = saved(subject, prompt) // size - 1
    tier.swapped[page_keys(root, prompt, size)[at]] = page_keys(root, other, size)[at]
    answer, cached = await lane.write(prompt, subject.answer_tokens)
    assert cached == saved(subject, prompt)
    with pytest.raises(AssertionError, match="differs"):
        expect(subject.reference, prompt, answer)


async def test_two_sets_with_one_prompt_load_it_once(start: Start, subject: Subject) -> None:
    prompt, _ = prompts(subject)
    lane = start(tiers=opened(host=HOST, secret=SECRET), pages=40)
    await lane.write(prompt, 1)
    await lane.forget()
    calls = [lane.start_answer(lane.open(), prompt, 4) for _ in range(2)]
    ended = [await lane.ends(call) for call in calls]
    assert lane.engine.status.pages_loaded["host"] == saved(subject, prompt) // subject.page_tokens
    assert [last.cached_tokens for _, last in ended] == [saved(subject, prompt)] * 2
    assert ended[0][0].token_ids == ended[1][0].token_ids


async def test_a_parked_set_comes_back_and_goes_on(start: Start, subject: Subject) -> None:
    prompt, _ = prompts(subject)
    lane = start(tiers=opened(host=HOST, secret=SECRET))
    number = lane.open()
    await lane.feed(number, prompt[:-3])
    await lane.park(number)
    assert not len(lane.ledger)
    await lane.forget()
    answer, _ = await lane.ends(lane.start_answer(number, prompt[-3:], subject.answer_tokens))
    expect(subject.reference, prompt, answer)


@pytest.mark.parametrize("subject", ["llama"], indirect=True)
class TestWhileALoadIsUnderWay:
    """A pool that answers when it is told to."""

    async def begun(self, start: Start, subject: Subject) -> tuple[ThreadedLane, DictPool, int]:
        pool = DictPool()
        lane = start(pool=pool, secret=None)
        prompt, _ = prompts(subject)
        await lane.write(prompt, 1)
        await lane.forget()
        pool.gate, before = asyncio.Event(), pool.loads
        lane.begin("q")
        number = lane.open("q")
        call = lane.start_answer(number, prompt, 4, "q")
        await lane.until(lambda: pool.loads > before)
        return lane, pool, call

    async def test_its_program_may_end(self, start: Start, subject: Subject) -> None:
        lane, pool, _ = await self.begun(start, subject)
        lane.end("q")
        await lane.until(lambda: not lane.roster.programs.get("q"))
        assert len(lane.ledger), "what is being written stays put"
        assert pool.gate is not None
        pool.gate.set()
        await lane.until(lambda: not len(lane.ledger))
        prompt, _ = prompts(subject)
        pool.gate = None
        answer, _ = await lane.write(prompt, 4)
        expect(subject.reference, prompt, answer)

    async def test_a_pool_that_fails_costs_a_recompute(
        self, start: Start, subject: Subject
    ) -> None:
        lane, pool, call = await self.begun(start, subject)
        prompt, _ = prompts(subject)
        pool.error = RuntimeError("gone")
        pool.pages.clear()
        assert pool.gate is not None
        pool.gate.set()
        answer, last = await lane.ends(call)
        assert last.cached_tokens == 0
        expect(subject.reference, prompt, answer)
        pool.error = None
        lane.end("q")

    async def test_others_go_on(self, start: Start, subject: Subject) -> None:
        lane, pool, call = await self.begun(start, subject)
        number = lane.open()
        done = await lane.feed(number, [5, 6, 7], logits=Rows.LAST)
        assert done.parts[0].length == 3
        assert call not in lane.answered
        assert pool.gate is not None
        pool.gate.set()
        _, last = await lane.ends(call)
        assert last.cached_tokens == saved(subject, prompts(subject)[0])
        lane.end("q")
