"""Stores: pages that are copied out of device memory, and offered to the pool and the lower tiers.

Covers one batch at a time, cut into copies that are bounded in bytes. Does not cover which pages
wait (`pie.worker.stores`) or what lies in the lower tiers (`pie.worker.lower_tiers`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence as Many

from pie.page.events import Part
from pie.pool.side_threads import SideThreads
from pie.pool.tier import id_of
from pie.wire.messages import PutStatus
from pie.worker.commands import StoreEnded
from pie.worker.in_pool import InPool
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import CopiedPart, PageCopies
from pie.worker.page_pool import PagePool
from pie.worker.stores import PageToStore

log = logging.getLogger("pie.worker.storing")

_COPY_BYTES = 64 << 20
"""Most bytes of a batch that are copied out at once, unless one page or snapshot alone is larger.
They are in no tier's budget; a disk that hangs keeps as many once more."""
_THERE = frozenset({PutStatus.STORED, PutStatus.HELD})


class Storing:
    """Stores batches of pinned pages. For one event loop.

    Args:
        copies: What copies pages out.
        in_pool: Told what the pool took.
        pool: The pool, where there is one.
        tiers: Host memory and disk, where there are any.
    """

    def __init__(
        self,
        copies: PageCopies,
        in_pool: InPool,
        *,
        pool: PagePool | None,
        tiers: LowerTiers | None,
    ) -> None:
        self._copies = copies
        self._in_pool = in_pool
        self._pool = pool
        self._tiers = tiers
        # One that waits for the disk must not keep the other waiting.
        self._copying = SideThreads("pie-copy")
        self._putting = SideThreads("pie-store")
        self._is_putting = False

    @property
    def threads(self) -> tuple[SideThreads, ...]:
        """The threads that it copies on, for who closes it."""
        return self._copying, self._putting

    async def run(
        self, batch: Many[PageToStore], limit_s: float, *, to_pool: bool = True
    ) -> StoreEnded:
        """Store a batch as far as that goes in `limit_s`, copying included, and say how far.

        A page whose copy has begun is finished. Unless `to_pool` the lower tiers alone are offered it.
        """
        pool = self._pool if to_pool else None
        loop, until_s = asyncio.get_running_loop(), time.monotonic() + limit_s
        sent: list[bool] = []
        put: list[bool] = []
        try:
            for some in self._cut(batch):
                # What is copied must be sent too: half of the time that is left for each.
                copy_until_s = (time.monotonic() + until_s) / 2
                # Not cut short: as long as the thread copies, the pages must stay pinned.
                copied = await loop.run_in_executor(self._copying, self._read, some, copy_until_s)
                each_sent, each_put = await asyncio.gather(
                    self._send(pool, some, copied, until_s), self._put_below(copied, until_s)
                )
                sent += each_sent
                put += each_put
                if len(copied) < len(some):
                    break
        except Exception:
            log.exception("storing pages failed")
        if pool is None:
            return StoreEnded(0, sum(put))
        again = [to for to, is_there in itertools.zip_longest(batch, sent) if not is_there]
        return StoreEnded(sum(sent), sum(sent), tuple(again))

    def _cut(self, batch: Many[PageToStore]) -> Iterator[list[PageToStore]]:
        """Cut a batch into runs that are copied out together."""
        layout = self._copies.names.layout
        some: list[PageToStore] = []
        total = 0
        for entry in batch:
            size = sum(layout.part_bytes(part) for part in self._parts_of(entry))
            if some and total + size > _COPY_BYTES:
                yield some
                some, total = [], 0
            some.append(entry)
            total += size
        if some:
            yield some

    def _parts_of(self, entry: PageToStore) -> tuple[Part, ...]:
        return (Part.STATE,) if entry.is_state else self._copies.names.layout.attention_parts

    def _read(self, batch: Many[PageToStore], until_s: float) -> list[list[CopiedPart]]:
        """Copy pages out while there is time: all parts of a page, or none."""
        copied: list[list[CopiedPart]] = []
        for entry in batch:
            if time.monotonic() > until_s:
                break
            copied.append(self._copies.copy(entry.slot, entry.page, self._parts_of(entry)))
        return copied

    async def _put_below(self, copied: Many[list[CopiedPart]], until_s: float) -> list[bool]:
        """Store copied pages in the lower tiers; say of each whether it is there."""
        tiers = self._tiers
        if tiers is None or self._is_putting:
            return []
        kept: list[bool] = []

        def put() -> None:
            try:
                for page in copied:
                    if time.monotonic() > until_s:
                        break
                    kept.append(tiers.put(page))
            except Exception:
                log.exception("pages could not be stored in lower tiers")
            finally:
                self._is_putting = False

        self._is_putting = True
        putting = asyncio.get_running_loop().run_in_executor(self._putting, put)
        # A disk that hangs keeps its thread and these copies, and no others come to it.
        await asyncio.wait([putting], timeout=max(0.0, until_s - time.monotonic()))
        return list(kept)

    async def _send(
        self,
        pool: PagePool | None,
        batch: Many[PageToStore],
        copied: Many[list[CopiedPart]],
        until_s: float,
    ) -> list[bool]:
        """Offer copied pages to the pool; say of each whether all its parts are there."""
        left_s = until_s - time.monotonic()
        if pool is None or not copied or left_s <= 0:
            return [False] * len(copied)
        parts = [part for page in copied for part in page]
        groups = [to.group for to, page in zip(batch, copied, strict=False) for _ in page]
        try:
            statuses = await pool.store(
                [header for header, _ in parts],
                [payload for _, payload in parts],
                groups=groups,
                deadline_s=left_s,
            )
        except Exception:
            log.exception("storing pages in the pool failed")
            return [False] * len(copied)
        self._in_pool.note(
            id_of(header)
            for (header, _), status in zip(parts, statuses, strict=True)
            if status in _THERE
        )
        each = iter(statuses)
        return [all(s in _THERE for s in itertools.islice(each, len(page))) for page in copied]
