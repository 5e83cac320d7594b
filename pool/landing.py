"""Where pages of nodes on a client's own host land.

Covers offering memory to each node once for each connection, and the slots of one request. Does not cover the
memory (`pie.pool.shared_memory`) or checking what lands there (`pie.pool.client`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from weakref import WeakKeyDictionary

from pie.page.events import Epoch, Part
from pie.pool.shared_memory import LandingArea
from pie.pool.tier import PageId
from pie.wire.client import WireClient
from pie.wire.errors import WireError
from pie.wire.ids import new_request_id
from pie.wire.messages import Message, PageData, ShareMemory

log = logging.getLogger("pie.pool.landing")

_SHARE_S = 0.5
"""How long a node may take to map memory; without an answer it sends pages as to anybody."""
_LEAST_BYTES = 64 << 10
"""Smaller pages are sent: a copy costs less than a slot."""


class Slots:
    """Where the pages of one request may land. Leave it when no more answers are taken."""

    def __init__(
        self,
        area: LandingArea | None,
        places: Sequence[tuple[int, int]],
        on_ignored: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin with all slots open.

        Args:
            area: Where they are.
            places: Offset and size for each page; size 0 where it has none.
            on_ignored: Called when a page was sent that had a slot: the node does not have the memory.
        """
        self._area = area
        self._on_ignored = on_ignored
        self._open = dict(enumerate(places)) if area is not None else {}
        self.message = tuple(places) if self._open else ()
        """As `GetPages.slots`."""

    def landed(self, position: int, answer: Message) -> list[memoryview] | None:
        """Take an answer in; return the payload if it lies in the page's slot."""
        offset, size = self._open.pop(position, (0, 0))
        if self._area is None or not size or not isinstance(answer, PageData):
            return None
        header = answer.header
        if answer.in_slot and header is not None and 0 < header.raw_bytes <= size:
            return [self._area.landed(offset, header.raw_bytes)]
        if header is not None and header.raw_bytes <= size:
            self._on_ignored()
        self._area.give_back(offset)
        return None

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._area is not None:
            for _, size in self._open.values():
                self._area.lose(size)
            self._open.clear()


class Landing:
    """One client's memory, and which nodes put pages there. For one event loop."""

    def __init__(self, size_bytes: int) -> None:
        """Prepare it; it is made when a first page of some size has been seen. 0 bytes is none."""
        self._size_bytes = size_bytes
        self._area: LandingArea | None = None
        self._page_bytes: dict[Part, int] = {}
        """The largest payload of each part seen so far: what the next one is taken for."""
        self._shared: WeakKeyDictionary[WireClient, tuple[Epoch, LandingArea | None]] = (
            WeakKeyDictionary()
        )
        """What each connection's node was offered last; None where it cannot have it."""

    def saw(self, part: Part, size_bytes: int) -> None:
        """Learn how large a part of a page is."""
        self._page_bytes[part] = max(self._page_bytes.get(part, 0), size_bytes)

    async def slots(self, client: WireClient, pages: Sequence[PageId]) -> Slots:
        """Return where a node may put pages; nowhere, where it is on another host.

        Raises:
            WireError: The node is gone.
        """
        sizes = [self._page_bytes.get(page.part, 0) for page in pages]
        if not self._size_bytes or max(sizes, default=0) < _LEAST_BYTES:
            return Slots(None, ())
        area = await self._offered(client)
        if area is None:
            return Slots(None, ())
        places: list[tuple[int, int]] = []
        for size in sizes:
            offset = area.take(size) if size >= _LEAST_BYTES else None
            places.append((0, 0) if offset is None else (offset, size))
        return Slots(area, places, on_ignored=lambda: self._shared.pop(client, None))

    async def _offered(self, client: WireClient) -> LandingArea | None:
        """Return the memory that a node has, offering it where it has not been."""
        epoch = client.epoch
        known, shared = self._shared.get(client, (None, None))
        if known == epoch and (shared is None or shared is self._area) and not self._is_worn:
            return shared
        area = self._made()
        if area is None:
            return None
        offer = ShareMemory(
            new_request_id(), epoch, os.getpid(), area.file, area.size_bytes, area.token
        )
        try:
            await client.request(offer, timeout_s=_SHARE_S)
        except WireError as error:
            log.info("a pool node sends pages over the wire: %s", error)
            self._shared[client] = (epoch, None)
            return None
        self._shared[client] = (epoch, area)
        return area

    @property
    def _is_worn(self) -> bool:
        return self._area is not None and self._area.is_worn

    def _made(self) -> LandingArea | None:
        """Return the memory, making it where there is none, or where it is worn."""
        if self._area is None or self._area.is_worn:
            try:
                self._area = LandingArea(self._size_bytes)
            except OSError as error:
                log.warning("no memory can be shared with pool nodes: %s", error)
                self._size_bytes = 0
                self._area = None
        return self._area
