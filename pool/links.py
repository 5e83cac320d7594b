"""Connections to pool nodes.

Covers one connection for each node that the index knows, opened when first needed. Does not cover
what is sent (`pie.pool.client`).

A node that does not answer costs nobody a wait: whoever asks for its link while it is down or was
found down a moment ago is told so at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pie.index.contract import IndexReader, PlaceRecord
from pie.page.events import PlaceId, PlaceKind
from pie.wire.client import WireClient
from pie.wire.errors import PeerGone, WireError
from pie.wire.settings import WireSettings

log = logging.getLogger("pie.pool.links")

_PATIENCE_S = 0.5
"""How long anybody waits for a new connection; opening it goes on behind them."""

_RETRY_AFTER_S = 1.0
"""How long a node that did not answer is left alone; so long new pages are not kept either."""


@dataclass(slots=True)
class _Link:
    address: str
    client: WireClient
    began_s: float
    opening: asyncio.Task[None]
    down_until_s: float = 0.0
    """Set where opening it failed."""


@dataclass(slots=True)
class _Closing:
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, link: _Link) -> None:
        task = asyncio.create_task(_close(link))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class NodeLinks:
    """Opens, keeps and drops connections to pool nodes. For one event loop."""

    def __init__(
        self,
        reader: IndexReader,
        settings: WireSettings | None = None,
        *,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._secret = secret
        self._settings = settings
        self._clock = clock
        self._links: dict[PlaceId, _Link] = {}
        self._closing = _Closing()
        self._closed = False

    def nodes(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the pool nodes that are alive, as the index knows, and drop links to all others."""
        if self._closed:
            return {}
        nodes = {
            place: record
            for place, record in self._reader.places().items()
            if record.kind is PlaceKind.POOL
        }
        for place in self._links.keys() - nodes.keys():
            self._closing.start(self._links.pop(place))
        return nodes

    async def open(self, record: PlaceRecord) -> WireClient:
        """Return the connection to a node that answers.

        Raises:
            PeerGone: The node does not answer.
        """
        link = self._links.get(record.place)
        if link is not None and self._is_outdated(link, record):
            self._closing.start(self._links.pop(record.place))
            link = None
        if link is None:
            if self._closed:
                raise PeerGone("the client is closed")
            link = self._links[record.place] = self._new_link(record)
        left_s = link.began_s + _PATIENCE_S - self._clock()
        if not link.opening.done() and left_s > 0:
            # Not awaited itself: an impatient caller must not end the attempt for all others.
            await asyncio.wait({link.opening}, timeout=left_s)
        if not link.opening.done() or link.down_until_s or not link.client.is_up:
            raise PeerGone(f"{record.place} does not answer at {record.address}")
        return link.client

    async def close(self) -> None:
        """Drop all connections."""
        self._closed = True
        for link in self._links.values():
            self._closing.start(link)
        self._links.clear()
        while self._closing.tasks:
            await asyncio.gather(*self._closing.tasks)

    def _is_outdated(self, link: _Link, record: PlaceRecord) -> bool:
        if link.address != record.address:
            return True
        return 0 < link.down_until_s <= self._clock()

    def _new_link(self, record: PlaceRecord) -> _Link:
        client = WireClient(record.address, settings=self._settings, secret=self._secret)

        async def start() -> None:
            try:
                await client.start()
            except WireError as error:
                log.warning("pool node %s at %s: %s", record.place, record.address, error)
                link.down_until_s = self._clock() + _RETRY_AFTER_S

        link = _Link(record.address, client, self._clock(), asyncio.create_task(start()))
        return link


async def _close(link: _Link) -> None:
    link.opening.cancel()
    await asyncio.gather(link.opening, return_exceptions=True)
    await link.client.close()
