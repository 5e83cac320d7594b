"""Between device memory and what is below it: loads before prefill, stores behind a step's back.

Covers loading pages on background threads and, where there is a pool, on the event loop. Does not
cover what a store does (`pie.worker.storing`), what lies in host memory and on disk
(`pie.worker.lower_tiers`), whether a load is worth its time (`pie.worker.load_choice`) or how the
pool is reached (`pie.pool.client`).

A load that takes twice as long as estimated, or longer than computing the same tokens would, is
given up: what came until then is kept, the rest is computed. Its time begins with its turn. It
waits for that as long as others before it get something, and no longer than the limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence as Many
from dataclasses import dataclass
from itertools import islice

from pie.page.events import Part
from pie.page.groups import GROUP_PAGES, group_keys
from pie.page.layout import PageLayout
from pie.page.lookup import LookupStatus
from pie.policies.policy_set import WorkerMoves
from pie.pool.side_threads import CLOSE_S, SideThreads
from pie.pool.tier import PageId, StoredPage, id_of
from pie.wire.messages import LoadDecision
from pie.worker.batch import StateSlot
from pie.worker.commands import Command, LoadEnded, StoreEnded
from pie.worker.in_pool import InPool, PoolBelow
from pie.worker.load_choice import (
    LoadChoice,
    Loaded,
    LoadTier,
    Run,
    chosen_pages,
    with_outcome,
)
from pie.worker.load_job import LoadJob, PageToLoad, RunToLoad
from pie.worker.loadable import Loadable
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import PageCopies, Piece
from pie.worker.page_pool import PagePool
from pie.worker.page_table import Below
from pie.worker.prefetch import Prefetch, wanted_of
from pie.worker.rates import Rate
from pie.worker.sequence import Sequence
from pie.worker.stalls import Stalls
from pie.worker.stores import PageToStore, StoreQueue, WriteBehind
from pie.worker.storing import Storing

log = logging.getLogger("pie.worker.offload")

_LEAST_LOAD_S = 0.1
"""A load has this long at least, however fast computing is."""
_OVERRUN = 2.0
"""How many times its estimate a load may take: rates of a busy machine vary by half."""
_JUDGED = 0.9
"""Part of the least time in which a place must have brought nothing, to be left alone."""
_LEAST_POOL_PAGES = 2
"""Fewer pages are computed: a round trip would cost more than it saves."""


@dataclass(slots=True)
class LoadCounts:
    """What became of loads."""

    missed: int = 0
    """Loads that brought nothing to a request that still wanted it."""
    overran: int = 0
    """Loads that were given up because they took too long."""
    paused: int = 0
    """Loads that were not tried, because the place did not answer a moment ago."""


class Offload:
    """Moves pages between one worker's device memory, its lower tiers and the pool.

    Built on the event loop; `wish`, `look_ahead`, `load`, `learn` and `store` are the step
    thread's.

    Args:
        copies: The arena, and what names its pages.
        pool: The pool, where there is one.
        tiers: Host memory and disk, where there are any.
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
        self.is_last = pool is None and tiers is None
        """Whether nothing is below device memory."""
        self._put = put
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.in_pool = InPool() if tiers is None else tiers.in_pool
        """What the pool has, as far as is known here."""
        self.storing = Storing(copies, self.in_pool, pool=pool, tiers=tiers)
        self._moves = WorkerMoves()
        # One that waits for the disk must not keep the others waiting.
        self._loading = {tier: SideThreads(f"pie-load-{tier}") for tier in LoadTier}
        self._jobs: set[LoadJob] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefetch: Prefetch | None = None
        # Of a recurrent model's pages only those up to a snapshot are of use, and which has one is not known.
        if pool is not None and tiers is not None and not self._has_states:
            self._prefetch = Prefetch(pool, tiers, copies)
        self._ahead_of: tuple[Sequence, ...] = ()
        """Requests at the head of the queue when they were last looked at."""
        self.choice = LoadChoice(copies.names.layout.page_tokens)
        self.stalls = {tier: Stalls(tier.value) for tier in LoadTier}
        self.counts = LoadCounts()

    @property
    def layout(self) -> PageLayout:
        """What a page holds."""
        return self._copies.names.layout

    @property
    def prefetched(self) -> int:
        """How many pages were brought into host memory for requests that waited."""
        return 0 if self._prefetch is None else self._prefetch.pages

    @property
    def stores_as_made(self) -> bool:
        """Whether pages are stored behind the step that made them: in the pool, or below."""
        return self.tiers is not None or self._moves.stores_as_made

    def set_moves(self, moves: WorkerMoves) -> None:
        """Do from now on what policies say of pages that move; from any thread."""
        self._moves = moves

    def below(self, stores: StoreQueue, parts: Many[Part]) -> Below | None:
        """Return what takes parts of pages that leave device memory, where anything does."""
        if self.is_last:
            return None
        if self.tiers is None:
            return PoolBelow(self.in_pool, parts)
        return WriteBehind(stores, self.tiers, parts)

    def wish(self, sequence: Loadable, compute: Rate) -> int:
        """Return how many pages after its frozen ones a sequence should load; 0 to compute them."""
        runs = self._runs(sequence)
        sequence.load_decision = sequence.load_wish = None
        if not runs:
            return 0
        # A recurrent model cannot go on from the middle of what was found for it.
        decision = self.choice.decide(runs, compute, ahead=self._ahead(), whole=self._has_states)
        chosen = chosen_pages(decision)
        if chosen:
            sequence.load_wish = decision
        else:
            sequence.load_decision = decision
        return chosen

    def look_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Bring into host memory what the first requests in the queue will want, while they wait."""
        most = self._moves.looks_ahead
        before, self._ahead_of = self._ahead_of, tuple(islice(waiting, most))
        if self._prefetch is not None and self._ahead_of != before:
            new = [wanted_of(one) for one in self._ahead_of if one not in before]
            self._loop.call_soon_threadsafe(self._prefetch.look, new)

    def load(self, sequence: Loadable, compute: Rate) -> None:
        """Fetch the pages that `sequence` has reserved; `LoadEnded` comes when that is over."""
        decision = sequence.load_decision = sequence.load_wish
        assert decision is not None
        state = sequence.working_set.state
        # A worker that has computed nothing yet cannot say that it would have been faster.
        wanted_s = compute.seconds(sequence.missing) if compute.is_known else self._limit_s
        longest_s = self.choice.longest_s(decision)
        if longest_s is not None:
            wanted_s = min(wanted_s, _OVERRUN * longest_s)
        job = LoadJob(
            sequence,
            self._runs_to_load(sequence, decision),
            self._copies,
            state_slot=None if state is None else state.target,
            wanted_s=min(self._limit_s, max(_LEAST_LOAD_S, wanted_s)),
            limit_s=self._limit_s,
        )
        self._jobs.add(job)
        self._loop.call_soon_threadsafe(self._spawn_load, job)

    def learn(self, ended: LoadEnded) -> None:
        """Learn how a load went, and let who waited for it know."""
        one = ended.sequence
        one.load_s = ended.seconds
        for came in ended.sources:
            self.choice.saw(came)
        if one.load_decision is not None:
            one.load_decision = with_outcome(
                one.load_decision, ended.sources, overran=ended.overran
            )

    def store(self, batch: Many[PageToStore]) -> None:
        """Copy pinned pages to lower tiers and the pool; `StoreEnded` comes when that is over."""
        self._loop.call_soon_threadsafe(self._spawn_store, tuple(batch))

    async def close(self, limit_s: float = CLOSE_S) -> None:
        """Stop all transfers. The engine must be at rest: copies may still read its pages."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._prefetch is not None:
            await self._prefetch.close()
        # One that hangs is left behind at the limit.
        threads = (*self.storing.threads, *self._loading.values())
        await asyncio.gather(*(asyncio.to_thread(thread.close, limit_s) for thread in threads))

    def _ahead(self) -> dict[LoadTier, int]:
        """Return how many pages wait for the thread of each tier."""
        jobs = list(self._jobs)
        return {
            tier: sum(job.waiting_in(tier) for job in jobs)
            for tier in (LoadTier.HOST, LoadTier.DISK)
        }

    def _runs(self, sequence: Loadable) -> list[Run]:
        """Return where the pages after a sequence's frozen ones can be had."""
        keys, runs, paused = sequence.working_set.loadable_keys, list[Run](), False
        if self.tiers is not None:
            for run in self.tiers.runs(keys, held=sequence.working_set.frozen):
                if self.stalls[run.tier].is_paused:
                    paused = True
                    if self._has_states:
                        runs.clear()  # The snapshot is at the end.
                    break
                runs.append(run)
        left = len(keys) - sum(run.pages for run in runs)
        if self._pool is None or left < _LEAST_POOL_PAGES or (runs and self._has_states):
            pass
        elif self.stalls[LoadTier.POOL].is_paused:
            paused = True
        else:
            runs.append(Run(LoadTier.POOL, left))
        self.counts.paused += paused
        return runs

    def _runs_to_load(self, sequence: Loadable, decision: LoadDecision) -> list[RunToLoad]:
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
        try:
            for run in job.runs:
                if not job.goes_on():
                    break
                before, asked_s = job.pages, time.monotonic()
                if run.tier is LoadTier.POOL:
                    began_s: float | None = asked_s
                    await self._load_from_pool(job, run)
                else:
                    began_s = await self._load_from_tier(job, run)
                pages, ended_s = job.pages - before, time.monotonic()
                if not pages and job.is_wanted() and job.is_late:
                    self._gave_up(run.tier, job, asked_s, began_s)
                turn_s = ended_s if began_s is None else began_s
                job.loaded.append(Loaded(run.tier, pages, ended_s - turn_s, turn_s - asked_s))
                if pages < len(run.pages):
                    break
        except Exception:
            log.exception("a load failed")
        finally:
            self._jobs.discard(job)
            pages = job.end()
            wanted = sum(len(run.pages) for run in job.runs)
            job.overran = pages < wanted and job.is_late
            self.counts.missed += not pages and job.is_wanted()
            self.counts.overran += job.overran
            self._put(
                LoadEnded(
                    job.sequence, pages, job.seconds, job.has_state, tuple(job.loaded), job.overran
                )
            )

    def _gave_up(self, tier: LoadTier, job: LoadJob, asked_s: float, began_s: float | None) -> None:
        """Note that a load got nothing from a tier, if that says anything of the tier."""
        stalls = self.stalls[tier]
        since_s = max(asked_s, stalls.answered_s) if began_s is None else began_s
        # What an earlier run left of a load's time may be too short to tell.
        if time.monotonic() - since_s >= _JUDGED * min(job.wanted_s, _LEAST_LOAD_S):
            stalls.gave_up(since_s)

    async def _load_from_tier(self, job: LoadJob, run: RunToLoad) -> float | None:
        """Write pages that lie in host memory or on disk, on a thread; return when it began."""
        tiers, stalls, asked_s = self.tiers, self.stalls[run.tier], time.monotonic()
        assert tiers is not None
        began_s: float | None = None

        def load() -> None:
            nonlocal began_s
            job.begin(asked_s)
            began_s = time.monotonic()
            if not job.goes_on():
                return
            tiers.expect([piece.page for page in run.pages for piece in page.pieces])
            for page in run.pages:
                if not job.goes_on():
                    break

                def write(parts: Many[StoredPage], page: PageToLoad = page) -> bool:
                    return job.write(page, parts)

                came = tiers.load(page.pieces, write)
                if came or not job.is_late:
                    stalls.answered()
                if not came:
                    break

        loading = self._loop.run_in_executor(self._loading[run.tier], _logged, load)
        while not loading.done():
            if began_s is not None:
                left_s = job.left_s
            else:
                since_s = max(asked_s, stalls.answered_s)
                left_s = min(since_s + job.wanted_s, job.write_until_s) - time.monotonic()
            if left_s <= 0:
                # A disk that hangs keeps its thread; the load ends all the same.
                job.end()
                break
            await asyncio.wait([loading], timeout=left_s)
        return began_s

    async def _load_from_pool(self, job: LoadJob, run: RunToLoad) -> None:
        """Fetch and write leading pages, group by group. Writing has ended then."""
        if job.state_slot is not None:
            run = await self._up_to_snapshot(job, run, job.state_slot)
        writing: asyncio.Future[None] | None = None
        for start in range(0, len(run.pages), GROUP_PAGES):
            if not job.goes_on():
                break
            pages = run.pages[start : start + GROUP_PAGES]
            came = await self._fetch(pages, max(job.left_s, 0.0))
            if came or not job.is_late:
                self.stalls[run.tier].answered()
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
            self.in_pool.note(id_of(part.header) for part in parts)

    async def _run_store(self, batch: tuple[PageToStore, ...]) -> None:
        ended = StoreEnded(0, 0)
        try:
            ended = await self.storing.run(batch, self._limit_s, to_pool=self._moves.stores_as_made)
        finally:
            self._put(ended)

    @property
    def _has_states(self) -> bool:
        return Part.STATE in self._copies.names.layout.parts


def _logged(work: Callable[[], None]) -> None:
    """Do work on a thread that may outlast who waits for it."""
    try:
        work()
    except Exception:
        log.exception("moving pages failed")
