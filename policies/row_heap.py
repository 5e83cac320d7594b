"""Rows in order of a number that each has, any of which can change or leave.

Covers the order alone. Does not cover what the numbers mean. A plain heap would keep entries of rows that were
changed or are gone, which then are dropped all at once by whoever meets them; here there are none.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from pie.policies.page_rows import NO_ROW, Row

_Number = TypeVar("_Number", int, float, tuple[float, int])


class RowHeap(Generic[_Number]):
    """A binary heap of rows; every change costs O(log n). A row stands in one heap of a column of places.

    Args:
        keys: The number of each row; whoever changes that of a row in the heap calls `put`.
        places: Where in its heap each row stands, or `NO_ROW`; of nobody else to change.
    """

    __slots__ = ("_heap", "_keys", "_places")

    def __init__(self, keys: Sequence[_Number], places: array[int]) -> None:
        self._keys: Sequence[_Number] = keys
        self._places = places
        self._heap: list[Row] = []

    def __len__(self) -> int:
        return len(self._heap)

    def first(self) -> Row:
        """Return the row with the smallest number, or `NO_ROW`."""
        return self._heap[0] if self._heap else NO_ROW

    def in_order(self) -> Iterator[Row]:
        """List the rows, the smallest number first; the k-th costs O(log k). Nothing may change meanwhile."""
        heap, keys = self._heap, self._keys
        ahead = [(keys[heap[0]], 0)] if heap else []
        while ahead:
            at = heapq.heappop(ahead)[1]
            yield heap[at]
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(ahead, (keys[heap[below]], below))

    def put(self, row: Row) -> None:
        """Let a row stand where its number says, whether it stood here or in no heap."""
        at = self._places[row]
        if at < 0:
            at = len(self._heap)
            self._heap.append(row)
        self._settle(row, at)

    def drop(self, row: Row) -> None:
        """Take a row out; one that is in no heap is ignored."""
        at = self._places[row]
        if at < 0:
            return
        self._places[row] = NO_ROW
        last = self._heap.pop()
        if last != row:
            self._settle(last, at)

    def check(self) -> None:
        """Assert that rows are in order, and places true; slow, for tests."""
        heap, keys = self._heap, self._keys
        assert all(self._places[row] == at for at, row in enumerate(heap))
        assert all(keys[heap[(at - 1) // 2]] <= keys[heap[at]] for at in range(1, len(heap)))

    def _settle(self, row: Row, at: int) -> None:
        """Find a row its place, from `at` on, whose row may be overwritten."""
        heap, keys, places = self._heap, self._keys, self._places
        key = keys[row]
        while at and key < keys[above := heap[(at - 1) // 2]]:
            heap[at] = above
            places[above] = at
            at = (at - 1) // 2
        count = len(heap)
        while (below := 2 * at + 1) < count:
            if below + 1 < count and keys[heap[below + 1]] < keys[heap[below]]:
                below += 1
            if key <= keys[child := heap[below]]:
                break
            heap[at] = child
            places[child] = at
            at = below
        heap[at] = row
        places[row] = at
