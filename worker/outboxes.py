"""The ways back to all routers that are connected to a worker.

Covers opening one for each, handing each what steps made for its requests, and telling all how busy the worker
is. Does not cover one of them (`pie.worker.outbox`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pie.page.events import Epoch
from pie.wire.messages import Load
from pie.wire.peer import Peer
from pie.worker.commands import StepReport
from pie.worker.outbox import Outbox

_LOAD_EVERY_S = 1.0


class Outboxes:
    """Outboxes by router. For one event loop.

    Args:
        epoch: The worker's.
        limit: Most messages that wait for one router, see `Outbox`.
        on_gone: Told of each router that went.
    """

    def __init__(self, epoch: Epoch, limit: int, on_gone: Callable[[bytes], None]) -> None:
        self._epoch = epoch
        self._limit = limit
        self._on_gone = on_gone
        self._outboxes: dict[bytes, Outbox] = {}

    def open(self, peer: Peer) -> None:
        """Begin to send to a router, until it goes."""
        self._outboxes[peer.id] = Outbox(peer, epoch=self._epoch, limit=self._limit)
        peer.on_gone(lambda: self._gone(peer.id))

    def of(self, owner: bytes) -> Outbox | None:
        """Return the outbox of a router; None where it is gone."""
        return self._outboxes.get(owner)

    def take(self, report: StepReport) -> None:
        """Send what a step made."""
        for owner, refused in report.refused:
            if owner in self._outboxes:
                self._outboxes[owner].refuse(refused)
        for owner, deltas in report.deltas.items():
            if owner in self._outboxes:
                self._outboxes[owner].put(deltas, report.load)

    async def tell_loads(self, load: Callable[[], Load]) -> None:
        """Tell every router once a second how busy the worker is, for ever."""
        while True:
            await asyncio.sleep(_LOAD_EVERY_S)
            for outbox in self._outboxes.values():
                outbox.tell_load(load())

    async def sent(self) -> None:
        """Return when all that waits is sent."""
        for outbox in list(self._outboxes.values()):
            await outbox.sent()

    async def close(self) -> None:
        """Send no more."""
        outboxes = list(self._outboxes.values())
        self._outboxes.clear()
        await asyncio.gather(*(outbox.close() for outbox in outboxes))

    def _gone(self, owner: bytes) -> None:
        outbox = self._outboxes.pop(owner, None)
        if outbox is not None:
            outbox.stop()
        self._on_gone(owner)
