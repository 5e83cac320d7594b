"""Pages that requests in the queue will want are brought into host memory while they wait.

Covers how much at once, and when it ends. How many requests from the head of the queue on it is done for,
policies say (`pie.policies.prefetch`). Does not cover bringing pages
into device memory once a request's turn has come (`pie.worker.offload`).

One request at a time, group by group of its prompt's pages. Pages go only where host memory has room: none
leaves for them, and no page of device memory is reserved. What is fetched for a request that ends or gets
its turn meanwhile is given up; what came by then stays as any other page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

from pie.page.groups import GROUP_PAGES, group_keys
from pie.page.key import PageKey
from pie.page.layout import PageLayout
from pie.pool.tier import PageId, id_of
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import PageCopies
from pie.worker.page_pool import PagePool
from pie.worker.sequence import Sequence, SequenceState

log = logging.getLogger("pie.worker.prefetch")

_FETCH_S: Final = 5.0
"""How long one group may take; a pool that is slower is not asked again for this request."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a waiting request will want: the pages after those that device memory holds."""

    sequence: Sequence
    keys: tuple[PageKey, ...]
    groups: tuple[PageKey, ...]


def wanted_of(sequence: Sequence) -> Wanted:
    """Return what a request will want as things are; the step thread's."""
    working_set = sequence.working_set
    held = working_set.held().pages
    keys = working_set.keys
    return Wanted(sequence, tuple(keys[held:]), tuple(group_keys(keys)[held:]))


class Prefetch:
    """Fetches for waiting requests, one after another. For one event loop."""

    def __init__(self, pool: PagePool, tiers: LowerTiers, copies: PageCopies) -> None:
        self.pages = 0
        """Pages that were brought into host memory for requests that waited."""
        self._pool = pool
        self._tiers = tiers
        self._copies = copies
        self._queue: list[Wanted] = []
        self._now: Wanted | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def _layout(self) -> PageLayout:
        return self._copies.names.layout

    def look(self, waiting: Many[Wanted]) -> None:
        """Learn which requests have come to the head of the queue, or that the one under way has left."""
        self._queue.extend(waiting)
        if self._now is not None and not _waits(self._now):
            self._give_up()
        self._next()

    async def close(self) -> None:
        """Fetch no more."""
        self._queue.clear()
        task = self._task
        self._give_up()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = self._now = None

    def _next(self) -> None:
        while self._task is None and self._queue:
            wanted = self._queue.pop(0)
            if _waits(wanted):
                self._now = wanted
                self._task = asyncio.create_task(self._run(wanted), name="pie-prefetch")
                self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = self._now = None
            self._next()

    async def _run(self, wanted: Wanted) -> None:
        try:
            for at in range(0, len(wanted.keys), GROUP_PAGES):
                keys = wanted.keys[at : at + GROUP_PAGES]
                if not await self._fetch(keys, wanted.groups[at : at + GROUP_PAGES]):
                    break
        except Exception:
            log.exception("fetching pages for a request that waits failed")

    async def _fetch(self, keys: Many[PageKey], groups: Many[PageKey]) -> bool:
        """Bring pages into host memory; say whether all are there, so that the next ones are of use."""
        parts = self._layout.attention_parts
        missing = [
            (PageId(key, part), group)
            for key, group in zip(keys, groups, strict=True)
            for part in parts
            if not self._tiers.has(PageId(key, part))
        ]
        size = sum(self._layout.part_bytes(page.part) for page, _ in missing)
        if not missing:
            return True
        if not self._tiers.has_host_room(size):
            return False
        came = await self._pool.load(
            [page for page, _ in missing],
            groups=[group for _, group in missing],
            deadline_s=_FETCH_S,
        )
        run = []
        for part in came:
            # What comes after a hole is of no use.
            if part is None or not self._copies.fits(part):
                break
            run.append((part.header, part.payload))
        kept = await asyncio.to_thread(self._tiers.put_ahead, run)
        self._tiers.in_pool.note(id_of(header) for header, _ in run[:kept])
        self.pages += kept // len(parts)
        return kept == len(missing)


def _waits(wanted: Wanted) -> bool:
    return wanted.sequence.state is SequenceState.WAITING
