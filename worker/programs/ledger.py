"""The pages that all programs of a worker hold together.

Covers taking, sharing and releasing pages of the page table within a cap of their own, so that
programs leave room for requests. Pure, like the table. Does not cover which slots lie in them
(`pie.worker.programs.slots`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pie.page.key import PageKey
from pie.worker.batch import PageSlot
from pie.worker.page_table import FrozenPage, PageTable


class PageLedger:
    """Pages in use by programs.

    Args:
        table: Where they are taken from.
        cap: Most of them at a time.
    """

    def __init__(self, table: PageTable, cap: int) -> None:
        self._table = table
        self.cap = cap
        self._users: Counter[PageSlot] = Counter()

    def __len__(self) -> int:
        return len(self._users)

    @property
    def room(self) -> int:
        """Pages that can be taken now."""
        return min(self.cap - len(self._users), self._table.available)

    def allocate(
        self, count: int, now_s: float, *, after: PageSlot | None = None
    ) -> list[PageSlot] | None:
        """Take writable pages; None, and no change, where there are not so many."""
        if len(self._users) + count > self.cap:
            return None
        pages = self._table.allocate(count, now_s, after=after) if count else []
        if pages is not None:
            self._users.update(pages)
        return pages

    def match(self, keys: Sequence[PageKey], now_s: float) -> list[PageSlot]:
        """Take the frozen pages of the longest leading run of `keys` that fits under the cap."""
        keys = keys[: max(0, self.cap - len(self._users))]
        pages = self._table.match(keys, now_s) if keys else []
        self._users.update(pages)
        return pages

    def share(self, pages: Sequence[PageSlot], count: int) -> None:
        """Add `count` users to pages that programs hold already, none of them writable."""
        for page in pages:
            self._table.acquire(page, count)
            self._users[page] += count

    def release(self, pages: Sequence[PageSlot]) -> None:
        """Take one user from each page."""
        self._table.release(pages)
        for page in pages:
            self._forget(page)

    def freeze(self, page: PageSlot, frozen: FrozenPage, now_s: float) -> PageSlot:
        """Name a full page; return the page that holds the key from now on."""
        held = self._table.freeze(page, frozen, now_s)
        if held != page:
            self._forget(page)
            self._users[held] += 1
        return held

    def begin_load(self, pages: Sequence[PageSlot]) -> None:
        """Mark writable pages as being written by a load: they cannot be released meanwhile."""
        self._table.begin_load(pages)

    def end_load(self, pages: Sequence[PageSlot]) -> None:
        """Make pages whose load has ended writable again."""
        self._table.end_load(pages)

    def seal(self, page: PageSlot) -> None:
        """Make a page immutable without a name."""
        self._table.seal(page)

    def users(self) -> list[PageSlot]:
        """List every page as often as it is used."""
        return list(self._users.elements())

    def _forget(self, page: PageSlot) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
