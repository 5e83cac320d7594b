"""What all routers have counted together.

Covers telling others what this one has counted, and adding up. Does not cover what is counted
(`pie.router.metrics`, `pie.router.survey`) or how routers tell each other (`pie.index.tallies`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from pie.index.errors import PageIndexError
from pie.index.tallies import Tallies, Tally
from pie.index.tasks import end
from pie.router.status import ClusterStatus, RouterLine

log = logging.getLogger("pie.router.sums")

_EVERY_S = 1.0
CACHED = "cached_tokens."
"""What the names of counts begin with that end in a tier's."""


class Sums:
    """Tells this router's tally, and adds up those of all. For one event loop.

    Args:
        tallies: Those of all.
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
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
            others = await self._tallies.others()
        except PageIndexError as error:
            log.debug("what other routers count is not known: %s", error)
            return msgspec.structs.replace(status, routers_together="degraded")
        return added(status, others)

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
    counts: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for one in tallies:
        counts.update(one.counts)
        running.update(one.running)
    cached = Counter(status.cached_tokens)
    for name, count in counts.items():
        if name.startswith(CACHED):
            cached[name.removeprefix(CACHED)] += count
    workers = [
        msgspec.structs.replace(one, running=one.running + running[one.place])
        for one in status.workers
    ]
    return msgspec.structs.replace(
        status,
        workers=workers,
        routers=[*status.routers, *sorted(map(_line, tallies), key=lambda one: one.router)],
        in_flight=status.in_flight + counts["in_flight"],
        requests=status.requests + counts["requests"],
        prompt_tokens=status.prompt_tokens + counts["prompt_tokens"],
        cached_tokens=dict(cached),
        predicted_tokens=status.predicted_tokens + counts["predicted_tokens"],
        output_tokens=status.output_tokens + counts["output_tokens"],
        policy_failures=status.policy_failures + counts["policy_failures"],
    )


def _line(tally: Tally) -> RouterLine:
    """Return what a router's tally says of itself."""
    counts = tally.counts
    return RouterLine(
        router=tally.router,
        in_flight=counts.get("in_flight", 0),
        requests=counts.get("requests", 0),
        policy_version=counts.get("policy_version", 0),
        policy_refused=counts.get("policy_refused", 0),
    )
