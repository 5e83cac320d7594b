"""Between device memory and the pool: stores behind the step thread's back, loads before prefill.

Covers copying pages out and in on a background thread, sending and fetching them on the event loop,
and whether a load is worth its time. Does not cover which pages wait to be stored
(`pie.worker.stores`) or how the pool is reached (`pie.pool.client`).

A load is tried where it is measured to be faster than computing the same tokens, and given up
where it takes longer than computing them would: what came until then is kept. After a load that
brought nothing in all its time no other is tried for a moment, so that a pool that hangs costs one
request its time and not each.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from pie.page.events import Part
from pie.page.format import PageHeader
from pie.page.key import PageKey, RootKey
from pie.page.layout import PageLayout
from pie.pool.checksum import Checksum
from pie.pool.placement import GROUP_PAGES, group_keys
from pie.pool.tier import Buffer, PageId, StoredPage
from pie.wire.messages import PutStatus
from pie.worker.batch import PageSlot
from pie.worker.commands import Command, LoadEnded, StoreEnded
from pie.worker.rates import Rate
from pie.worker.sequence import Sequence, SequenceState
from pie.worker.stores import PageToStore

log = logging.getLogger("pie.worker.offload")

_PROBE_EVERY = 16
"""A load that looks slower than computing is tried all the same once in so many times: else it
would never be seen that the pool has become faster."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""How long no load is tried after one that brought nothing in its time; doubled each time."""
_STALLED = 0.9
"""A load that took this part of its time was given up; event loops round to milliseconds."""
_LEAST_LOAD_S = 0.1
"""A load has this long at least, however fast computing is."""
_LEAST_PAGES = 2
"""Fewer missing pages are computed: a round trip would cost more than it saves."""


class PagePool(Protocol):
    """What is needed of `pie.pool.client.PoolClient`."""

    async def load(
        self, pages: Many[PageId], *, groups: Many[PageKey], deadline_s: float
    ) -> list[StoredPage | None]:
        """Return each page, checked, or None where it is a miss."""
        ...

    async def store(
        self,
        headers: Many[PageHeader],
        payloads: Many[Buffer],
        *,
        groups: Many[PageKey],
        deadline_s: float,
    ) -> list[PutStatus]:
        """Offer pages and send those that are wanted."""
        ...


class PageMemory(Protocol):
    """What is needed of `pie.worker.arena.Arena`."""

    def export(self, page_id: PageSlot, part: Part) -> memoryview:
        """Return a copy of a page's part."""
        ...

    def load(self, page_id: PageSlot, part: Part, payload: memoryview) -> None:
        """Write a page's part."""
        ...


@dataclass(frozen=True, slots=True)
class PageNames:
    """What all pages of one worker have in common."""

    model_root: RootKey
    layout: PageLayout


@dataclass(slots=True)
class LoadCounts:
    """What became of loads."""

    pages: int = 0
    missed: int = 0
    """Loads that brought nothing."""
    skipped: int = 0
    """Loads that were not tried: computing is faster, or the pool did not answer a moment ago."""


class Offload:
    """Moves pages between one worker's arena and the pool.

    Built on the event loop; `wish`, `load` and `store` are the step thread's.

    Args:
        pool: The pool.
        memory: The arena.
        names: What goes into headers.
        put: The engine's inbox.
        limit_s: Longest load or store, copying included; a page whose copy has begun is finished.
        secret: 32 bytes that all of the cluster share, where pages are keyed with them.
    """

    def __init__(
        self,
        pool: PagePool,
        memory: PageMemory,
        names: PageNames,
        *,
        put: Callable[[Command], None],
        limit_s: float,
        secret: bytes | None = None,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._names = names
        self._put = put
        self._limit_s = limit_s
        self._checksum = Checksum(secret)
        self._loop = asyncio.get_running_loop()
        self._copies = concurrent.futures.ThreadPoolExecutor(1, "pie-copy")
        self._tasks: set[asyncio.Task[None]] = set()
        self._wishes = 0
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = 0.0
        self.rate = Rate(0.0, half_life_tokens=32_768)
        self.counts = LoadCounts()

    def wish(self, sequence: Sequence, compute: Rate) -> int:
        """Return how many pages after its frozen ones a sequence should load; 0 to compute them."""
        working_set = sequence.working_set
        pages = len(working_set.keys) - working_set.frozen
        if pages < _LEAST_PAGES:
            return 0
        if time.monotonic() < self._paused_until_s:
            self.counts.skipped += 1
            return 0
        if self.rate.is_known and self.rate.per_s < compute.per_s:
            self._wishes += 1
            if self._wishes % _PROBE_EVERY:
                self.counts.skipped += 1
                return 0
        return pages

    def load(self, sequence: Sequence, compute: Rate) -> None:
        """Fetch the pages that `sequence` has reserved; `LoadEnded` comes when that is over."""
        working_set = sequence.working_set
        first = working_set.frozen
        job = _LoadJob(
            sequence,
            slots=tuple(working_set.pages[first:]),
            keys=tuple(working_set.keys[first : len(working_set.pages)]),
            groups=tuple(group_keys(working_set.keys)[first : len(working_set.pages)]),
            deadline_s=min(
                self._limit_s,
                max(_LEAST_LOAD_S, compute.seconds(sequence.missing)),
            ),
        )
        self._loop.call_soon_threadsafe(self._spawn_load, job)

    def store(self, batch: Many[PageToStore]) -> None:
        """Offer pinned pages to the pool; `StoreEnded` comes when that is over."""
        self._loop.call_soon_threadsafe(self._spawn_store, tuple(batch))

    async def close(self) -> None:
        """Stop all transfers. The engine must be at rest: nobody is told how they ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._copies.shutdown)

    def _spawn_load(self, job: _LoadJob) -> None:
        self._keep(self._loop.create_task(self._run_load(job)))

    def _spawn_store(self, batch: tuple[PageToStore, ...]) -> None:
        self._keep(self._loop.create_task(self._run_store(batch)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_load(self, job: _LoadJob) -> None:
        started = time.monotonic()
        pages = await self._fetch(job, started + job.deadline_s)
        self.counts.pages += pages
        self.counts.missed += not pages
        seconds = time.monotonic() - started
        self._note_answer(stalled=not pages and seconds >= _STALLED * job.deadline_s)
        self._put(LoadEnded(job.sequence, pages, seconds))

    def _note_answer(self, *, stalled: bool) -> None:
        if not stalled:
            self._pause_s = _FIRST_PAUSE_S
            return
        log.warning("the pool does not answer; no load is tried for %g s", self._pause_s)
        self._paused_until_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _fetch(self, job: _LoadJob, deadline: float) -> int:
        """Fetch and write leading pages, group by group; return how many. Writing has ended then."""
        written = 0
        writing: asyncio.Future[int] | None = None
        write_until = deadline - job.deadline_s + self._limit_s
        for start in range(0, len(job.keys), GROUP_PAGES):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or job.sequence.state is SequenceState.FINISHED:
                break
            end = min(start + GROUP_PAGES, len(job.keys))
            run = await self._fetch_group(job, start, end, left_s)
            # The next group is fetched while this one is written.
            if writing is not None:
                written += await writing
            writing = self._loop.run_in_executor(
                self._copies, self._write, job.slots[start : start + len(run)], run, write_until
            )
            if len(run) < end - start:
                break
        if writing is not None:
            written += await writing
        return written

    async def _fetch_group(
        self, job: _LoadJob, start: int, end: int, deadline_s: float
    ) -> list[tuple[StoredPage, ...]]:
        """Return the parts of each leading page from `start` on that is there completely."""
        parts = self._names.layout.parts
        wanted = [PageId(key, part) for key in job.keys[start:end] for part in parts]
        groups = [group for group in job.groups[start:end] for _ in parts]
        try:
            got = await self._pool.load(wanted, groups=groups, deadline_s=deadline_s)
        except Exception:
            log.exception("loading pages from the pool failed")
            return []
        run: list[tuple[StoredPage, ...]] = []
        for index in range(0, len(got), len(parts)):
            page = tuple(part for part in got[index : index + len(parts)] if part is not None)
            if len(page) < len(parts) or not all(map(self._fits, page)):
                break
            run.append(page)
        return run

    def _fits(self, part: StoredPage) -> bool:
        """Say whether a payload is one of this model's: keys say so, sizes are checked all the same."""
        header, layout = part.header, self._names.layout
        return (
            header.model_root == self._names.model_root
            and header.layout_id == layout.layout_id
            and part.payload.nbytes == layout.part_bytes(header.part)
        )

    def _write(
        self, slots: Many[PageSlot], pages: Many[tuple[StoredPage, ...]], until_s: float
    ) -> int:
        for count, (slot, page) in enumerate(zip(slots, pages, strict=True)):
            if time.monotonic() > until_s:
                return count
            try:
                for part in page:
                    self._memory.load(slot, part.header.part, part.payload)
            except Exception:
                log.exception("a page from the pool could not be written")
                return count
        return len(pages)

    async def _run_store(self, batch: tuple[PageToStore, ...]) -> None:
        stored = 0
        now_s = time.monotonic()
        # What is copied must be sent too: half of the time for each.
        copy_until_s, until_s = now_s + self._limit_s / 2, now_s + self._limit_s
        try:
            # Not cut short: as long as the thread copies, the pages must stay pinned.
            copied = await self._loop.run_in_executor(self._copies, self._read, batch, copy_until_s)
            stored = await self._send(batch, copied, until_s - time.monotonic())
        except Exception:
            log.exception("storing pages in the pool failed")
        self._put(StoreEnded(stored))

    async def _send(
        self,
        batch: Many[PageToStore],
        copied: Many[tuple[PageHeader, memoryview]],
        left_s: float,
    ) -> int:
        if not copied or left_s <= 0:
            return 0
        parts = len(self._names.layout.parts)
        statuses = await self._pool.store(
            [header for header, _ in copied],
            [payload for _, payload in copied],
            groups=[page.group for page in batch for _ in range(parts)][: len(copied)],
            deadline_s=left_s,
        )
        kept = (PutStatus.STORED, PutStatus.HELD, PutStatus.PENDING)
        return sum(
            all(status in kept for status in statuses[index : index + parts])
            for index in range(0, len(statuses), parts)
        )

    def _read(
        self, batch: tuple[PageToStore, ...], until_s: float
    ) -> list[tuple[PageHeader, memoryview]]:
        """Copy pages out while there is time: all parts of a page, or none."""
        layout = self._names.layout
        copied: list[tuple[PageHeader, memoryview]] = []
        for entry in batch:
            if time.monotonic() > until_s:
                break
            for part in layout.parts:
                payload = self._memory.export(entry.slot, part)
                header = PageHeader(
                    key=entry.page.key,
                    parent=entry.page.parent,
                    index=entry.page.index,
                    part=part,
                    model_root=self._names.model_root,
                    dtype=layout.dtype,
                    layout_id=layout.layout_id,
                    page_tokens=layout.page_tokens,
                    raw_bytes=payload.nbytes,
                    checksum=self._checksum.digest(payload),
                    tenant_tag=entry.page.tenant_tag,
                )
                copied.append((header, payload))
        return copied


@dataclass(frozen=True, slots=True)
class _LoadJob:
    """What one load is to bring."""

    sequence: Sequence
    slots: tuple[PageSlot, ...]
    keys: tuple[PageKey, ...]
    groups: tuple[PageKey, ...]
    deadline_s: float
