"""An engine on its own thread with a pool, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xxhash

from pie.page.events import Part
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.pool.tier import PageId, StoredPage
from pie.tokens.tokenizer import Tokenizer
from pie.wire.frames import Buffer
from pie.wire.messages import PutStatus
from pie.worker.commands import Command, StepReport
from pie.worker.engine_thread import EngineThread
from pie.worker.load_times import LoadTimes
from pie.worker.lower_tiers import LowerTiers
from pie.worker.offload import Offload
from pie.worker.outcome import StepRunner
from pie.worker.page_copies import PageCopies, PageMemory, PageNames
from pie.worker.page_pool import PagePool
from pie.worker.suspended import SuspendedPages
from tests.worker.engine.driver import Answer, Driver


class Threaded(Driver):
    """A driver whose engine runs by itself."""

    def __init__(self, runner: StepRunner, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(runner, tokenizer, **options)
        self.engine._clock = time.monotonic
        self.loop = asyncio.get_running_loop()
        self.reports: list[StepReport] = []
        self.deaths: list[BaseException] = []
        self.told = asyncio.Event()
        self.offload: Offload | None = None
        self.tiers: LowerTiers | None = None
        self.thread = EngineThread(
            self.engine,
            lambda report: self._on_loop(self._take, report),
            lambda error: self._on_loop(self.deaths.append, error),
        )

    def attach(
        self,
        pool: PagePool | None,
        memory: PageMemory,
        names: PageNames,
        *,
        limit_s: float = 30.0,
        secret: bytes | None = None,
        tiers: Callable[[PageCopies], LowerTiers | None] = lambda _: None,
        suspended_bytes: int = 0,
    ) -> Offload:
        copies = PageCopies(memory, names, secret=secret)
        self.tiers = tiers(copies)
        self.offload = Offload(
            copies, pool=pool, tiers=self.tiers, put=self.thread.put, limit_s=limit_s
        )
        self.suspended = SuspendedPages(memory, names, suspended_bytes)
        self.engine.attach(self.offload, self.suspended)
        return self.offload

    def start(self) -> None:
        self.thread.start()

    def put(self, command: Command) -> None:
        self.thread.put(command)

    async def ask(self, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> Answer:
        answer = self.submit(tokens, max_tokens, **fields)
        await self.until(lambda: answer.finish_reason is not None or answer.refused is not None)
        return answer

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 – it is what another thread does
                await asyncio.sleep(0.002)

    async def stop(self) -> None:
        assert await asyncio.to_thread(self.thread.stop, 60.0)
        if self.offload is not None:
            await self.offload.close()
        if self.tiers is not None:
            assert self.tiers.stop_moving(60.0)
            self.tiers.check()
            self.tiers.close()
        assert not self.deaths
        self.engine.check()

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def _take(self, report: StepReport) -> None:
        self.reports.append(report)
        self.collect(report)


class Untimed(LoadTimes):
    """Learns nothing, so that loads are tried however fast a toy computes."""

    def saw(self, tokens: int, seconds: float) -> None:
        pass


class DictPool:
    """A pool in a dict, with delays and faults."""

    def __init__(self) -> None:
        self.pages: dict[PageId, tuple[PageHeader, bytes]] = {}
        self.load_delay_s = 0.0
        self.gate: asyncio.Event | None = None
        """Loads wait for it where it is set."""
        self.error: Exception | None = None
        self.loads = 0
        self.stores: list[int] = []
        """How many pages came at once."""
        self.groups: dict[PageKey, PageKey] = {}

    async def lookup(
        self, pages: Sequence[PageId], *, groups: Sequence[PageKey], deadline_s: float
    ) -> list[LookupStatus]:
        if self.error is not None:
            raise self.error
        assert deadline_s > 0
        for page, group in zip(pages, groups, strict=True):
            assert self.groups.get(page.key, group) == group
        return [LookupStatus.HIT if page in self.pages else LookupStatus.MISS for page in pages]

    async def load(
        self, pages: Sequence[PageId], *, groups: Sequence[PageKey], deadline_s: float
    ) -> list[StoredPage | None]:
        self.loads += 1
        if self.error is not None:
            raise self.error
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(self.load_delay_s)
                if self.gate is not None:
                    await self.gate.wait()
        except TimeoutError:
            return [None] * len(pages)
        got: list[StoredPage | None] = []
        for page, group in zip(pages, groups, strict=True):
            held = self.pages.get(page)
            if held is None:
                got.append(None)
                continue
            assert self.groups[page.key] == group
            got.append(StoredPage(held[0], memoryview(held[1])))
        return got

    async def store(
        self,
        headers: Sequence[PageHeader],
        payloads: Sequence[Buffer],
        *,
        groups: Sequence[PageKey],
        deadline_s: float,
    ) -> list[PutStatus]:
        if self.error is not None:
            raise self.error
        self.stores.append(len(headers))
        for header, payload, group in zip(headers, payloads, groups, strict=True):
            assert header.checksum == xxhash.xxh3_128_digest(payload)
            assert header.raw_bytes == len(memoryview(payload))
            self.pages[PageId(header.key, Part(header.part))] = (header, bytes(payload))
            self.groups[header.key] = group
        return [PutStatus.STORED] * len(headers)
