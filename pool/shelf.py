"""One level of a tiered cache: a tier, and the record of what it holds.

Covers making the record equal to the tier, and what the index hears of it. Does not cover how levels work together
(`pie.pool.cache`) or which pages leave (`pie.policies`).

The record is the retention manager's table; the tier alone keeps headers. A page at rest is so in two tables
and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pie.index.contract import IndexWriter
from pie.page.columns import PageColumns, PageMasks, tier_masks
from pie.page.events import PageEntry, Part
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.policies.hand_over import HandOver
from pie.policies.manager import RetentionManager
from pie.policies.prefixes import LeadingPages, Prefixes
from pie.policies.retention import PageView, RetentionPolicy
from pie.pool.kept_uses import KeptUses
from pie.pool.tier import PageId, Tier, columns_of, entry_of, id_of, view_of

_AT_ONCE = 4096
"""Rows looked at while others wait: some 2 ms."""

_HANDED_AT_ONCE = 200
"""Pages handed to another policy while others wait: about 1 ms."""


@dataclass(frozen=True, slots=True)
class Level:
    """One tier of a stack, and what chooses its victims."""

    tier: Tier
    manager: RetentionManager


class Shelf:
    """A level and what is known to be on it. `lock` guards the manager; a tier's own I/O is outside of it."""

    def __init__(
        self,
        level: Level,
        lock: threading.Lock,
        index: IndexWriter | None,
        clock: Callable[[], float],
        uses: KeptUses,
    ) -> None:
        """Begin with nothing on record; `index` is told of changes, and `uses` asked how often new pages were used."""
        self.level = level
        self.tier = level.tier
        self.manager = level.manager
        self.leaving = 0
        """Victims on their way out. They are pinned, so that no two threads choose the same."""
        self._lock = lock
        self._index = index
        self._clock = clock
        self._uses = uses

    def __contains__(self, page: PageId) -> bool:
        with self._lock:
            return page in self.manager

    def size(self, page: PageId) -> int:
        """Return the bytes of a page's payload; 0 where it is not on record."""
        with self._lock:
            return self.manager.size(page.key, page.part)

    def record(self, page: PageId, header: PageHeader | None = None) -> None:
        """Make the record of a page equal to what the tier says now.

        Args:
            page: The page that may have come or gone.
            header: What to record where it has come.
        """
        tier, manager = self.tier, self.manager
        with self._lock:
            readable = tier.lookup(page) is LookupStatus.HIT
            known = manager.entry(page.key, page.part, tier.kind)
            if readable and known is None and header is not None:
                manager.stored(view_of(header, tier), self._clock(), uses=self._uses.of(page))
                if self._index is not None:
                    self._index.stored([entry_of(header, tier.kind)])
            elif not readable and known is not None:
                manager.removed(page.key, page.part)
                if self._index is not None:
                    self._index.removed([known])

    def adopt(self) -> int:
        """Take on what the tier holds at the start, before anybody uses it; return how many pages.

        The index is not told: what is held at the start is announced as a whole.
        """
        with self._lock:
            tier, prefixes = self.tier, self.manager.prefixes
            pages = tier.columns()
            if len(prefixes):
                _meet(prefixes, tier.pages())
                prefixes.learn([_leading(pages)])
            views = (view_of(header, tier) for header in tier.pages())
            self.manager.adopt(pages, views, self._clock(), self._uses_of)
            return len(self.manager)

    def replace_policy(self, policy: RetentionPolicy) -> None:
        """Let another policy choose victims: it is handed the pages, some at a time, the oldest first."""
        with self._lock:
            pages = self.manager.begin_replace(policy)
        try:
            self._hand_over(pages)
        except BaseException:
            with self._lock:
                self.manager.abandon_replace()
            raise

    def _hand_over(self, pages: HandOver) -> None:
        manager, kind = self.manager, self.tier.kind
        pages.put_in_order()
        headers = {}
        if manager.next_sees_pages:
            headers = {id_of(header): header for header in self.tier.pages()}
            self._learn(headers.values())
        while True:
            with self._lock:
                some = pages.take(_HANDED_AT_ONCE)
                for page in some:
                    header = headers.get(PageId(*page))
                    entry = manager.entry(*page, kind)
                    view = None if entry is None else _view(entry)
                    if header is not None:
                        view = view_of(header, self.tier)
                    if view is not None:
                        manager.move_over(view, self._clock(), uses=self._uses_of(page))
                if not some:
                    manager.end_replace()
                    return

    def _learn(self, headers: Iterable[PageHeader]) -> None:
        """Let who takes over know which named prefixes pages belong to, before it is handed any."""
        prefixes = self.manager.prefixes
        if not len(prefixes):
            return
        _meet(prefixes, headers)
        found: list[LeadingPages] = []
        for start in range(0, self.manager.capacity, _AT_ONCE):
            with self._lock:
                found.append(self.manager.leading(start, start + _AT_ONCE, prefixes.depth))
        prefixes.learn(found)

    def reconcile(self) -> None:
        """Forget what the tier has lost by itself, and take on what it has found since."""
        for page in self.held():
            if self.tier.lookup(page) is not LookupStatus.HIT:
                self.record(page)
        new: Iterable[PageHeader]
        new = (header for header in self.tier.pages() if id_of(header) not in self)
        if len(prefixes := self.manager.prefixes):
            # They come in any order.
            new = list(new)
            _meet(prefixes, new)
            prefixes.learn([_leading(columns_of(new))])
        for header in new:
            self.record(id_of(header), header)

    def held(self) -> Iterator[PageId]:
        """List the pages on record, those that come or go meanwhile perhaps among them."""
        start = 0
        while start < self.manager.capacity:
            with self._lock:
                some = self.manager.pages(start, start + _AT_ONCE)
            yield from (PageId(*page) for page in some)
            start += _AT_ONCE

    def entries(self) -> list[PageEntry]:
        """Return an entry for each page on record, without its tenant."""
        kind = self.tier.kind
        found = (self.manager.entry(page.key, page.part, kind) for page in self.held())
        return [entry for entry in found if entry is not None]

    def masks(self) -> PageMasks:
        """Return what the index should know of this level."""
        with self._lock:
            keys, parts = self.manager.columns()
        return tier_masks(keys, parts, self.tier.kind)

    def forget(self) -> None:
        """Forget all, because the tier is closed."""
        for page in list(self.held()):
            with self._lock:
                self.manager.removed(page.key, page.part)

    def _uses_of(self, page: tuple[PageKey, Part]) -> int:
        return self._uses.of(PageId(*page))

    def check(self) -> None:
        """Assert that record, tier and manager agree. Only while nobody uses them."""
        self.tier.check()
        self.manager.check()
        held = set(self.held())
        assert held == {id_of(header) for header in self.tier.pages()}
        assert self.tier.used_bytes <= self.tier.budget_bytes


def _meet(prefixes: Prefixes, headers: Iterable[PageHeader]) -> None:
    """Let named prefixes be known under the models whose pages these are."""
    for header in headers:
        prefixes.meet(header.model_root, header.page_tokens)


def _leading(pages: PageColumns) -> LeadingPages:
    return LeadingPages(pages.keys, pages.parents, pages.indexes)


def _view(entry: PageEntry) -> PageView:
    """Return what is known of a page without its header: all but whose it is."""
    return PageView(entry.key, entry.parent, entry.index, entry.part, entry.tier, entry.bytes)
