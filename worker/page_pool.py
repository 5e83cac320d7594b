"""The pool as a worker needs it.

Covers what is asked of it. Does not cover how that is done (`pie.pool.client`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from pie.page.format import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.pool.tier import Buffer, PageId, StoredPage
from pie.wire.messages import PutStatus


class PagePool(Protocol):
    """What is needed of `pie.pool.client.PoolClient`."""

    async def lookup(
        self, pages: Many[PageId], *, groups: Many[PageKey], deadline_s: float
    ) -> list[LookupStatus]:
        """Say what is known of each page."""
        ...

    async def load(
        self, pages: Many[PageId], *, groups: Many[PageKey], deadline_s: float
    ) -> list[StoredPage | None]:
        """Return each page, checked, or None where it is a miss."""
        ...

    async def store(
        self,
        headers: Many[PageHeader],
        payloads: Many[Buffer],
        *,
        groups: Many[PageKey],
        deadline_s: float,
    ) -> list[PutStatus]:
        """Offer pages and send those that are wanted."""
        ...
