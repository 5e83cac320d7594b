"""Pages of device memory that are lent to whoever carries out an order about them.

Covers pinning pages by their keys, giving them back, and letting pages go that nobody uses. Belongs to the
step thread. Does not cover orders (`pie.worker.orders`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pie.page.events import Part
from pie.page.key import PageKey
from pie.worker.batch import PageSlot
from pie.worker.page_table import PageTable
from pie.worker.stores import PageToStore


class Lending:
    """The loans of one worker.

    Args:
        tables: Of its pages, and of its snapshots where the model has states.
    """

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self._tables = tables
        self._lent: list[PageToStore] = []

    def lend(self, pages: Iterable[tuple[PageKey, PageKey]]) -> list[PageToStore]:
        """Pin those of these pages that device memory holds, each with its group; `take_back` ends that."""
        lent = []
        for key, group in pages:
            for table in self._tables:
                slot = table.slot_of(key)
                if slot is not None:
                    table.acquire(slot)
                    frozen = table.frozen(slot)
                    is_state = table.part is Part.STATE
                    lent.append(PageToStore(slot, frozen, group, is_state=is_state))
        self._lent += lent
        return lent

    def take_back(self, lent: Iterable[PageToStore]) -> None:
        """End loans."""
        for one in lent:
            self._lent.remove(one)
            self._table_of(one).release((one.slot,))

    def held(self, pages: Iterable[tuple[PageKey, PageKey]]) -> set[PageKey]:
        """Return those of these pages that device memory holds."""
        main = self._tables[0] if self._tables[0].total else self._tables[-1]
        return {key for key, _ in pages if main.has(key)}

    def let_go(self, keys: Sequence[PageKey]) -> set[PageKey]:
        """Let those pages go that nobody uses, the last first; return those that are not held any more."""
        gone = set()
        for key in reversed(keys):
            if all(table.let_go(key) for table in self._tables):
                gone.add(key)
        return gone

    def users(self, table: PageTable) -> list[PageSlot]:
        """Return the slots of one table that are lent."""
        return [one.slot for one in self._lent if self._table_of(one) is table]

    def _table_of(self, one: PageToStore) -> PageTable:
        return next(table for table in self._tables if (table.part is Part.STATE) is one.is_state)
