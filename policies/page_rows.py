"""The pages of one tier at one place, a row each.

Covers what is kept of a held page whatever the policy: key, part, size, pins, the page before it
and how many come after it. Built-in policies number their own columns by the same rows. Does not
cover which page leaves (`pie.policies.queued`) or who may (`pie.policies.manager`).

A pool node holds millions of small pages, so a row is numbers in arrays: 24 bytes beside what `pie.page.key_table`
takes. A page that is not held has a row too while a held one comes after it, so that "the page before"
is a number.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from pie.page.columns import PageColumns
from pie.page.events import Part
from pie.page.key import PageKey
from pie.page.key_table import NO_ROW, Keys, KeyTable, Row, Rows
from pie.policies.prefixes import LeadingPages
from pie.policies.retention import PageView

__all__ = ["NO_ROW", "PageRows", "Row"]

_PARTS = tuple(Part)
_NOT_HELD = -2


class PageRows:
    """A table of pages. Not thread-safe."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self.parts = self._table.parts
        self._parents = array("i")
        """The row of the page before each, held or not."""
        self.sizes = array("q")
        self.pins = array("i")
        self.indexes = array("i")
        self.children = array("i")
        """How many held pages come right after each."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """How many rows there are, free ones among them."""
        return len(self._parents)

    def __iter__(self) -> Iterator[Row]:
        return self.between(0, self.capacity)

    def between(self, start: Row, stop: Row) -> Iterator[Row]:
        """List the rows of held pages from `start` on and before `stop`."""
        parents = self._parents
        return (row for row in range(start, min(stop, len(parents))) if parents[row] != _NOT_HELD)

    def find(self, key: bytes, part: int) -> Row:
        """Return a held page's row, or `NO_ROW`."""
        row = self._table.find(key, part)
        return NO_ROW if row >= 0 and self._parents[row] == _NOT_HELD else row

    def is_held(self, row: Row) -> bool:
        """Say whether a row is a held page's."""
        return self._parents[row] != _NOT_HELD

    def key(self, row: Row) -> PageKey:
        """Return a page's key."""
        return self._table.key(row)

    def part(self, row: Row) -> Part:
        """Return a page's part."""
        return _PARTS[self.parts[row]]

    def parent(self, row: Row) -> Row:
        """Return the row of the page before, or `NO_ROW` where it is not held."""
        parent = self._parents[row]
        return NO_ROW if parent < 0 or self._parents[parent] == _NOT_HELD else parent

    def before(self, row: Row) -> Row:
        """Return the row of the page before, held or not; `NO_ROW` where the row itself is of no held page."""
        return max(self._parents[row], NO_ROW)

    def parent_key(self, row: Row) -> bytes:
        """Return the key before a page's, or its root."""
        return self._table.key(self._parents[row])

    def held(self) -> Rows:
        """Return the rows of all held pages."""
        return np.flatnonzero(np.array(self._parents, np.int32) != _NOT_HELD).astype(np.int32)

    def leading(self, start: Row, stop: Row, most: int) -> LeadingPages:
        """Return those of the held pages of some rows that are among the first `most` of their sequences."""
        parents = np.array(self._parents[start:stop], np.int32)
        indexes = np.array(self.indexes[start:stop], np.int32)
        found = np.flatnonzero((parents != _NOT_HELD) & (indexes < most))
        rows = (found + start).astype(np.int32)
        return LeadingPages(self.keys(rows), self.keys(parents[found]), indexes[found])

    def keys(self, rows: Rows) -> Keys:
        """Return the keys of rows."""
        return self._table.keys(rows)

    def add(self, page: PageView) -> Row:
        """Give a page that is not held a row."""
        part = int(page.part)
        row = self._table.find_or_add(page.key, part)
        parent = self._table.find_or_add(page.parent, part)
        self._grow()
        self._parents[row] = parent
        self.sizes[row] = page.bytes
        self.indexes[row] = page.index
        self.children[parent] += 1
        self._count += 1
        return row

    def add_all(self, pages: PageColumns) -> Rows:
        """Give pages that are not held, each once, rows in their order."""
        rows = self._table.find_or_add_all(pages.keys, pages.parts)
        parents = _parents_of(pages, rows, self._table)
        self._grow()
        columns = (
            (self._parents, parents),
            (self.sizes, pages.sizes),
            (self.indexes, pages.indexes),
        )
        for column, values in columns:
            np.frombuffer(column, values.dtype)[rows] = values
        np.add.at(np.frombuffer(self.children, np.int32), parents, 1)
        self._count += len(rows)
        return rows

    def remove(self, row: Row) -> Row:
        """Take a page's row away; return the row of the page before, or `NO_ROW`."""
        parent = self._parents[row]
        is_held = self._parents[parent] != _NOT_HELD and parent != row
        self._parents[row] = _NOT_HELD
        self.pins[row] = 0
        self._count -= 1
        self.children[parent] -= 1
        self._drop_unused(row)
        if parent != row:
            self._drop_unused(parent)
        return parent if is_held else NO_ROW

    def check(self) -> None:
        """Assert that the table agrees with itself; slow, for tests."""
        self._table.check()
        held = list(self)
        assert len(held) == self._count
        children = [0] * self.capacity
        for row in held:
            children[self._parents[row]] += 1
        assert children == list(self.children)
        used = set(held) | {row for row, count in enumerate(children) if count}
        assert len(used) == len(self._table)
        assert all(self.find(self.key(row), self.parts[row]) == row for row in held)

    def _drop_unused(self, row: Row) -> None:
        if self._parents[row] == _NOT_HELD and not self.children[row]:
            self._table.remove(row)

    def _grow(self) -> None:
        """Make the columns as long as the table is."""
        missing = self._table.capacity - len(self._parents)
        if missing <= 0:
            return
        self._parents.extend(array("i", [_NOT_HELD]) * missing)
        for column in (self.sizes, self.pins, self.indexes, self.children):
            column.frombytes(bytes(column.itemsize * missing))


def _parents_of(pages: PageColumns, rows: Rows, table: KeyTable) -> Rows:
    """Return the rows of the pages before, most of which come right before in `pages` too."""
    parents = np.empty(len(rows), np.int32)
    follows = np.zeros(len(rows), bool)
    follows[1:] = (pages.parents[1:] == pages.keys[:-1]).all(axis=1)
    follows[1:] &= pages.parts[1:] == pages.parts[:-1]
    parents[1:][follows[1:]] = rows[:-1][follows[1:]]
    others = np.flatnonzero(~follows)
    parents[others] = table.find_or_add_all(pages.parents[others], pages.parts[others])
    return parents
