"""Orders to pool nodes about pages that they hold: remove them, pin them, let them go.

Covers asking all nodes at once and what their answers come to. Does not cover what a node does
(`pie.pool.serving`) or who gives orders.

Every node is asked, because also a node that should not have a page may still have it. A node that does
not answer in time costs nobody a wait, and the answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pie.index.contract import PlaceRecord
from pie.pool.asking import WrongAnswerError, names
from pie.pool.links import NodeLinks
from pie.pool.tier import PageId
from pie.wire.errors import WireError
from pie.wire.ids import new_request_id
from pie.wire.messages import Message
from pie.wire.orders import ChangeResult, PageChange, PinPages, RemovePages, UnpinPages

_PAGES = 1024
"""In one message."""

_REMOVE = (PageChange.FAILED, PageChange.IN_USE, PageChange.DONE, PageChange.NOT_HELD)
"""A page is gone only if no node has it any more: the first of these that some node says."""
_KEEP = (
    PageChange.DONE,
    PageChange.FULL,
    PageChange.IN_USE,
    PageChange.FAILED,
    PageChange.NOT_HELD,
)
"""One node that keeps a page is enough."""

_Order = RemovePages | PinPages | UnpinPages


class PageOrders:
    """Gives orders to all nodes. For one event loop; `links` are closed by their owner."""

    def __init__(self, links: NodeLinks) -> None:
        self._links = links

    async def remove(self, pages: Sequence[PageId], *, deadline_s: float) -> list[PageChange]:
        """Remove pages from every tier of every node; `DONE` where no node has it any more."""

        def order(some: Sequence[PageId], record: PlaceRecord) -> _Order:
            return RemovePages(new_request_id(), record.epoch, names(some))

        return await self._tell(pages, order, _REMOVE, deadline_s)

    async def pin(
        self, pages: Sequence[PageId], seconds: float, *, deadline_s: float
    ) -> list[PageChange]:
        """Keep pages in the RAM of the nodes that hold them, for so long."""

        def order(some: Sequence[PageId], record: PlaceRecord) -> _Order:
            return PinPages(new_request_id(), record.epoch, names(some), seconds)

        return await self._tell(pages, order, _KEEP, deadline_s)

    async def unpin(self, pages: Sequence[PageId], *, deadline_s: float) -> list[PageChange]:
        """End pins before their time; `NOT_HELD` where no node has one."""

        def order(some: Sequence[PageId], record: PlaceRecord) -> _Order:
            return UnpinPages(new_request_id(), record.epoch, names(some))

        return await self._tell(pages, order, _KEEP, deadline_s)

    async def _tell(
        self,
        pages: Sequence[PageId],
        order: Callable[[Sequence[PageId], PlaceRecord], _Order],
        first_of: Sequence[PageChange],
        deadline_s: float,
    ) -> list[PageChange]:
        nodes = list(self._links.nodes().values())
        said = await asyncio.gather(
            *(self._tell_node(record, pages, order, deadline_s) for record in nodes)
        )
        if not said:
            return [PageChange.NOT_HELD] * len(pages)
        return [min(answers, key=first_of.index) for answers in zip(*said, strict=True)]

    async def _tell_node(
        self,
        record: PlaceRecord,
        pages: Sequence[PageId],
        order: Callable[[Sequence[PageId], PlaceRecord], _Order],
        deadline_s: float,
    ) -> list[PageChange]:
        said: list[PageChange] = []
        try:
            async with asyncio.timeout(deadline_s):
                client = await self._links.open(record)
                for at in range(0, len(pages), _PAGES):
                    some = pages[at : at + _PAGES]
                    answer, _ = await client.request(order(some, record), timeout_s=deadline_s)
                    said.extend(_changes(answer, len(some)))
        except (WireError, TimeoutError, WrongAnswerError):
            said.extend([PageChange.FAILED] * (len(pages) - len(said)))
        return said


def _changes(answer: Message, count: int) -> list[PageChange]:
    """Return what an answer says of `count` pages.

    Raises:
        WrongAnswerError: It says something else.
    """
    if not isinstance(answer, ChangeResult) or len(answer.changes) != count:
        raise WrongAnswerError
    try:
        return [PageChange(change) for change in answer.changes]
    except ValueError as error:
        raise WrongAnswerError from error
