"""How a worker leaves: its requests end, and what only it has goes where it outlives the worker.

Covers the order of that, the time for each part of it, and that whoever asked for it takes it back. Does not
cover refusing new requests (`pie.worker.service`) or handing pages on (`pie.worker.orders`).

Pages go to the pool while the last requests run, and again once they have ended; what then only host memory
holds goes to disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from pie.wire.errors import RefusedError
from pie.wire.messages import RefusalCode
from pie.worker.handing_on import PageAndPlace, in_order
from pie.worker.holdings import Holdings
from pie.worker.lower_tiers import LowerTiers
from pie.worker.orders import PageOrders

log = logging.getLogger("pie.worker.leaving")


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a worker that leaves has to see to. For one event loop."""

    requests_end: Callable[[], Awaitable[None]]
    """Returns when all requests are over and their answers sent."""
    holdings: Holdings
    orders: PageOrders | None
    tiers: LowerTiers | None

    async def leave(self, timeout_s: float, share: float) -> tuple[int, int]:
        """See to all of it within `timeout_s`, of which handing on takes `share` at most.

        Returns how many pages the pool took, and how many are left here alone.
        """
        began_s = time.monotonic()
        until_s = began_s + timeout_s
        handing = asyncio.create_task(self._hand_on(share * timeout_s))
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.requests_end()
            except TimeoutError:
                log.warning("requests are still running after %g s and are given up", timeout_s)
            moved, left = await handing
        finally:
            # It is taken back.
            handing.cancel()
        now_s = time.monotonic()
        if now_s < until_s:
            # What the last requests made; all else is there already.
            more, left = await self._hand_on(share * (until_s - now_s))
            moved += more
        if self.tiers is not None:
            await asyncio.to_thread(self.tiers.save, until_s)
        return moved, left

    async def _hand_on(self, limit_s: float) -> tuple[int, int]:
        held: list[PageAndPlace] = []
        if self.tiers is not None:
            held += await asyncio.to_thread(self.tiers.entries)
        held += self.holdings.pages()
        if self.orders is None:
            return 0, len(in_order(held))
        moved, left = await self.orders.hand_on(held, limit_s)
        if moved or left:
            log.info("%d pages were handed on to the pool, %d are here alone", moved, left)
        return moved, left


class Emptying:
    """A leave that somebody asked for, and may take back. For one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[tuple[int, int]] | None = None

    async def join(
        self, leave: Callable[[], Coroutine[object, object, tuple[int, int]]]
    ) -> tuple[int, int]:
        """Return what becomes of the leave under way or over, or of a new one: it goes on if whoever asks is gone.

        Raises:
            RefusedError: It was taken back.
        """
        if self._task is not None and self._task.done() and self._failed(self._task):
            self._task = None
        task = self._task = self._task or asyncio.create_task(leave())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if task.cancelled() and asking is not None and not asking.cancelling():
                text = "it was told meanwhile to take requests again"
                raise RefusedError(RefusalCode.FAILED, text) from None
            raise

    @staticmethod
    def _failed(task: asyncio.Task[tuple[int, int]]) -> bool:
        """Say whether a leave that is over ended with an error, so that asking again is worth a try."""
        return task.cancelled() or task.exception() is not None

    def take_back(self) -> None:
        """End the leave, so that the next one is a new one."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
