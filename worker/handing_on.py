"""Which pages a worker that leaves hands on, and in which order.

Covers sorting what it has. Pure. Does not cover handing it on (`pie.worker.orders`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey


class PageAndPlace(Protocol):
    """What is needed of a page: its name, and its place in its sequence."""

    @property
    def key(self) -> PageKey:
        """Its own key."""
        ...

    @property
    def parent(self) -> bytes:
        """The key of the page before it."""
        ...

    @property
    def index(self) -> int:
        """How many pages come before it."""
        ...


def in_order(pages: Iterable[PageAndPlace]) -> list[tuple[PageKey, PageKey]]:
    """Return pages with their groups: those that came last first, each after the pages before it.

    A page without all the pages before it in its group is left out: where it belongs is not known, and
    nobody could use it.
    """
    by_key = {page.key: page for page in pages}
    groups: dict[PageKey, PageKey | None] = {}
    ordered: list[tuple[PageKey, PageKey]] = []
    for last in reversed(list(by_key.values())):
        path: list[PageAndPlace] = []
        one: PageAndPlace | None = last
        while one is not None and one.key not in groups:
            path.append(one)
            one = by_key.get(PageKey(one.parent))
        for page in reversed(path):
            is_first = page.index % GROUP_PAGES == 0
            group = page.key if is_first else groups.get(PageKey(page.parent))
            groups[page.key] = group
            if group is not None:
                ordered.append((page.key, group))
    return ordered
