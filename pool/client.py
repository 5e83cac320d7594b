"""The pool as its users see it: load pages, store pages, never wait long.

Covers choosing nodes, transfers, deadlines and checks on receipt. Does not cover which pages are
worth storing or loading (`pie.worker.offload`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.index.contract import IndexReader
from pie.page.format import PageHeader
from pie.page.key import PageKey
from pie.pool.settings import PoolSettings
from pie.pool.tier import Buffer, PageId, StoredPage
from pie.wire.messages import PutStatus


class PoolClient:
    """Loads pages from pool nodes and stores pages there. For one event loop.

    Nodes are the places of kind `POOL` that `reader` knows. A dead, slow or wrong node is a miss,
    never an error and never a wait past a deadline.
    """

    def __init__(self, reader: IndexReader, settings: PoolSettings) -> None: ...

    async def load(
        self, pages: Sequence[PageId], *, groups: Sequence[PageKey], deadline_s: float
    ) -> list[StoredPage | None]:
        """Return each page with its payload, checked, or None where it is a miss.

        Args:
            pages: What to load, in the order of the sequence.
            groups: For each page the first key of its group: the slice of
                `placement.group_keys(chain)` that belongs to `pages`.
            deadline_s: Seconds after which whatever has not come is a miss.

        Payloads stay valid as long as they are referenced.
        """
        raise NotImplementedError

    async def store(
        self,
        headers: Sequence[PageHeader],
        payloads: Sequence[Buffer],
        *,
        groups: Sequence[PageKey],
        deadline_s: float,
    ) -> list[PutStatus]:
        """Offer pages to their nodes and send those that are wanted.

        `REFUSED` also stands for a page that was dropped: no node, deadline, too much in flight.
        Payloads may be changed again as soon as this returns or is cancelled.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Drop all connections; loads in progress are misses."""
