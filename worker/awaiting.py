"""Requests that wait for pages which another worker is computing, until the pool has them.

Covers asking the pool for what they wait for, and their limits. Does not cover whether a wait is worth it
(`pie.router.choice`) or the load that follows (`pie.worker.offload`).

They wait before they take their place in the engine's queue, so that they hold no memory of the device.
One look asks for all of them, and for the last page of each alone: pages come to the pool in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pie.index.tasks import end
from pie.page.groups import group_keys
from pie.page.key import PageKey, page_keys, tenant_root
from pie.page.lookup import LookupStatus
from pie.pool.tier import PageId
from pie.wire.messages import Generate
from pie.worker.intake import Intake
from pie.worker.page_copies import PageNames
from pie.worker.page_pool import PagePool

log = logging.getLogger("pie.worker.awaiting")

_LOOK_EVERY_S: Final = 0.02
_LOOK_S: Final = 0.5
"""Longest wait for the pool's answer to one look."""
_LONGEST_S: Final = 60.0
"""No request waits longer, whatever a router says."""
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
"""After a wait for nothing nobody waits for so long, and after the next one for twice as long: a pool that
takes no pages now would cost every request its wait."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """One request."""

    owner: bytes
    request_id: str
    pages: tuple[PageId, ...]
    group: PageKey
    over: asyncio.Future[bool]
    """True when its wait has ended, False when nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """What is needed to know of pages."""

    pool: PagePool
    names: PageNames
    intake: Intake


class Awaiting:
    """Lets requests wait. For one event loop.

    Nobody waits before a pool is attached.

    Args:
        limit: Most requests that wait at once; those beyond do not wait.
    """

    def __init__(self, limit: int) -> None:
        self.came = 0
        """Requests whose pages came."""
        self.gave_up = 0
        """Requests that waited for nothing."""
        self._limit = limit
        self._pages: _Pages | None = None
        self._waiting: list[_Waiting] = []
        self._looking: asyncio.Task[None] | None = None
        self._paused_until_s = 0.0
        self._pause_s = _PAUSE_S
        self._closed = False

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def attach(self, pool: PagePool, names: PageNames, intake: Intake) -> None:
        """Let requests wait from now on, for pages of that model in that pool."""
        self._pages = _Pages(pool, names, intake)

    async def wait(
        self, owner: bytes, request: Generate, frames: Sequence[memoryview]
    ) -> Generate | None:
        """Wait for what a request is told to wait for.

        Returns the request with the time that it has left; None where it was cancelled meanwhile.

        Raises:
            RefusedError: It cannot be carried out; the message names what is wrong.
        """
        pages = self._pages
        if pages is None or request.await_pages < 1 or not request.await_s > 0:
            return request
        began_s = time.monotonic()
        if not await self._wait(owner, request, pages.intake.tokens(request, frames), pages.names):
            return None
        if request.deadline_s is None:
            return request
        left_s = request.deadline_s - (time.monotonic() - began_s)
        return msgspec.structs.replace(request, deadline_s=max(left_s, 0.0))

    async def _wait(
        self, owner: bytes, request: Generate, tokens: array[int], names: PageNames
    ) -> bool:
        layout = names.layout
        pages = min(request.await_pages, len(tokens) // layout.page_tokens)
        paused = time.monotonic() < self._paused_until_s
        if pages < 1 or paused or self._closed or len(self._waiting) >= self._limit:
            return True
        root = tenant_root(names.model_root, salt=request.salt)
        keys = page_keys(root, tokens[: pages * layout.page_tokens], layout.page_tokens)
        one = _Waiting(
            owner,
            request.request_id,
            tuple(PageId(keys[-1], part) for part in layout.attention_parts),
            group_keys(keys)[-1],
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(one)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="pie-awaiting")
        try:
            async with asyncio.timeout(min(request.await_s, _LONGEST_S)):
                wanted = await one.over
                self.came += wanted
                return wanted
        except TimeoutError:
            self.gave_up += 1
            self._pause()
            return True
        finally:
            self._waiting.remove(one)

    def cancel(self, owner: bytes, request_id: str) -> None:
        """Let a request that waits go: nobody wants it any more."""
        self._end(
            [one for one in self._waiting if (one.owner, one.request_id) == (owner, request_id)]
        )

    def cancel_all(self, owner: bytes | None = None) -> None:
        """Let all requests of a router go, or of all routers where None."""
        self._end([one for one in self._waiting if owner in (None, one.owner)])

    def release(self) -> None:
        """Let all go on with what there is."""
        for one in self._waiting:
            if not one.over.done():
                one.over.set_result(True)

    def figures(self) -> dict[str, int]:
        """Return what is counted, by the names of `WorkerStatus`."""
        return {
            "awaiting": len(self),
            "awaited": self.came,
            "awaited_in_vain": self.gave_up,
        }

    async def close(self) -> None:
        """Let all go, and ask the pool no more; waits some seconds for that at most."""
        self._closed = True
        self.cancel_all()
        if self._looking is not None:
            await end([self._looking])

    def _pause(self) -> None:
        """Let nobody begin to wait for a while; requests that give up together count as one."""
        now_s = time.monotonic()
        if now_s >= self._paused_until_s:
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _end(self, some: Sequence[_Waiting]) -> None:
        for one in some:
            if not one.over.done():
                one.over.set_result(False)

    async def _look(self) -> None:
        """Ask the pool again and again, while somebody waits."""
        pages = self._pages
        assert pages is not None
        try:
            while self._waiting and not self._closed:
                began_s = time.monotonic()
                await self._ask(list(self._waiting), pages.pool)
                await asyncio.sleep(max(0.0, began_s + _LOOK_EVERY_S - time.monotonic()))
        finally:
            self._looking = None

    async def _ask(self, waiting: Sequence[_Waiting], pool: PagePool) -> None:
        wanted = {page: one.group for one in waiting for page in one.pages}
        try:
            statuses = await pool.lookup(
                list(wanted), groups=list(wanted.values()), deadline_s=_LOOK_S
            )
        except Exception:
            log.exception("asking the pool for pages that are waited for failed")
            return
        known = dict(zip(wanted, statuses, strict=True))
        for one in waiting:
            there = all(known[page] is LookupStatus.HIT for page in one.pages)
            if there and not one.over.done():
                one.over.set_result(True)
                self._pause_s = _PAUSE_S
