"""The pages of one tier at one place, a row each.

Covers what is kept of a held page whatever the policy: key, part, size, pins, the page before it
and how many come after it. Built-in policies number their own columns by the same rows. Does not
cover which page leaves (`pie.policies.queued`) or who may (`pie.policies.manager`).

A pool node holds millions of small pages, so a row is numbers in arrays, about 60 bytes in all
beside the key itself, and rows are found by open addressing (linear probing, backward-shift
deletion; Knuth, TAOCP 3, 6.4): a `dict` from keys to ints takes 110 bytes a page more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeAlias

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.retention import PageView

Row: TypeAlias = int
"""The number of a held page, from 0; it is another page's once the page has left."""

NO_ROW: Row = -1

_SPREAD = 0x9E3779B97F4A7C15
"""Keeps the parts of a page apart in the table (2^64 over the golden ratio)."""
_NO_KEY = PageKey(b"")
_PARTS = tuple(Part)
_SHARDS = 1024
"""Tables that grow one at a time: one of a million rows would hold a step for 0.4 s."""
_SHARD_BITS = 10
_EMPTY = array("i", [NO_ROW])
"""Every shard until it has a row; the first one makes it grow, so this one stays as it is."""


class PageRows:
    """A table of pages. Not thread-safe."""

    def __init__(self) -> None:
        self.keys: list[PageKey] = []
        self.parents: list[bytes] = []
        """The key before each page, held or not."""
        self.parts = array("B")
        self.sizes = array("q")
        self.pins = array("i")
        self.indexes = array("i")
        self.children = array("i")
        """How many held pages come right after each."""
        self._free: list[Row] = []
        self._count = 0
        self._orphans: dict[tuple[bytes, int], int] = {}
        """How many held pages come after a page that is not held, by that page."""
        self._shards = [_EMPTY] * _SHARDS
        self._loads = array("i", [0]) * _SHARDS

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """How many rows there are, free ones among them."""
        return len(self.keys)

    def __iter__(self) -> Iterator[Row]:
        keys = self.keys
        return (row for row in range(len(keys)) if keys[row] is not _NO_KEY)

    def find(self, key: object, part: int) -> Row:
        """Return a page's row, or `NO_ROW`."""
        mixed = hash(key) ^ (part * _SPREAD)
        slots, keys = self._shards[mixed & (_SHARDS - 1)], self.keys
        mask = len(slots) - 1
        at = (mixed >> _SHARD_BITS) & mask
        while (row := slots[at]) >= 0:
            if keys[row] == key and self.parts[row] == part:
                return row
            at = (at + 1) & mask
        return NO_ROW

    def parent(self, row: Row) -> Row:
        """Return the row of the page before, or `NO_ROW` where it is not held."""
        return self.find(self.parents[row], self.parts[row])

    def part(self, row: Row) -> Part:
        """Return a page's part."""
        return _PARTS[self.parts[row]]

    def add(self, page: PageView) -> Row:
        """Give a page that is not held a row."""
        part = int(page.part)
        parent = self.find(page.parent, part)
        if parent >= 0:
            self.children[parent] += 1
            # The parent's own key: a second copy of its bytes would take 65 more.
            before: bytes = self.keys[parent]
        else:
            before = page.parent
            self._orphans[before, part] = self._orphans.get((before, part), 0) + 1
        children = self._orphans.pop((page.key, part), 0)
        if self._free:
            row = self._free.pop()
            self.keys[row] = page.key
            self.parents[row] = before
            self.parts[row] = part
            self.sizes[row] = page.bytes
            self.indexes[row] = page.index
            self.children[row] = children
        else:
            row = len(self.keys)
            self.keys.append(page.key)
            self.parents.append(before)
            self.parts.append(part)
            self.sizes.append(page.bytes)
            self.pins.append(0)
            self.indexes.append(page.index)
            self.children.append(children)
        self._count += 1
        self._enter(row)
        return row

    def remove(self, row: Row) -> Row:
        """Take a page's row away; return the row of the page before, or `NO_ROW`."""
        self._leave(row)
        key, before, part = self.keys[row], self.parents[row], self.parts[row]
        if self.children[row]:
            self._orphans[key, part] = self.children[row]
        self.keys[row] = _NO_KEY
        self.parents[row] = b""
        self.pins[row] = 0
        self.children[row] = 0
        self._free.append(row)
        self._count -= 1
        parent = self.find(before, part)
        if parent >= 0:
            self.children[parent] -= 1
            return parent
        left = self._orphans[before, part] - 1
        if left:
            self._orphans[before, part] = left
        else:
            del self._orphans[before, part]
        return NO_ROW

    def check(self) -> None:
        """Assert that the table agrees with itself; slow, for tests."""
        held = list(self)
        assert len(held) == self._count
        assert all(self.find(self.keys[row], self.parts[row]) == row for row in held)
        children: dict[tuple[bytes, int], int] = {}
        for row in held:
            before = (self.parents[row], self.parts[row])
            children[before] = children.get(before, 0) + 1
        for row in held:
            assert self.children[row] == children.pop((self.keys[row], self.parts[row]), 0)
        assert children == self._orphans
        slots = [row for shard in self._shards for row in shard if row >= 0]
        assert len(slots) == sum(self._loads) == self._count

    def _mixed(self, row: int) -> int:
        return hash(self.keys[row]) ^ (self.parts[row] * _SPREAD)

    def _enter(self, row: int) -> None:
        mixed = self._mixed(row)
        number = mixed & (_SHARDS - 1)
        slots = self._shards[number]
        self._loads[number] += 1
        if 2 * self._loads[number] > len(slots):
            rows = [row, *(other for other in slots if other >= 0)]
            slots = self._shards[number] = array("i", [NO_ROW]) * (2 * len(slots))
            for one in rows:
                _put(slots, self._mixed(one), one)
        else:
            _put(slots, mixed, row)

    def _leave(self, row: int) -> None:
        mixed = self._mixed(row)
        number = mixed & (_SHARDS - 1)
        slots = self._shards[number]
        self._loads[number] -= 1
        mask = len(slots) - 1
        at = (mixed >> _SHARD_BITS) & mask
        while slots[at] != row:
            at = (at + 1) & mask
        hole = at
        while (after := slots[at := (at + 1) & mask]) >= 0:
            # A row moves back into the hole unless that lies before the place it belongs to.
            home = (self._mixed(after) >> _SHARD_BITS) & mask
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = after
                hole = at
        slots[hole] = NO_ROW


def _put(slots: array[int], mixed: int, row: int) -> None:
    mask = len(slots) - 1
    at = (mixed >> _SHARD_BITS) & mask
    while slots[at] >= 0:
        at = (at + 1) & mask
    slots[at] = row
