"""What built-in retention policies share: pages in queues, and none before its children.

Covers the order in which pages are proposed: queue by queue, and in each the page that entered it
first. A policy says which queue a page belongs to and which queue gives first. Does not cover pins
as such, sizes or what leaves (`pie.policies.manager`).

A page is of no use without the pages before it, so only leaves stand in a queue: pages without a
held child (the next page of a sequence, same part, same tier) and without a pin. This is the order
of radix caches (SGLang's RadixAttention, vLLM's reversed free list). A queue is a linked list over
rows, by stamp. A page that becomes a leaf again comes back with the stamp it had; where that falls
between others it waits in a heap beside the list, and the two are merged as they are read. So every
event costs O(1), or O(log n) for such a page, and a proposed page the same.
"""

from __future__ import annotations

import enum
import heapq
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse

import numpy as np

from pie.page.events import Part
from pie.page.key import PageKey
from pie.page.key_table import Rows
from pie.policies.page_rows import NO_ROW, PageRows, Row
from pie.policies.retention import PageView

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
STAY = -1
"""A page keeps its place."""
_OUT, _LISTED, _HEAPED = 0, 1, 2
_AT_ENDS = 1e18
_RANKS = (0.0, -_AT_ENDS, _AT_ENDS)
"""Ranks of bands: before and after those of a policy's queues."""


class Band(enum.IntEnum):
    """Where rules want a page: in the policy's order, or before or after all of it."""

    MIDDLE = 0
    FIRST = 1
    LAST = 2


class QueuedRetention:
    """A retention policy that keeps its pages in `queues` queues.

    Used alone it keeps its own table of pages; a manager lends its table (`share`) and then tells
    it of rows instead of pages.
    """

    def __init__(self, queues: int = 1) -> None:
        self.rows = PageRows()
        self.tick = 0
        """Uses so far: stored pages and hits. The order of events is the only clock here."""
        self.stamps = array("q")
        """When a page entered its queue, in ticks; unique."""
        self.queue_of = array("H")
        """The queue that the policy has given each page; it stands there unless it has a band."""
        self._bands = array("B")
        self._bands_from = queues - 1
        """A band's queue comes so many after its number: the policy's own come first."""
        self.counts = array("q", [0]) * queues
        """Pages that belong to each queue, leaves or not."""
        self.rank_of = array("d", [0.0]) * queues
        """Smaller for a queue that comes before another in `ranking`."""
        self._state = array("B")
        self._before = array("i")
        self._after = array("i")
        self._heads = array("i", [NO_ROW]) * (queues + 2)
        self._tails = array("i", [NO_ROW]) * (queues + 2)
        self._heaps: list[list[int]] = [[] for _ in range(queues + 2)]
        self._version = 0
        self._is_shared = False
        self.on_leaf: Callable[[Row, bool], None] | None = None
        """Told of a page that is one no more, or again; not of those that come or leave."""
        self.on_band: Callable[[Row, Band], None] | None = None
        """Told of a page whose band is another now; not of those that come."""

    # What a policy decides.

    def place(self, row: Row) -> int:  # noqa: ARG002
        """Return the queue of a page that has just been stored."""
        return 0

    def use(self, row: Row) -> int:
        """Return the queue that a page enters when it has been used, or `STAY`."""
        return self.queue_of[row]

    def forget(self, row: Row, key: PageKey, part: int) -> None:
        """Learn that a page has left; its row still has its queue."""

    def grow(self, rows: int) -> None:
        """Make one's own columns `rows` long."""

    def ranking(self) -> Sequence[int]:
        """Return the queues, the one that gives first in front."""
        return (0,)

    # The contract of `pie.policies.retention`.

    def stored(self, page: PageView, now_s: float) -> None:  # noqa: ARG002
        """Learn that `page` is held from now on; one that is held already was just used."""
        row = self.rows.find(page.key, page.part)
        if row >= 0:
            self.row_hit(row)
        else:
            self.row_stored(self.rows.add(page))

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:  # noqa: ARG002
        """Learn that a held page was used; others are ignored."""
        row = self.rows.find(key, part)
        if row >= 0:
            self.row_hit(row)
        self._version += 1

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held; others are ignored."""
        row = self.rows.find(key, part)
        if row >= 0:
            self.row_removed(row, key, part, self.rows.remove(row))
        self._version += 1

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:  # noqa: ARG002
        """Propose every leaf, best victim first, as if each proposed page had left.

        The proposals end where an event comes in before they are read.
        """
        rows = self.rows
        return ((rows.key(row), rows.part(row)) for row in self.row_victims())

    # The same by rows, for a manager.

    def share(self, rows: PageRows) -> None:
        """Use a manager's table from now on; that of no page yet."""
        assert not len(self.rows) + len(rows), "a policy is shared before it holds pages"
        self.rows = rows
        self._is_shared = True

    def row_stored(self, row: Row) -> None:
        """Learn of a page that has just been given a row."""
        self._version += 1
        self.tick += 1
        self._make_room()
        self.stamps[row] = self.tick
        self._bands[row] = Band.MIDDLE
        queue = self.place(row)
        self.queue_of[row] = queue
        self.counts[queue] += 1
        parent = self.rows.parent(row)
        if parent >= 0 and self._state[parent]:
            self._take_out(parent)
            if self.on_leaf is not None:
                self.on_leaf(parent, False)
        if not self.rows.children[row] and not self.rows.pins[row]:
            self._put_in(row)

    def rows_stored(self, rows: Rows) -> None:
        """Learn of pages that have all been given rows just now, in order."""
        if type(self).place is not QueuedRetention.place or len(rows) < len(self.rows):
            for row in rows.tolist():
                self.row_stored(row)
            return
        # All in one queue, and no page was held before: they stand behind each other.
        self._version += 1
        self._make_room()
        np.frombuffer(self.stamps, np.int64)[rows] = np.arange(len(rows)) + (self.tick + 1)
        self.tick += len(rows)
        self.counts[0] += len(rows)
        for column, dtype in ((self._bands, np.uint8), (self.queue_of, np.uint16)):
            np.frombuffer(column, dtype)[rows] = 0
        is_leaf = np.frombuffer(self.rows.children, np.int32)[rows] == 0
        is_leaf &= np.frombuffer(self.rows.pins, np.int32)[rows] == 0
        leaves = rows[is_leaf]
        if len(leaves):
            np.frombuffer(self._state, np.uint8)[leaves] = _LISTED
            after, before = (
                np.frombuffer(self._after, np.int32),
                np.frombuffer(self._before, np.int32),
            )
            after[leaves[:-1]], before[leaves[1:]] = leaves[1:], leaves[:-1]
            self._heads[0], self._tails[0] = int(leaves[0]), int(leaves[-1])
            before[self._heads[0]] = after[self._tails[0]] = NO_ROW

    def row_hit(self, row: Row) -> None:
        """Learn that a page was used."""
        self._version += 1
        self.tick += 1
        queue = self.use(row)
        if queue != STAY:
            self.move(row, queue, self.tick)

    def row_pinned(self, row: Row) -> None:
        """Learn that a page has its first pin: it is not proposed, nor what is before it."""
        if self._state[row]:
            self._version += 1
            self._take_out(row)
            if self.on_leaf is not None:
                self.on_leaf(row, False)

    def row_unpinned(self, row: Row) -> None:
        """Learn that a page has lost its last pin."""
        if not self._state[row] and not self.rows.children[row]:
            self._version += 1
            self._put_in(row)
            if self.on_leaf is not None:
                self.on_leaf(row, True)

    def row_removed(self, row: Row, key: PageKey, part: int, parent: Row) -> None:
        """Learn that a page has left its row, and which row the page before it has."""
        self._version += 1
        if self._state[row]:
            self._take_out(row)
        self.forget(row, key, part)
        self.counts[self.queue_of[row]] -= 1
        rows = self.rows
        if parent >= 0 and not rows.children[parent] and not rows.pins[parent]:
            self._put_in(parent)
            if self.on_leaf is not None:
                self.on_leaf(parent, True)

    def row_victims(self, before: Sequence[Row] = ()) -> Iterator[Row]:
        """Propose rows as `victims` proposes pages, as if those of `before` had left already."""
        queues = self.ranking()
        version = self._version
        stamps = self.stamps
        gone: dict[Row, int] = {}
        passed = set(before)
        # Pages whose children have all left so, by rank and stamp.
        bared: list[tuple[float, int, Row]] = []
        for row in before:
            self._leave(row, gone, bared)
        bared = [one for one in bared if one[2] not in passed]
        heapq.heapify(bared)
        first, last = self._bands_from + Band.FIRST, self._bands_from + Band.LAST
        for queue in (first, *queues, last, None):
            rank = math.inf if queue is None else self._place_of(queue)
            in_turn = iter(()) if queue is None else self.standing(queue)
            standing = filterfalse(passed.__contains__, in_turn)
            row = next(standing, NO_ROW)
            while True:
                if bared and (bared[0][0] <= rank if row < 0 else bared[0] < (rank, stamps[row])):
                    victim = heapq.heappop(bared)[2]
                elif row >= 0:
                    victim, row = row, NO_ROW
                else:
                    break
                yield victim
                if self._version != version:
                    return
                self._leave(victim, gone, bared)
                if row < 0:
                    row = next(standing, NO_ROW)

    def standing(self, queue: int) -> Iterator[Row]:
        """List the leaves in a queue, the one that entered first in front."""
        state, stamps, after = self._state, self.stamps, self._after
        heap = self._heaps[queue]
        while heap and not self._is_heaped(heap[0], queue):
            heapq.heappop(heap)
        row = self._heads[queue]
        if not heap:
            while row >= 0:
                following = after[row]
                yield row
                row = following
            return
        # The smallest entries of a heap, without changing it: an entry comes after its ancestors.
        ahead = [(heap[0], 0)]
        last = -1
        while ahead or row >= 0:
            if row >= 0 and (not ahead or stamps[row] < ahead[0][0] >> _ROW_BITS):
                following = after[row]
                yield row
                row = following
                continue
            entry, at = heapq.heappop(ahead)
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(ahead, (heap[below], below))
            heaped = entry & _ROW_MASK
            if entry != last and state[heaped] == _HEAPED and self._is_heaped(entry, queue):
                last = entry
                yield heaped

    def band_of(self, row: Row) -> Band:
        """Return where rules want a page."""
        return Band(self._bands[row])

    def set_band(self, row: Row, band: Band) -> None:
        """Let a page stand where rules want it."""
        if self._bands[row] == band:
            return
        self._version += 1
        is_leaf = self._state[row] != _OUT
        if is_leaf:
            self._take_out(row)
        self._bands[row] = band
        if is_leaf:
            self._put_in(row)
        if self.on_band is not None:
            self.on_band(row, band)

    def is_leaf(self, row: Row) -> bool:
        """Say whether a page can leave: no page comes after it, and it has no pin."""
        return self._state[row] != _OUT

    def first_victims(self) -> Iterator[Row]:
        """Propose what rules want to leave before all else."""
        return self.standing(self._bands_from + Band.FIRST)

    def is_empty(self, queue: int) -> bool:
        """Say whether no leaf stands in a queue."""
        return self._heads[queue] < 0 and self.oldest(queue) < 0

    def oldest(self, queue: int) -> Row:
        """Return the leaf that entered a queue first, or `NO_ROW`."""
        return next(self.standing(queue), NO_ROW)

    def move(self, row: Row, queue: int, stamp: int) -> None:
        """Let a page stand in another queue, or elsewhere in its own."""
        is_leaf = self._state[row] != _OUT
        if is_leaf:
            self._take_out(row)
        self.counts[self.queue_of[row]] -= 1
        self.counts[queue] += 1
        self.queue_of[row] = queue
        self.stamps[row] = stamp
        if is_leaf:
            self._put_in(row)

    def check(self) -> None:
        """Assert that the policy agrees with itself; slow, for tests."""
        rows = self.rows
        if not self._is_shared:
            rows.check()
        held = list(rows)
        counts = [0] * len(self.counts)
        for row in held:
            counts[self.queue_of[row]] += 1
            is_leaf = not rows.children[row] and not rows.pins[row]
            assert (self._state[row] != _OUT) == is_leaf
        assert counts == list(self.counts)
        for queue, heap in enumerate(self._heaps):
            standing = list(self.standing(queue))
            assert [self.stamps[row] for row in standing] == sorted(
                self.stamps[row] for row in standing
            )
            assert sorted(standing) == [
                row for row in held if self._state[row] and self.stands_in(row) == queue
            ]
            assert len(heap) <= 2 * len(held) + 64

    def _leave(self, row: Row, gone: dict[Row, int], bared: list[tuple[float, int, Row]]) -> None:
        """Note that a page is as good as gone, and the one before it where that can leave then."""
        rows = self.rows
        parent = rows.parent(row)
        if parent >= 0:
            gone[parent] = gone.get(parent, 0) + 1
            if gone[parent] == rows.children[parent] and not rows.pins[parent]:
                rank = self._place_of(self.stands_in(parent))
                heapq.heappush(bared, (rank, self.stamps[parent], parent))

    def _place_of(self, queue: int) -> float:
        """Return where a queue comes among those of the policy and of bands."""
        at = queue - self._bands_from
        return _RANKS[at] if at > 0 else self.rank_of[queue]

    def _make_room(self) -> None:
        """Make the columns as long as the table is."""
        missing = self.rows.capacity - len(self._state)
        if missing > 0:
            zeros = bytes(missing)
            self.stamps.frombytes(zeros * 8)
            self.queue_of.frombytes(zeros * 2)
            self._state.frombytes(zeros)
            self._bands.frombytes(zeros)
            self._before.frombytes(zeros * 4)
            self._after.frombytes(zeros * 4)
            self.grow(len(self._state))

    def _put_in(self, row: Row) -> None:
        """Let a leaf stand in its queue, by its stamp."""
        queue, stamp = self.stands_in(row), self.stamps[row]
        head, tail = self._heads[queue], self._tails[queue]
        self._state[row] = _LISTED
        if tail < 0:
            self._heads[queue] = self._tails[queue] = row
            self._before[row] = self._after[row] = NO_ROW
        elif stamp > self.stamps[tail]:
            self._after[tail] = row
            self._before[row], self._after[row] = tail, NO_ROW
            self._tails[queue] = row
        elif stamp < self.stamps[head]:
            self._before[head] = row
            self._before[row], self._after[row] = NO_ROW, head
            self._heads[queue] = row
        else:
            self._state[row] = _HEAPED
            heap = self._heaps[queue]
            heapq.heappush(heap, (stamp << _ROW_BITS) | row)
            if len(heap) > 2 * len(self.rows) + 64:
                # Stale entries stay a constant share. A sorted list is a heap.
                heap[:] = sorted({e for e in heap if self._is_heaped(e, queue)})

    def _take_out(self, row: Row) -> None:
        state = self._state[row]
        self._state[row] = _OUT
        if state == _HEAPED:
            return
        queue, before, after = self.stands_in(row), self._before[row], self._after[row]
        if before >= 0:
            self._after[before] = after
        else:
            self._heads[queue] = after
        if after >= 0:
            self._before[after] = before
        else:
            self._tails[queue] = before

    def stands_in(self, row: Row) -> int:
        """Return the queue of a page, or where its band stands, leaf or not: after the queues, first and last."""
        band = self._bands[row]
        return self._bands_from + band if band else self.queue_of[row]

    def _is_heaped(self, entry: int, queue: int) -> bool:
        row = entry & _ROW_MASK
        return (
            self._state[row] == _HEAPED
            and self.stands_in(row) == queue
            and self.stamps[row] == entry >> _ROW_BITS
        )
