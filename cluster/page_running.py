"""`pie pages rm --running`: pages are removed by the pool nodes of a running cluster.

Covers finding the nodes and telling them. Does not cover pages at rest (`pie.cluster.page_tools`) or what a
node does (`pie.pool.serving`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pie.cluster.config import PieConfig
from pie.cluster.errors import NotRunningError
from pie.cluster.page_places import PagesError, index_url, wire_secret
from pie.index.errors import IndexUnavailableError
from pie.index.lookup import DirectLookup
from pie.page.events import Part, PlaceKind
from pie.page.key import KEY_BYTES, PageKey
from pie.pool.links import NodeLinks
from pie.pool.page_orders import PageOrders
from pie.pool.tier import PageId
from pie.wire.orders import PageChange

_DEADLINE_S = 30.0
_TELLING = (PageChange.NOT_HELD, PageChange.DONE, PageChange.IN_USE, PageChange.FAILED)
"""Of a page's parts, of which most models have one, the last of these counts for the page."""


def remove_running(
    digits: Sequence[str], config: PieConfig, secret_file: Path | None = None
) -> Counter[PageChange]:
    """Have all pool nodes remove pages, all parts; return what became of how many.

    A node that is silent may have any of them: none is known to be gone then.

    Raises:
        PagesError: What was named is no key.
        NotRunningError: No index answers, or it knows no pool node.
    """
    keys = [_key(each) for each in digits]
    url = index_url(config)
    if url is None:
        raise NotRunningError("no index of a running cluster is known: index.url names it")
    lookup = DirectLookup(url, settings=config.index)
    try:
        became = asyncio.run(_remove(keys, lookup, wire_secret(config, secret_file)))
        is_any_silent = any(one.kind is PlaceKind.POOL for one in lookup.silent().values())
    except IndexUnavailableError as error:
        raise NotRunningError(f"the index does not answer: {error}") from error
    finally:
        lookup.close()
    return Counter({PageChange.FAILED: len(keys)}) if is_any_silent else became


async def _remove(
    keys: Sequence[PageKey], lookup: DirectLookup, secret: bytes | None
) -> Counter[PageChange]:
    links = NodeLinks(lookup, secret=secret)
    try:
        if not links.nodes():
            raise NotRunningError("no pool node is up")
        pages = [PageId(key, part) for key in keys for part in Part]
        said = await PageOrders(links).remove(pages, deadline_s=_DEADLINE_S)
    finally:
        await links.close()
    by_key = (said[at : at + len(Part)] for at in range(0, len(said), len(Part)))
    return Counter(max(changes, key=_TELLING.index) for changes in by_key)


def _key(digits: str) -> PageKey:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise PagesError(
            f"{digits!r} is no whole key: a running node is told all {2 * KEY_BYTES} digits, as "
            "`pie pages ls --json` tells them"
        )
    return PageKey(key)
