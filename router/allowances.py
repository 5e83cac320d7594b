"""Tenants' allowances as a router uses them: the cluster's and, while Redis is away, its own share of them.

Covers going over from one to the other and back, and saying in time what is still in flight. Does not cover
counting (`pie.router.quota`) or what is shared (`pie.index.allowance`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Set

from pie.index.allowance import (
    HOLD_S,
    Allowances,
    Claim,
    Grant,
    Limits,
    MemoryAllowances,
)
from pie.index.commons import Commons
from pie.index.errors import PageIndexError
from pie.index.tasks import end
from pie.router.quota import Quota

log = logging.getLogger("pie.router.allowances")

_KEEP_EVERY_S = HOLD_S / 6


class DividedAllowances:
    """The cluster's allowances, or this router's share of each while nobody knows those.

    With N routers a share is an Nth of what may be taken a minute, full at its first use, and of the sequences in
    flight; a router that has none in flight lets one request in. What was taken from it is told when those who know are back.

    Args:
        shared: What all routers share.
        routers: How many they are at least.
        clock: Tells the time in seconds.
    """

    def __init__(
        self, shared: Allowances, routers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shared = shared
        self._own = MemoryAllowances("own", clock)
        self._divided: set[str] = set()
        self._least = self._routers = routers

    def counted(self, routers: int) -> None:
        """Learn how many routers there are; one that is just starting again is one of them."""
        self._routers = max(self._least, routers)

    async def claim(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        """Do as `Allowances.claim` says; always answers."""
        try:
            grant = await self._shared.claim(tenant, limits, claim)
        except PageIndexError:
            self._divided.add(tenant)
            return self._own.claim_now(tenant, self._share(limits, claim), claim)
        if tenant in self._divided:
            # The next time counts from what is drawn then; what is left in its buckets stays what it is.
            self._divided.discard(tenant)
            self._own.forget(tenant)
        return grant

    @property
    def divided(self) -> Set[str]:
        """Tenants whose share was used, of which those who know were not told yet."""
        return self._divided

    def keep(self, tenants: set[str]) -> None:
        """Forget all tenants but these."""
        self._own.keep(tenants)
        self._divided &= tenants

    def _share(self, limits: Limits, claim: Claim) -> Limits:
        concurrent = limits.concurrent // self._routers
        if limits.concurrent and not claim.sequences.inside:
            concurrent = max(concurrent, claim.sequences.need, 1)
        return Limits(
            limits.requests_per_minute / self._routers,
            limits.tokens_per_minute / self._routers,
            concurrent or min(1, limits.concurrent),
        )


class QuotaKeeper:
    """Says of all quotas what is in flight, as long as there is some, and how many routers there are.

    What is old of what routers share is removed as often.

    Args:
        commons: What routers share.
        allowances: Told how many routers there are.
        quotas: Returns those that there are now.
        trim: Removes what is old.
    """

    def __init__(
        self,
        commons: Commons,
        allowances: DividedAllowances,
        quotas: Callable[[], Iterable[Quota]],
        trim: Callable[[], Awaitable[None]],
    ) -> None:
        self._commons = commons
        self._allowances = allowances
        self._quotas = quotas
        self._trim = trim
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._wake = asyncio.Event()
        commons.on_back = self._wake.set

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def count(self) -> None:
        """Say that this router is there, and count all that are.

        Raises:
            PageIndexError: They count as many as they did.
        """
        self._allowances.counted(await self._commons.routers())

    @property
    def is_told(self) -> bool:
        """Whether all that was let in is known to all."""
        return not self._allowances.divided

    async def close(self) -> None:
        """Stop."""
        self._closed = True
        if self._task is not None:
            await end([self._task])

    async def _run(self) -> None:
        while not self._closed:
            try:
                await self._round()
            except PageIndexError as error:
                log.debug("routers are not counted: %s", error)
            except Exception:
                log.exception("quotas were not kept")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _round(self) -> None:
        quotas = tuple(self._quotas())
        self._allowances.keep({quota.name for quota in quotas})
        await self.count()
        for quota in quotas:
            if not quota.is_settled or quota.name in self._allowances.divided:
                await quota.settle()
        await self._trim()
