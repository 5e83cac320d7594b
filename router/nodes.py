"""A router's connections to pool nodes, over which it asks them for their numbers and gives them orders.

Covers opening a connection when a node is first asked, and keeping it while the node is known. Does
not cover pages: those travel between workers and pool nodes alone (`pie.pool`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId
from pie.router.asking import ask_status
from pie.wire import WireClient, WireError, WireSettings
from pie.wire.messages import Message, StatusReport

log = logging.getLogger("pie.router.nodes")


@dataclass(eq=False, slots=True)
class _Node:
    record: PlaceRecord
    client: WireClient
    opening: asyncio.Task[None]


class NodeSet:
    """Connections by place. Use it on one event loop only."""

    def __init__(
        self, settings: WireSettings | None = None, *, secret: bytes | None = None
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._nodes: dict[PlaceId, _Node] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def keep(self, records: Sequence[PlaceRecord]) -> None:
        """Drop the connections to all nodes but these, and to earlier starts of these."""
        starts = {(record.place, record.epoch, record.address) for record in records}
        for place, node in list(self._nodes.items()):
            if (place, node.record.epoch, node.record.address) not in starts:
                self._drop(place)

    async def ask(self, record: PlaceRecord, timeout_s: float) -> StatusReport | None:
        """Return what a node says of itself; None where it says nothing in time.

        Opening a connection may take longer than the caller stays: it goes on behind them, for the
        next one who asks.
        """
        try:
            client = await self._client(record, timeout_s)
        except WireError as error:
            log.debug("pool node %s cannot be asked: %s", record.place, error)
            return None
        return await ask_status(client, record, timeout_s)

    async def request(self, record: PlaceRecord, message: Message, timeout_s: float) -> Message:
        """Return a node's answer to a message.

        Raises:
            WireError: It is gone, or does not answer in time.
        """
        client = await self._client(record, timeout_s)
        answer, _ = await client.request(message, timeout_s=timeout_s)
        return answer

    async def _client(self, record: PlaceRecord, timeout_s: float) -> WireClient:
        node = self._nodes.get(record.place)
        if node is None:
            client = WireClient(record.address, settings=self._settings, secret=self._secret)
            opening = asyncio.create_task(self._open(record.place, client))
            node = self._nodes[record.place] = _Node(record, client, opening)
        if not node.opening.done():
            await asyncio.wait({node.opening}, timeout=timeout_s)
        return node.client

    async def close(self) -> None:
        """Let go of every node."""
        for place in list(self._nodes):
            self._drop(place)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _open(self, place: PlaceId, client: WireClient) -> None:
        """Connect; a node that does not answer is forgotten, so that it is tried anew when asked."""
        try:
            await client.start()
        except WireError as error:
            log.debug("pool node %s does not answer: %s", place, error)
            await client.close()
            if place in self._nodes and self._nodes[place].client is client:
                del self._nodes[place]

    def _drop(self, place: PlaceId) -> None:
        task = asyncio.create_task(_close(self._nodes.pop(place)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close(node: _Node) -> None:
    node.opening.cancel()
    await asyncio.gather(node.opening, return_exceptions=True)
    await node.client.close()
