"""What all routers have counted together.

Covers telling others what this one has counted, and adding up. Does not cover what is counted
(`pie.router.metrics`, `pie.router.survey`) or how routers tell each other (`pie.index.tallies`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from pie.index.errors import PageIndexError
from pie.index.tallies import Tallies, Tally
from pie.index.tasks import end
from pie.router.status import ClusterStatus, RouterLine

log = logging.getLogger("pie.router.sums")

_EVERY_S = 1.0


class Sums:
    """Tells this router's tally, and adds up those of all. For one event loop.

    Args:
        tallies: Those of all.
        clock: Seconds, from anywhere, going forward.
    """

    def __init__(self, tallies: Tallies, clock: Callable[[], float] = time.monotonic) -> None:
        self._tallies = tallies
        self._clock = clock
        self._hearing = asyncio.Lock()
        self._others: Sequence[Tally] = ()
        self._heard_s = -math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self, own: Callable[[], Tally]) -> None:
        """Begin to tell what `own` returns."""
        self._task = asyncio.get_running_loop().create_task(self._run(own))

    async def close(self) -> None:
        """Stop, and take back what was told."""
        if self._task is None:
            return
        await end([self._task])
        with contextlib.suppress(PageIndexError):
            await self._tallies.withdraw()

    async def whole(self, status: ClusterStatus) -> ClusterStatus:
        """Return a status with the counts of all routers; those of its own alone where Redis does not tell."""
        try:
            others = await self._heard()
        except PageIndexError as error:
            log.debug("what other routers count is not known: %s", error)
            return msgspec.structs.replace(status, routers_together="degraded")
        return added(status, others)

    async def _heard(self) -> Sequence[Tally]:
        """Return what others told, asked for once in the time in which each tells once: it is megabytes at worst."""
        async with self._hearing:
            now_s = self._clock()
            if now_s - self._heard_s >= _EVERY_S:
                self._others = await self._tallies.others()
                self._heard_s = now_s
            return self._others

    async def _run(self, own: Callable[[], Tally]) -> None:
        while True:
            try:
                await self._tallies.tell(own())
            except PageIndexError as error:
                log.debug("what this router counts is not told: %s", error)
            except Exception:
                log.exception("what this router counts was not told")
            await asyncio.sleep(_EVERY_S)


def added(status: ClusterStatus, tallies: Sequence[Tally]) -> ClusterStatus:
    """Return a status with what these routers have counted, too."""
    running: Counter[str] = Counter()
    cached = Counter(status.cached_tokens)
    for one in tallies:
        running.update(one.running)
        cached.update(one.cached_tokens)
    return msgspec.structs.replace(
        status,
        workers=[
            msgspec.structs.replace(worker, running=worker.running + running[worker.place])
            for worker in status.workers
        ],
        routers=[*status.routers, *sorted(map(_line, tallies), key=lambda one: one.router)],
        in_flight=status.in_flight + sum(one.in_flight for one in tallies),
        requests=status.requests + sum(one.requests for one in tallies),
        prompt_tokens=status.prompt_tokens + sum(one.prompt_tokens for one in tallies),
        cached_tokens=dict(cached),
        predicted_tokens=status.predicted_tokens + sum(one.predicted_tokens for one in tallies),
        output_tokens=status.output_tokens + sum(one.output_tokens for one in tallies),
        policy_failures=status.policy_failures + sum(one.policy_failures for one in tallies),
    )


def _line(tally: Tally) -> RouterLine:
    """Return what a router's tally says of itself."""
    return RouterLine(
        router=tally.router,
        in_flight=tally.in_flight,
        requests=tally.requests,
        policy_version=tally.policy_version,
        policy_refused=tally.policy_refused,
    )
