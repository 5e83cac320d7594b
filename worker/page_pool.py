"""The pool as a worker needs it.

Covers what is asked of it, and opening it. Does not cover how that is done (`pie.pool.client`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import AsyncExitStack
from typing import Protocol

from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.policies.replication import TabledReplication
from pie.pool.client import PoolClient
from pie.pool.settings import PoolSettings
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


async def open_pool(
    exits: AsyncExitStack,
    settings: PoolSettings,
    index_url: str,
    index_settings: IndexSettings,
    secret: bytes | None,
    replication: TabledReplication,
) -> PoolClient:
    """Return a client of the pool's nodes, which it finds by the index; `exits` closes it."""
    mirror = Mirror()
    feed = MirrorFeed(index_url, mirror, settings=index_settings, with_pages=False)
    await feed.start()
    exits.push_async_callback(feed.close)
    client = PoolClient(mirror, settings, secret=secret, replication=replication)
    exits.push_async_callback(client.close)
    return client
