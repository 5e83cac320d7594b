"""Between device memory and what is below it: stores behind a step's back, loads before prefill.

Covers moving pages on background threads and, where there is a pool, on the event loop. Does not
cover which pages wait to be stored (`pie.worker.stores`), what lies in host memory and on disk
(`pie.worker.lower_tiers`), whether a load is worth its time (`pie.worker.load_choice`) or how the
pool is reached (`pie.pool.client`).

A load that takes twice as long as estimated, or longer than computing the same tokens would, is
given up: what came until then is kept, the rest is computed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import time
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from pie.page.events import Part
from pie.page.format import PageHeader
from pie.page.key import PageKey
from pie.page.layout import PageLayout
from pie.page.lookup import LookupStatus
from pie.pool.placement import GROUP_PAGES, group_keys
from pie.pool.tier import Buffer, PageId, StoredPage
from pie.wire.messages import LoadDecision, PutStatus
from pie.worker.batch import StateSlot
from pie.worker.commands import Command, LoadEnded, StoreEnded
from pie.worker.load_choice import (
    LoadChoice,
    Loaded,
    LoadTier,
    Run,
    chosen_pages,
    estimate_s,
    is_measured,
    without_loads,
)
from pie.worker.load_job import LoadJob, PageToLoad, RunToLoad
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import CopiedPart, PageCopies, Piece
from pie.worker.rates import Rate
from pie.worker.sequence import Sequence
from pie.worker.stalls import Stalls
from pie.worker.stores import PageToStore

log = logging.getLogger("pie.worker.offload")

_STALLED = 0.9
"""A load that took this part of its time was given up; event loops round to milliseconds."""
_LEAST_LOAD_S = 0.1
"""A load has this long at least, however fast computing is."""
_OVERRUN = 2.0
"""How many times its estimate a load may take: rates of a busy machine vary by half."""
_LEAST_POOL_PAGES = 2
"""Fewer pages are computed: a round trip would cost more than it saves."""


class PagePool(Protocol):
    """What is needed of `pie.pool.client.PoolClient`."""

    async def lookup(
        self, pages: Many[PageId], *, groups: Many[PageKey], deadline_s: float
    ) -> list[LookupStatus]:
        """Say what is known of each page."""
        ...

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


@dataclass(slots=True)
class LoadCounts:
    """What became of loads."""

    pages: int = 0
    missed: int = 0
    """Loads that brought nothing."""
    overran: int = 0
    """Loads that were given up because they took too long."""
    paused: int = 0
    """Loads that were not tried, because the place did not answer a moment ago."""


class Offload:
    """Moves pages between one worker's device memory, its lower tiers and the pool.

    Built on the event loop; `wish`, `load` and `store` are the step thread's.

    Args:
        copies: The arena, and what names its pages.
        pool: The pool, where there is one.
        tiers: Host memory and disk, where there are any.
        page_tokens: Tokens in a page.
        put: The engine's inbox.
        limit_s: Longest load or store, copying included; a page whose copy has begun is finished.
    """

    def __init__(
        self,
        copies: PageCopies,
        *,
        pool: PagePool | None = None,
        tiers: LowerTiers | None = None,
        put: Callable[[Command], None],
        limit_s: float,
    ) -> None:
        self._copies = copies
        self._pool = pool
        self.tiers = tiers
        self._put = put
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        # One that waits for the disk must not keep the others waiting.
        self._copying = concurrent.futures.ThreadPoolExecutor(1, "pie-copy")
        self._storing = concurrent.futures.ThreadPoolExecutor(1, "pie-store")
        self._loading = {
            tier: concurrent.futures.ThreadPoolExecutor(1, f"pie-load-{tier}") for tier in LoadTier
        }
        self._is_storing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.choice = LoadChoice(copies.names.layout.page_tokens)
        self.stalls = {tier: Stalls(tier.value) for tier in LoadTier}
        self.counts = LoadCounts()

    @property
    def layout(self) -> PageLayout:
        """What a page holds."""
        return self._copies.names.layout

    def wish(self, sequence: Sequence, compute: Rate) -> int:
        """Return how many pages after its frozen ones a sequence should load; 0 to compute them."""
        runs = self._runs(sequence)
        sequence.load_decision = None
        if not runs:
            return 0
        decision = sequence.load_decision = self.choice.decide(runs, compute)
        chosen = chosen_pages(decision)
        if self._has_states and 0 < chosen < sum(run.pages for run in runs):
            # A recurrent model cannot go on from the middle of what was found for it.
            sequence.load_decision = without_loads(decision)
            return 0
        return chosen

    def load(self, sequence: Sequence, compute: Rate) -> None:
        """Fetch the pages that `sequence` has reserved; `LoadEnded` comes when that is over."""
        decision = sequence.load_decision
        assert decision is not None
        state = sequence.working_set.state
        wanted_s = compute.seconds(sequence.missing)
        if is_measured(decision):
            wanted_s = min(wanted_s, _OVERRUN * estimate_s(decision))
        job = LoadJob(
            sequence,
            self._runs_to_load(sequence, decision),
            self._copies,
            state_slot=None if state is None else state.target,
            wanted_s=min(self._limit_s, max(_LEAST_LOAD_S, wanted_s)),
            limit_s=self._limit_s,
        )
        self._loop.call_soon_threadsafe(self._spawn_load, job)

    def store(self, batch: Many[PageToStore]) -> None:
        """Copy pinned pages to lower tiers and the pool; `StoreEnded` comes when that is over."""
        self._loop.call_soon_threadsafe(self._spawn_store, tuple(batch))

    async def close(self) -> None:
        """Stop all transfers. The engine must be at rest: nobody is told how they ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for threads in (self._copying, self._storing, *self._loading.values()):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)

    def _runs(self, sequence: Sequence) -> list[Run]:
        """Return where the pages after a sequence's frozen ones can be had."""
        keys, runs = sequence.working_set.loadable_keys, list[Run]()
        if self.tiers is not None:
            for run in self.tiers.runs(keys, held=sequence.working_set.frozen):
                if self.stalls[run.tier].is_paused:
                    self.counts.paused += 1
                    return runs
                runs.append(run)
        if runs and self._has_states:
            return runs
        left = len(keys) - sum(run.pages for run in runs)
        if self._pool is not None and left >= _LEAST_POOL_PAGES:
            if self.stalls[LoadTier.POOL].is_paused:
                self.counts.paused += 1
            else:
                runs.append(Run(LoadTier.POOL, left))
        return runs

    def _runs_to_load(self, sequence: Sequence, decision: LoadDecision) -> list[RunToLoad]:
        """Return what was chosen, with the slots that were reserved for it.

        Of a recurrent model's states only the one after the last page is wanted; which page of the
        pool's that is, is asked of it.
        """
        working_set, parts = sequence.working_set, self._copies.names.layout.attention_parts
        last = working_set.frozen + chosen_pages(decision) - 1
        groups = group_keys(working_set.keys)
        at = working_set.frozen
        runs: list[RunToLoad] = []
        for source in decision.sources:
            if not source.chosen:
                break
            tier = LoadTier(source.tier)
            pages = [
                PageToLoad(
                    tuple(
                        Piece(PageId(working_set.keys[i], part), working_set.pages[i])
                        for part in parts
                    ),
                    working_set.keys[i],
                    groups[i],
                )
                for i in range(at, at + source.pages)
            ]
            state = working_set.state
            if state is not None and tier is not LoadTier.POOL and last < at + source.pages:
                assert state.target is not None, "a slot was reserved with the pages"
                pages[-1] = pages[-1].with_state(state.target)
            runs.append(RunToLoad(tier, tuple(pages)))
            at += source.pages
        return runs

    def _spawn_load(self, job: LoadJob) -> None:
        self._keep(self._loop.create_task(self._run_load(job)))

    def _spawn_store(self, batch: tuple[PageToStore, ...]) -> None:
        self._keep(self._loop.create_task(self._run_store(batch)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_load(self, job: LoadJob) -> None:
        for run in job.runs:
            if job.left_s <= 0 or not job.is_wanted():
                break
            before, began_s = job.pages, time.monotonic()
            if run.tier is LoadTier.POOL:
                await self._load_from_pool(job, run)
            else:
                await self._load_from_tier(job, run)
            pages, seconds = job.pages - before, time.monotonic() - began_s
            job.loaded.append(Loaded(run.tier, pages, seconds))
            self.stalls[run.tier].note(
                stalled=not pages and job.is_wanted() and seconds >= _STALLED * job.wanted_s
            )
            if pages < len(run.pages):
                break
        pages = job.end()
        wanted = sum(len(run.pages) for run in job.runs)
        job.overran = pages < wanted and job.seconds >= _STALLED * job.wanted_s
        self.counts.pages += pages
        self.counts.missed += not pages
        self.counts.overran += job.overran
        self._put(
            LoadEnded(
                job.sequence, pages, job.seconds, job.has_state, tuple(job.loaded), job.overran
            )
        )

    async def _load_from_tier(self, job: LoadJob, run: RunToLoad) -> None:
        """Write pages that lie in host memory or on disk, on a thread."""
        tiers = self.tiers
        assert tiers is not None

        def load() -> None:
            tiers.expect([piece.page for page in run.pages for piece in page.pieces])
            for page in run.pages:
                if job.left_s <= 0 or not job.is_wanted():
                    break

                def write(parts: Many[StoredPage], page: PageToLoad = page) -> bool:
                    return job.write(page, parts)

                if not tiers.load(page.pieces, write):
                    break

        loading = self._loop.run_in_executor(self._loading[run.tier], _logged, load)
        # A disk that hangs keeps its thread; the load ends all the same.
        await asyncio.wait([loading], timeout=max(0.0, job.left_s))
        if loading.done():
            loading.result()
        else:
            job.end()

    async def _load_from_pool(self, job: LoadJob, run: RunToLoad) -> None:
        """Fetch and write leading pages, group by group. Writing has ended then."""
        if job.state_slot is not None:
            run = await self._up_to_snapshot(job, run, job.state_slot)
        writing: asyncio.Future[None] | None = None
        for start in range(0, len(run.pages), GROUP_PAGES):
            left_s = job.left_s
            if left_s <= 0 or not job.is_wanted():
                break
            pages = run.pages[start : start + GROUP_PAGES]
            came = await self._fetch(pages, left_s)
            # The next group is fetched while this one is written.
            if writing is not None:
                await writing
            writing = self._loop.run_in_executor(
                self._loading[run.tier], self._write, job, pages[: len(came)], came
            )
            if len(came) < len(pages):
                break
        if writing is not None:
            await writing

    async def _up_to_snapshot(self, job: LoadJob, run: RunToLoad, slot: StateSlot) -> RunToLoad:
        """Return the pages up to the last one whose snapshot the pool has, with that one."""
        assert self._pool is not None
        try:
            statuses = await self._pool.lookup(
                [PageId(page.key, Part.STATE) for page in run.pages],
                groups=[page.group for page in run.pages],
                deadline_s=max(job.left_s, 0.0),
            )
        except Exception:
            log.exception("asking the pool for snapshots failed")
            statuses = []
        count = len(statuses)
        while count and statuses[count - 1] is not LookupStatus.HIT:
            count -= 1
        pages = run.pages[:count]
        return RunToLoad(run.tier, (*pages[:-1], *(page.with_state(slot) for page in pages[-1:])))

    async def _fetch(
        self, pages: Many[PageToLoad], deadline_s: float
    ) -> list[tuple[StoredPage, ...]]:
        """Return the parts of each leading page that the pool has completely."""
        assert self._pool is not None
        wanted = [piece.page for page in pages for piece in page.pieces]
        groups = [page.group for page in pages for _ in page.pieces]
        try:
            got = iter(await self._pool.load(wanted, groups=groups, deadline_s=deadline_s))
        except Exception:
            log.exception("loading pages from the pool failed")
            return []
        run: list[tuple[StoredPage, ...]] = []
        for page in pages:
            parts = [part for _, part in zip(page.pieces, got, strict=False) if part is not None]
            if len(parts) < len(page.pieces) or not all(map(self._copies.fits, parts)):
                break
            run.append(tuple(parts))
        return run

    def _write(
        self, job: LoadJob, pages: Many[PageToLoad], came: Many[tuple[StoredPage, ...]]
    ) -> None:
        for page, parts in zip(pages, came, strict=True):
            if not job.write(page, parts):
                break

    async def _run_store(self, batch: tuple[PageToStore, ...]) -> None:
        now_s = time.monotonic()
        # What is copied must be sent too: half of the time for each.
        copy_until_s, until_s = now_s + self._limit_s / 2, now_s + self._limit_s
        sent: list[bool] = []
        kept: list[bool] = []
        try:
            # Not cut short: as long as the thread copies, the pages must stay pinned.
            copied = await self._loop.run_in_executor(
                self._copying, self._read, batch, copy_until_s
            )
            sent, kept = await asyncio.gather(
                self._send(batch, copied, until_s), self._put_below(copied, until_s)
            )
        except Exception:
            log.exception("storing pages failed")
        taken = kept if self._pool is None else sent
        self._put(StoreEnded(sum(sent), sum(taken)))

    async def _put_below(self, copied: Many[list[CopiedPart]], until_s: float) -> list[bool]:
        """Store copied pages in the lower tiers; say of each whether it is there."""
        tiers = self.tiers
        if tiers is None or self._is_storing:
            return []
        kept: list[bool] = []
        self._is_storing = True

        def put() -> None:
            try:
                for page in copied:
                    if time.monotonic() > until_s:
                        break
                    kept.append(tiers.put(page))
            finally:
                self._is_storing = False

        storing = self._loop.run_in_executor(self._storing, _logged, put)
        # A disk that hangs keeps its thread and these copies, and no other batch comes to it.
        await asyncio.wait([storing], timeout=max(0.0, until_s - time.monotonic()))
        return list(kept)

    async def _send(
        self, batch: Many[PageToStore], copied: Many[list[CopiedPart]], until_s: float
    ) -> list[bool]:
        """Offer copied pages to the pool; say of each whether it is there."""
        left_s = until_s - time.monotonic()
        if self._pool is None or not copied or left_s <= 0:
            return []
        parts = [part for page in copied for part in page]
        groups = [to.group for to, page in zip(batch, copied, strict=False) for _ in page]
        try:
            statuses = iter(
                await self._pool.store(
                    [header for header, _ in parts],
                    [payload for _, payload in parts],
                    groups=groups,
                    deadline_s=left_s,
                )
            )
        except Exception:
            log.exception("storing pages in the pool failed")
            return []
        kept = (PutStatus.STORED, PutStatus.HELD, PutStatus.PENDING)
        return [
            all(map(kept.__contains__, itertools.islice(statuses, len(page)))) for page in copied
        ]

    def _parts_of(self, entry: PageToStore) -> tuple[Part, ...]:
        return (Part.STATE,) if entry.is_state else self._copies.names.layout.attention_parts

    @property
    def _has_states(self) -> bool:
        return Part.STATE in self._copies.names.layout.parts

    def _read(self, batch: tuple[PageToStore, ...], until_s: float) -> list[list[CopiedPart]]:
        """Copy pages out while there is time: all parts of a page, or none."""
        copied: list[list[CopiedPart]] = []
        for entry in batch:
            if time.monotonic() > until_s:
                break
            copied.append(self._copies.copy(entry.slot, entry.page, self._parts_of(entry)))
        return copied


def _logged(work: Callable[[], None]) -> None:
    """Do work on a thread that may outlast who waits for it."""
    try:
        work()
    except Exception:
        log.exception("moving pages failed")
