"""Pages of one tier on their way from one policy to another, those unused for longest in front.

Covers their order, and which of them are still held when their turn comes. Does not cover what is handed on
(`pie.policies.manager`).
"""

from __future__ import annotations

from array import array

import numpy as np

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.page_rows import PageRows


class HandOver:
    """The pages that were held when it was made, which copies two columns of numbers and no more.

    Made and read by whom the table is of, or under its lock; `put_in_order` may run anywhere.

    Args:
        rows: The table.
        stamps: When each row was used, in the old policy's ticks.
    """

    def __init__(self, rows: PageRows, stamps: array[int]) -> None:
        self._rows = rows
        self._order = rows.held()
        self._stamps = np.array(stamps, np.int64)
        self._at = 0

    def put_in_order(self) -> None:
        """Order the pages, once and before any is read: a million take a tenth of a second."""
        stamps = self._stamps[self._order]
        self._order = self._order[np.argsort(stamps, kind="stable")]

    def take(self, most: int) -> list[tuple[PageKey, Part]]:
        """Return some of the pages that are left, as far as they are held; nothing where none is left.

        A row that has another page by now gives that one, which the new policy knows already.
        """
        found: list[tuple[PageKey, Part]] = []
        rows = self._rows
        while not found and self._at < len(self._order):
            some = self._order[self._at : self._at + most].tolist()
            self._at += len(some)
            found = [(rows.key(row), rows.part(row)) for row in some if rows.is_held(row)]
        return found
