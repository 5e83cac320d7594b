"""What a tier is: a capped store of page payloads with two-phase verbs.

Covers the contract that `ram`, `disk` and `object` share; `pie.pool.conformance` is the suite
that every tier passes. Does not cover which page leaves (`pie.policies`) or how tiers are
stacked (`pie.pool.cache`).

A page cannot be read until its store is complete, and a pinned page cannot leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from typing_extensions import Buffer

from pie.page.columns import PageColumns
from pie.page.events import PageEntry, Part, Tier as TierKind
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.key_table import as_keys
from pie.page.lookup import LookupStatus
from pie.policies.retention import PageView

__all__ = [
    "BadPages",
    "Buffer",
    "PageId",
    "StoredPage",
    "Tier",
    "TierKind",
    "columns_of",
    "entry_of",
    "id_of",
    "view_of",
]


class PageId(NamedTuple):
    """A part of a page, as a tier names it."""

    key: PageKey
    part: Part


class StoredPage(NamedTuple):
    """A page on loan: `payload` stays as it is until `complete_load`."""

    header: PageHeader
    payload: memoryview


class BadPages(NamedTuple):
    """How many payloads did not match their checksum, by when that was found."""

    at_store: int = 0
    at_load: int = 0


class Tier(Protocol):
    """A capped store of pages. Thread-safe; no call waits for another call's I/O."""

    kind: TierKind
    budget_bytes: int

    @property
    def used_bytes(self) -> int:
        """Physical bytes now taken, stores in progress included; never over the budget."""
        ...

    @property
    def bad_pages(self) -> BadPages:
        """Pages that were found bad, and so were not kept, since the start."""
        ...

    def lookup(self, page: PageId) -> LookupStatus:
        """Say what is known of a page, without pinning it."""
        ...

    def prepare_store(self, header: PageHeader) -> memoryview | LookupStatus:
        """Reserve room for a page and return where its payload goes.

        Returns `HIT` or `PENDING` where the page is there or being written, `RETRY` where there
        is no room (nothing is evicted here), and `MISS` where the tier is closed or takes no pages
        now, so that eviction would not help. The page is unreadable until `complete_store`, which
        whoever was lent the room must call.
        """
        ...

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        """Make a prepared page readable, or give its room back.

        Returns whether it is readable now: a payload that does not match its checksum is not.

        Raises:
            NotPreparedError: Nobody prepared this store.
        """
        ...

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        """Pin a page and lend its payload, checked; a bad page is removed and is a `MISS`.

        A loan that was given must be ended by `complete_load`.
        """
        ...

    def complete_load(self, page: PageId) -> None:
        """End a loan: the pin goes.

        Raises:
            NotPreparedError: Nobody holds a loan of this page.
        """

    def expect(self, pages: Iterable[PageId]) -> None:
        """Hear which pages will be loaded soon, in that order; a hint that need not be taken."""

    def remove(self, page: PageId) -> bool:
        """Remove a page unless it is pinned or being written; say whether it is gone.

        A page that was not there is gone.
        """
        ...

    def keep_removed(self, limit_s: float) -> None:
        """Wait, at most so long, until pages that were removed would be gone for the next process too."""

    def pages(self) -> Iterator[PageHeader]:
        """List the readable pages as they were at some moment of the call."""
        ...

    def columns(self) -> PageColumns:
        """Return the readable pages as they were at one moment of the call, each once."""
        ...

    def close(self) -> None:
        """Let go of memory, threads and files. A closed tier answers `MISS`."""
        ...

    def check(self) -> None:
        """Assert that the tier's tables agree with each other and that the cap holds."""
        ...


def id_of(header: PageHeader) -> PageId:
    """Return the name that a tier knows the page of `header` by."""
    return PageId(header.key, header.part)


def entry_of(header: PageHeader, tier: TierKind) -> PageEntry:
    """Return what the index is told about a page that `tier` holds."""
    return PageEntry(
        key=header.key,
        parent=header.parent,
        index=header.index,
        part=header.part,
        tier=tier,
        bytes=header.raw_bytes,
        tenant_tag=header.tenant_tag,
    )


def view_of(header: PageHeader, tier: Tier) -> PageView:
    """Return what a policy may know of a page."""
    return PageView(
        key=header.key,
        parent=header.parent,
        index=header.index,
        part=header.part,
        tier=tier.kind,
        bytes=header.raw_bytes,
        tenant_tag=header.tenant_tag,
        session_tag=header.session_tag,
        model_root=header.model_root,
        page_tokens=header.page_tokens,
    )


def columns_of(headers: Iterable[PageHeader]) -> PageColumns:
    """Return what policies and the index need to know of pages."""
    known = list(headers)
    numbers: dict[str, int] = {}
    for header in known:
        numbers.setdefault(header.tenant_tag, len(numbers))
    return PageColumns(
        keys=as_keys([header.key for header in known]),
        parts=np.array([header.part for header in known], np.uint8),
        parents=as_keys([header.parent for header in known]),
        indexes=np.array([header.index for header in known], np.int32),
        sizes=np.array([header.raw_bytes for header in known], np.int64),
        tags=np.array([numbers[header.tenant_tag] for header in known], np.int32),
        tenant_tags=list(numbers),
    )
