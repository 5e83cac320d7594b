"""Pages on their way from this node to others that should have them.

Covers when that is looked for, the pace, and what is done where it does not work. Does not cover what
should go where (`pie.pool.rebalance`).

A node pushes: it offers a page to each node that should keep it, and sends what is wanted. Its own copy, if
it need not keep one, goes in a later round, when all of them say again that they have theirs: a reader who
asked the new home before the page was there then still finds it at the old one. So a page is somewhere at
every moment, whoever is killed. A target that has no room without losing another page refuses, and the page
stays. Two nodes that hold the same page do not send it twice: the second is told that it is coming.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pie.index.contract import IndexMode, IndexReader, PlaceRecord
from pie.index.tasks import end
from pie.page.events import PlaceId
from pie.page.lookup import LookupStatus
from pie.policies.replication import ReplicationPolicy
from pie.pool.asking import WrongAnswerError, ask_statuses, by_bytes, names
from pie.pool.cache import Loan, TieredCache
from pie.pool.grace import Grace
from pie.pool.links import NodeLinks
from pie.pool.pace import Pace
from pie.pool.placement import Placement, view_of
from pie.pool.rebalance import GroupMove, plan
from pie.pool.side_threads import SideThreads
from pie.pool.tier import PageId, TierKind, id_of
from pie.wire.errors import WireError
from pie.wire.ids import new_request_id
from pie.wire.messages import PutPages, PutStatus, StoreWanted

log = logging.getLogger("pie.pool.migration")

T = TypeVar("T")

_LOOK_S = 0.5
_AGAIN_S = 2.0
_AGAIN_MOST_S = 60.0
"""After a round that left pages behind; twice as long after each further one in which nothing moved,
though every node answered."""
_STRAY_S = 600.0
"""Pages that a writer with an old view left here are found within so long."""
_TARGET_TIMEOUT_S = 10.0
_GRACE_S = 2.0
"""How long a copy stays after all others have theirs: what a reader may take from one node to the next,
who is told that a node is down within that."""
_GRACE_SHARE = 0.25
"""Of the time that a node has to empty itself, if that is less."""
_NOBODY_S = 2.0
"""How long a node that is to be emptied looks for others: the index tells of a new one within a second."""
_COUNT_S = 5.0
"""How long counting what is left may take; all that is held is said to be left then."""
_CLOSE_S = 0.1
"""How long closing waits for a disk, on the event loop."""
_THERE = frozenset({int(PutStatus.STORED), int(PutStatus.HELD)})


@dataclass(slots=True)
class MigrationCounters:
    """What became of pages that others should have."""

    moved: int = 0
    """Copies that were sent."""
    moved_bytes: int = 0
    left: int = 0
    """Pages that this node removed because all that should have them have had them for a while."""
    failed: int = 0
    """Pages that a target did not take; they stay, and are tried again."""


class Migration:
    """Moves the pages of one node. For one event loop.

    Args:
        here: The node's name.
        cache: What it holds.
        links: Connections to the other nodes; not closed here.
        reader: Which nodes there are.
        replication: How many keep a page.
        tiers: The tiers whose pages are moved.
        bytes_per_s: How fast, at most; 0 is no limit.
        settle_s: How long the same nodes must be up before anything moves: one that restarts is no
            reason to.
        grace_s: How long a copy stays after those that should have it do.
        on_settled: Told among which nodes (`view_of`) all pages are where they belong.
    """

    def __init__(
        self,
        here: PlaceId,
        cache: TieredCache,
        links: NodeLinks,
        reader: IndexReader,
        *,
        replication: ReplicationPolicy,
        tiers: Collection[TierKind],
        bytes_per_s: float,
        settle_s: float,
        grace_s: float = _GRACE_S,
        on_settled: Callable[[str], None] = lambda _view: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = MigrationCounters()
        self.to_move = 0
        """Pages of the round under way that have not had their turn."""
        self._here = here
        self._cache = cache
        self._links = links
        self._reader = reader
        self._replication = replication
        self._tiers = tiers
        self._bytes_per_s = bytes_per_s
        self._settle_s = settle_s
        self._on_settled = on_settled
        self._clock = clock
        self._pace = Pace(bytes_per_s, clock())
        self._grace = Grace(grace_s)
        self._silent: set[PlaceId] = set()
        """Nodes that did not answer in this round: they are not asked again before the next."""
        self._should_look = False
        self._turn = asyncio.Lock()
        self._thread = SideThreads("pie-pool-move")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look after the pages from now on."""
        self._task = asyncio.create_task(self._run(), name=f"migrate {self._here}")

    def look_again(self) -> None:
        """Look for pages that belong elsewhere soon, because what belongs where has changed."""
        self._should_look = True

    async def close(self) -> None:
        """Stop for good; a page that is on its way may or may not arrive, and stays here.

        A disk that hangs keeps the thread, and nobody else.
        """
        await self._stop()
        self._thread.close(_CLOSE_S)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end([task])

    async def empty(self, timeout_s: float) -> int:
        """Hand all pages to others, as far as that goes in time; return how many nobody took, at most.

        The pace is what the time asks for, where that is more than the limit.
        """
        began_s = self._clock()
        until_s = began_s + timeout_s
        await self._stop()
        if self._bytes_per_s:
            held = self._sum(self._cache.bytes_by_tier())
            self._pace = Pace(max(self._bytes_per_s, 2 * held / max(timeout_s, 0.1)), self._clock())
        self._grace.grace_s = min(self._grace.grace_s, _GRACE_SHARE * timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._clock() < until_s:
                    done = await self._round(draining=True)
                    if done and (self._has_takers() or self._clock() - began_s >= _NOBODY_S):
                        break
                    await asyncio.sleep(min(_LOOK_S, max(0.0, until_s - self._clock())))
        try:
            async with asyncio.timeout(_COUNT_S):
                return await self._in_thread(self._count_left)
        except TimeoutError:
            return self._sum(self._cache.pages_by_tier())

    def _sum(self, by_tier: Mapping[str, int]) -> int:
        return sum(
            by_tier[kind.name.lower()] for kind in self._tiers if kind.name.lower() in by_tier
        )

    def _count_left(self) -> int:
        """Count the pages that nobody took; takes seconds for a million on a disk."""
        held = map(id_of, self._cache.headers(self._tiers))
        return sum(page not in self._grace for page in held)

    def _has_takers(self) -> bool:
        nodes = self._links.nodes()
        return any(not nodes[place].draining for place in nodes if place != self._here)

    async def _run(self) -> None:
        seen = ""
        since_s = self._clock()
        due_s = float("inf")
        pause_s = _AGAIN_S
        # Until `_stop`: a cancellation alone may be lost.
        while self._task is not None:
            await asyncio.sleep(_LOOK_S)
            if self._reader.mode is not IndexMode.OK:
                continue
            now_s = self._clock()
            view = view_of(self._links.nodes())
            if view != seen:
                seen, since_s, due_s, pause_s = view, now_s, now_s + self._settle_s, _AGAIN_S
            if self._should_look:
                due_s, pause_s = min(due_s, now_s), _AGAIN_S
            if now_s < due_s:
                continue
            self._should_look = False
            before = self.counters.moved + self.counters.left
            try:
                done = await self._round(draining=False)
            except Exception:
                log.exception("%s could not hand pages to others, and tries again", self._here)
                done = False
            if done:
                log.debug("%s: all pages are where they belong since %.1f s", self._here, since_s)
                self._on_settled(view)
                due_s, pause_s = self._clock() + _STRAY_S, _AGAIN_S
            else:
                if self._silent or self.counters.moved + self.counters.left > before:
                    pause_s = _AGAIN_S
                due_s, pause_s = self._clock() + pause_s, min(2 * pause_s, _AGAIN_MOST_S)

    async def _round(self, *, draining: bool) -> bool:
        """Look at all pages once; say whether all are where they belong."""
        async with self._turn:
            nodes = dict(self._links.nodes())
            if not draining and self._here not in nodes:
                return False
            if draining:
                nodes.pop(self._here, None)
            self._grace.begin(view_of(nodes))
            self._silent.clear()
            placement = Placement(nodes, self._replication)
            moves = await self._in_thread(lambda: self._plan(placement))
            self.to_move = sum(len(move.pages) for move in moves)
            done = True
            try:
                for move in moves:
                    done = await self._move(move, nodes) and done
                    self.to_move -= len(move.pages)
            finally:
                self.to_move = 0
            return done

    def _plan(self, placement: Placement) -> list[GroupMove]:
        return plan(self._cache.headers(self._tiers), self._here, placement)

    async def _move(self, move: GroupMove, nodes: Mapping[PlaceId, PlaceRecord]) -> bool:
        """Hand the pages of a group to all that should have them; say whether they do."""
        there = set(move.pages)
        for target in move.targets:
            there &= await self._hand(move.pages, nodes[target])
        if not move.leaves:
            return len(there) == len(move.pages)
        now_s = self._clock()
        going = [p for p in move.pages if p in there and self._grace.may_leave(p, now_s)]
        gone = await self._in_thread(lambda: self._remove(going)) if going else []
        for page in gone:
            self._grace.left(page)
        self.counters.left += len(gone)
        return len(gone) == len(move.pages)

    def _remove(self, pages: list[PageId]) -> list[PageId]:
        """Remove pages, and return those that went; one that is being read goes at the next round."""
        return [page for page in pages if self._cache.remove(page, self._tiers)]

    async def _hand(self, pages: tuple[PageId, ...], target: PlaceRecord) -> set[PageId]:
        """Bring pages to a node; return those that it has now."""
        there: set[PageId] = set()
        if target.place in self._silent:
            self.counters.failed += len(pages)
            return there
        try:
            async with asyncio.timeout(_TARGET_TIMEOUT_S):
                client = await self._links.open(target)
            offer = StoreWanted(new_request_id(), client.epoch, names(pages))
            statuses = await ask_statuses(client, offer, _TARGET_TIMEOUT_S)
            there |= {p for p, s in zip(pages, statuses, strict=True) if s == LookupStatus.HIT}
            wanted = [at for at, status in enumerate(statuses) if status == LookupStatus.MISS]
            sizes = [self._cache.payload_bytes(page) for page in pages]
            for some in by_bytes(wanted, sizes):
                size = sum(sizes[at] for at in some)
                await asyncio.sleep(self._pace.delay_s(size, self._clock()))
                there |= await self._send([pages[at] for at in some], target)
        except (WireError, WrongAnswerError, TimeoutError) as error:
            self._silent.add(target.place)
            log.info("%s: %s takes no pages now: %s", self._here, target.place, error)
        self.counters.failed += len(pages) - len(there)
        return there

    async def _send(self, pages: list[PageId], target: PlaceRecord) -> set[PageId]:
        """Send pages that a node wants; return those that it has now."""
        client = await self._links.open(target)
        loans = await self._borrow(pages)
        there = set[PageId]()
        if not loans:
            return there
        headers = tuple(loan.page.header for loan in loans)
        put = PutPages(new_request_id(), client.epoch, headers, may_evict=False)
        payloads = [loan.page.payload for loan in loans]
        statuses = await ask_statuses(
            client, put, _TARGET_TIMEOUT_S, payloads, lambda: self._give_back(loans)
        )
        for header, status in zip(headers, statuses, strict=True):
            if status in _THERE:
                there.add(id_of(header))
            if status == PutStatus.STORED:
                self.counters.moved += 1
                self.counters.moved_bytes += header.raw_bytes
        return there

    async def _borrow(self, pages: list[PageId]) -> list[Loan]:
        """Pin pages, checked; those that are gone or bad are left out."""

        def borrow() -> list[Loan]:
            loans: list[Loan] = []
            try:
                for page in pages:
                    loan = self._cache.prepare_load(page, is_use=False)
                    if isinstance(loan, Loan):
                        loans.append(loan)
            except BaseException:
                self._give_back(loans)
                raise
            return loans

        return await self._in_thread(borrow, undo=self._give_back)

    def _give_back(self, loans: list[Loan]) -> None:
        """End loans, those of pages that leave with them on the thread: a disk has to remove them."""
        leaving = []
        for loan in loans:
            if self._cache.is_leaving(loan):
                leaving.append(loan)
            else:
                self._cache.complete_load(loan)
        if leaving:
            with contextlib.suppress(
                RuntimeError
            ):  # The node is closed, and all loans end with it.
                self._thread.submit(self._end, leaving)

    def _end(self, loans: list[Loan]) -> None:
        for loan in loans:
            self._cache.complete_load(loan)

    async def _in_thread(
        self, work: Callable[[], T], *, undo: Callable[[T], None] = lambda _: None
    ) -> T:
        """Do work that may wait for a disk; what comes of it is undone where nobody waits any more."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else undo(done.result())
            )
            raise
