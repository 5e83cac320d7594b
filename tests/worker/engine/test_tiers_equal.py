"""Pages from host memory and disk give what transformers' `generate` gives, in float32.

An engine with little device memory answers prompts, forgets them under pressure, and is asked again.
Exchanging one page for another text's on the way must show.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pie.page.events import Tier as TierKind
from pie.page.key import PageKey, page_keys
from pie.page.lookup import LookupStatus
from pie.pool.checksum import Checksum
from pie.pool.disk import DiskTier
from pie.pool.ram import RamTier
from pie.pool.sealing import Sealing
from pie.pool.tier import PageId, StoredPage, Tier
from pie.pool.wrappers import FaultyTier, WrappedTier
from pie.tokens.tokenizer import Tokenizer
from pie.worker import offload
from pie.worker.load_choice import LoadTier
from pie.worker.page_copies import PageNames
from pie.worker.runner import Runner
from tests.worker.engine.device import device
from tests.worker.engine.driver import Answer
from tests.worker.engine.test_models import expect
from tests.worker.engine.test_pool_fed import (
    SECRET,
    SOAKED,
    TINY,
    Subject,
    long_prompts,
    small,
    tiny,
)
from tests.worker.engine.threaded import Threaded, Untimed
from tests.worker.engine.tiers import MakeTiers, opened, page_files, stacked

HOST = 512 << 20
DISK = 512 << 20


@pytest.fixture(
    params=[
        *TINY,
        pytest.param(
            "smollm2", marks=[pytest.mark.timeout(900), pytest.mark.xdist_group("smollm2")]
        ),
    ]
)
def subject(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Subject:
    return small() if request.param == "smollm2" else tiny(request.param, tokenizer)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not turn a load into a miss."""
    monkeypatch.setattr(offload, "_LEAST_LOAD_S", 30.0)


class Served:
    """One engine over a real model with little device memory."""

    def __init__(self, subject: Subject, make: MakeTiers, *, pages: int, max_running: int) -> None:
        self.subject = subject
        layout = subject.model.layout
        # Of a pure recurrent model snapshots must make room, there are no pages.
        own = device(subject.model, pages, slots=8 if subject.model.specs else 4)
        arena = own.arena
        self.engine = Threaded(
            Runner(subject.model, arena),
            subject.tokenizer,
            pages=own.pages,
            states=own.states,
            page_tokens=subject.page_tokens,
            page_bytes=arena.page_bytes,
            root=subject.model.model_root,
            context_tokens=pages * subject.page_tokens,
            step_tokens=128,
            max_running=max_running,
        )
        attached = self.engine.attach(
            None,
            arena,
            PageNames(subject.model.model_root, layout),
            limit_s=30.0,
            secret=SECRET,
            tiers=make,
            suspended_bytes=HOST,
        )
        attached.choice.times = {tier: Untimed() for tier in LoadTier}
        self.engine.start()

    async def ask(self, prompt: list[int], tokens: int | None = None) -> Answer:
        answer = self.engine.submit(prompt, tokens or self.subject.answer_tokens)
        await self.ended([answer])
        return answer

    async def ended(self, answers: list[Answer]) -> None:
        await self.engine.until(lambda: all(one.finish_reason for one in answers), timeout_s=120)

    async def forget(self) -> None:
        """Push out of device memory all that is idle there."""
        await self.fill(7)
        await self.engine.until(lambda: self.engine.engine.is_idle, timeout_s=120)
        assert self.engine.tiers is not None
        assert self.engine.tiers.lost == 0

    async def fill(self, token: int) -> None:
        """Ask for so much else that all of device memory is needed for it."""
        total, page = self.engine.table.total, self.subject.page_tokens
        states = self.engine.states
        await self.ask([token] * (total * page - 1 if total else 10 * page), 1)
        for number in range(states.total if states is not None else 0):
            # Their pages are those of the one before; each has a snapshot of its own.
            await self.ask([*[token] * (2 * page), 10 + number, 3], 1)

    async def stop(self) -> None:
        await self.engine.stop()


Start = Callable[..., Served]


@pytest.fixture
async def start(subject: Subject) -> AsyncIterator[Start]:
    served: list[Served] = []

    def start(make: MakeTiers, *, pages: int = 20, max_running: int = 16) -> Served:
        served.append(Served(subject, make, pages=pages, max_running=max_running))
        return served[-1]

    yield start
    for one in served:
        if one.engine.thread._thread.is_alive():
            await one.stop()


def host_tier() -> RamTier:
    return RamTier(HOST, kind=TierKind.HOST, checksum=Checksum(SECRET))


def disk_tier(folder: Path) -> DiskTier:
    tier = DiskTier([folder], DISK, kind=TierKind.DISK, sealing=Sealing(SECRET))
    tier.open()
    return tier


def fitting(subject: Subject) -> tuple[list[int], list[int]]:
    """Return two prompts that differ throughout and leave room for answers in 20 pages."""
    one, other = long_prompts(subject)
    room = 20 * subject.page_tokens - subject.answer_tokens - 1
    return one[:room], other[:room]


async def test_from_host_memory(start: Start, subject: Subject) -> None:
    prompt, _ = fitting(subject)
    served = start(opened(host=HOST, secret=SECRET))
    await served.ask(prompt)
    await served.forget()
    answer = await served.ask(prompt)
    assert (answer.cached.device, answer.cached.host) == (0, subject.full(prompt))
    expect(subject.reference, prompt, answer)


async def test_from_disk_and_again_after_a_restart(
    start: Start, subject: Subject, tmp_path: Path
) -> None:
    prompt, _ = fitting(subject)
    make = opened(tmp_path, disk=DISK, secret=SECRET)
    served = start(make)
    await served.ask(prompt)
    await served.engine.until(lambda: served.engine.engine.is_idle, timeout_s=60)
    await served.fill(9)
    for again in (served, None):
        one = again or start(make)
        answer = await one.ask(prompt)
        assert (answer.cached.device, answer.cached.disk) == (0, subject.full(prompt))
        expect(subject.reference, prompt, answer)
        await one.stop()


@pytest.mark.parametrize("subject", [*TINY, SOAKED], indirect=True)
async def test_suspended_and_resumed(start: Start, subject: Subject) -> None:
    room = 10 * subject.page_tokens
    asked = [prompt[: room // 3] for prompt in fitting(subject)]
    served = start(opened(host=HOST, secret=SECRET), pages=10, max_running=2)
    tokens = room - room // 3 - 2
    answers = [served.engine.submit(prompt, tokens, ignore_eos=True) for prompt in asked]
    await served.ended(answers)
    status = served.engine.engine.status
    if not subject.model.states:
        assert status.resumed == status.suspended == status.preemptions > 0
    for prompt, answer in zip(asked, answers, strict=True):
        expect(subject.reference, prompt, answer, ignore_eos=True)


@pytest.mark.parametrize("subject", TINY, indirect=True)
async def test_with_pages_missing_at_any_load(
    start: Start, subject: Subject, tmp_path: Path
) -> None:
    chance = random.Random(1)

    def fails(call: str) -> bool:
        return call == "prepare_load" and chance.random() < 0.15

    served = start(stacked(FaultyTier(host_tier(), fails), FaultyTier(disk_tier(tmp_path), fails)))
    prompts = [prompt[: 12 * subject.page_tokens] for prompt in subject.prompts[:6]]
    for _ in range(2):
        for prompt in prompts:
            expect(subject.reference, prompt, await served.ask(prompt))
        await served.forget()
    assert served.engine.engine.status.pages_loaded["host"] > 0


@pytest.mark.parametrize("subject", TINY, indirect=True)
@pytest.mark.parametrize("damage", ["flipped", "truncated"])
async def test_with_damaged_files(
    start: Start, subject: Subject, tmp_path: Path, damage: str
) -> None:
    prompt, _ = fitting(subject)
    served = start(opened(tmp_path, disk=DISK, secret=SECRET))
    await served.ask(prompt)
    await served.engine.until(lambda: served.engine.engine.is_idle, timeout_s=60)
    await served.fill(9)
    for path in damaged_files(tmp_path):
        data = bytearray(path.read_bytes())
        for at in range(1000, len(data), 2000):
            data[at] ^= 1
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 3])
    answer = await served.ask(prompt)
    expect(subject.reference, prompt, answer)
    assert served.engine.tiers is not None
    counted = served.engine.tiers.figures()["disk_bad_pages"]
    assert isinstance(counted, dict)
    assert sum(counted.values()) > 0


def damaged_files(folder: Path) -> list[Path]:
    """Return what holds pages: files of large ones, packs of small ones."""
    return [*folder.glob("*/packs/*.pack"), *page_files(folder)]


class SwappingTier(WrappedTier):
    """Lends another page's payload for one page: what no test may survive."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.swapped: dict[PageKey, PageKey] = {}

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        stored = self.inner.prepare_load(page)
        wrong = self.swapped.get(page.key)
        if wrong is None or not isinstance(stored, StoredPage):
            return stored
        other = self.inner.prepare_load(PageId(wrong, page.part))
        assert isinstance(other, StoredPage)
        payload = memoryview(bytes(other.payload))
        self.inner.complete_load(PageId(wrong, page.part))
        return StoredPage(stored.header, payload)


async def test_a_page_that_is_exchanged_shows(start: Start, subject: Subject) -> None:
    prompt, other = fitting(subject)
    tier = SwappingTier(host_tier())
    served = start(stacked(tier))
    for text in (prompt, other):
        await served.ask(text)
    await served.forget()
    root, page = subject.model.model_root, subject.page_tokens
    # The last but one, which the windows of sliding layers still see.
    at = len(prompt) // page - 2
    if subject.model.states:
        at = subject.full(prompt) // page - 1
    tier.swapped[page_keys(root, prompt, page)[at]] = page_keys(root, other, page)[at]
    answer = await served.ask(prompt)
    assert answer.cached.host == subject.full(prompt)
    with pytest.raises(AssertionError, match="differs"):
        expect(subject.reference, prompt, answer)
