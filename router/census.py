"""What every place says of itself, asked all at once.

Covers whom to ask, how long to wait, and how often at most. Does not cover how the answers are shown
(`pie.router.survey`, `pie.router.place_metrics`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from pie.index.contract import IndexReader, PlaceRecord
from pie.page.events import PlaceId, PlaceKind
from pie.router.nodes import NodeSet
from pie.router.workers import WorkerSet
from pie.wire import WireSettings
from pie.wire.messages import StatusReport

log = logging.getLogger("pie.router.census")

_LIMIT_S = 0.8
"""Longest wait for all places together, so that `/status` and `/metrics` answer within a second."""
_KEEP_S = 1.0
"""Whoever asks within so long of a census is told the same, so that scrapes cannot flood places."""
_MAX_NODES = 256
"""Most pool nodes that are asked, as many as there are workers at most by default."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one start of a place said when it was asked."""

    record: PlaceRecord
    report: StatusReport | None
    """None where it was silent."""


Census = Mapping[PlaceId, Told]
"""The places that were asked."""


class CensusTaker:
    """Asks all places that a router knows. Use it on one event loop only.

    Args:
        reader: Knows the pool nodes.
        workers: Has the connections to workers.
        settings: Limits of connections to pool nodes.
        secret: 32 bytes that all of the cluster share, for pool nodes beyond this host.
        clock: Seconds, going forward only.
    """

    def __init__(
        self,
        reader: IndexReader,
        workers: WorkerSet,
        settings: WireSettings | None = None,
        *,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._workers = workers
        self._nodes = NodeSet(settings, secret=secret)
        self._clock = clock
        self._census: Census = {}
        self._taken_s = float("-inf")
        self._taking: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self) -> Census:
        """Return what all places say, or said up to a second ago."""
        taking = self._taking
        if taking is None and not self._closed and self._clock() - self._taken_s >= _KEEP_S:
            taking = self._taking = asyncio.create_task(self._take())
        if taking is not None:
            # Not awaited itself: a client that hangs up must not end it for all others.
            await asyncio.wait({taking})
        return self._census

    async def close(self) -> None:
        """Let go of the pool nodes."""
        self._closed = True
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        await self._nodes.close()

    async def _take(self) -> None:
        try:
            self._census = await self._ask_all()
        except Exception:
            # Our own bug; what the router itself knows is shown all the same.
            log.exception("places could not be asked")
            self._census = {}
        finally:
            self._taken_s = self._clock()
            self._taking = None

    async def _ask_all(self) -> Census:
        nodes = [
            record for record in self._reader.places().values() if record.kind is PlaceKind.POOL
        ][:_MAX_NODES]
        self._nodes.keep(nodes)
        asked: list[tuple[PlaceRecord, Coroutine[None, None, StatusReport | None]]] = [
            *((link.record, link.ask_status(_LIMIT_S)) for link in self._workers.links.values()),
            *((record, self._nodes.ask(record, _LIMIT_S)) for record in nodes),
        ]
        if not asked:
            return {}
        tasks = [(record, asyncio.create_task(question)) for record, question in asked]
        try:
            await asyncio.wait([task for _, task in tasks], timeout=_LIMIT_S)
            return {
                record.place: Told(record, task.result() if task.done() else None)
                for record, task in tasks
            }
        finally:
            for _, task in tasks:
                task.cancel()
            await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
