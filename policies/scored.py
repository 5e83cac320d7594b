"""A retention policy in one method: the page with the lowest score leaves first.

Covers keeping pages in order of what a user's class says of each. Does not cover the full contract
(`pie.policies.retention`), which a policy has that goes by more than one page at a time.

A page stands by its score among those that no held page follows; it joins them when the last one after it has left, so that
a sequence goes from its end. One that is in use does not stand there, and so none before it. Coming, leaving, a use and a pin cost O(log n) each for n pages, and a use one call of `score`; the
k-th proposal of an answer costs O(log k), however many pages there are.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.page_rows import NO_ROW, PageRows, Row
from pie.policies.retention import PageView
from pie.policies.row_heap import RowHeap


@dataclass(slots=True)
class PageUse:
    """How a held page has been used in its tier."""

    stored_s: float
    """When it came."""
    used_s: float
    """When it was last used; when it came, where it was not yet."""
    uses: int = 0
    """How often it was used since it came."""


class ScoredRetention(ABC):
    """The base of policies that score pages. A class of its own constructor need not call this one's."""

    @abstractmethod
    def score(self, page: PageView, use: PageUse, now_s: float) -> float:
        """Return what a page is worth: the lowest leaves first, of equals the one unused for longest.

        Asked when the page comes and each time it was used; what it says then stands until the next use. What loses worth
        with time is compared with others all the same by a score that grows with the time of its use.
        """

    def stored(self, page: PageView, now_s: float) -> None:
        """Learn that `page` is held from now on; one that is held already was just used."""
        pages = self._pages
        if pages.rows.find(page.key, page.part) >= 0:
            self.hit(page.key, page.part, now_s)
            return
        use = PageUse(now_s, now_s)
        pages.add(page, use, _checked(self.score(page, use, now_s)))

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Learn that a held page was used."""
        pages = self._pages
        row = pages.rows.find(key, part)
        if row < 0:
            return
        page, use = pages.known[row]
        use.used_s = now_s
        use.uses += 1
        pages.rank(row, _checked(self.score(page, use, now_s)))

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held."""
        row = self._pages.rows.find(key, part)
        if row >= 0:
            self._pages.remove(row)

    def pinned(self, key: PageKey, part: Part) -> None:
        """Learn that a page is in use: it is not proposed, and none before it."""
        row = self._pages.rows.find(key, part)
        if row >= 0:
            self._pages.pin(row)

    def unpinned(self, key: PageKey, part: Part) -> None:
        """Learn that a page is in use no longer."""
        row = self._pages.rows.find(key, part)
        if row >= 0:
            self._pages.unpin(row)

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:  # noqa: ARG002
        """Propose all pages that may leave, each as if those proposed before it had left. Ends at a change of them."""
        rows = self._pages.rows
        return ((rows.key(row), rows.part(row)) for row in self._pages.in_order())

    def check(self) -> None:
        """Assert that pages stand where they should; slow, for tests."""
        self._pages.check()

    @cached_property
    def _pages(self) -> _Pages:
        return _Pages()


@dataclass(slots=True)
class _Pages:
    """The pages of one tier, and those that nothing follows and nobody uses in order of their scores."""

    rows: PageRows = field(default_factory=PageRows)
    known: dict[Row, tuple[PageView, PageUse]] = field(default_factory=dict)
    ranks: list[tuple[float, int]] = field(default_factory=list)
    """The score of each, and when it was given, in events."""
    places: array[int] = field(default_factory=lambda: array("i"))
    leaves: RowHeap[tuple[float, int]] = field(init=False)
    events: int = 0

    def __post_init__(self) -> None:
        self.leaves = RowHeap(self.ranks, self.places)

    def add(self, page: PageView, use: PageUse, score: float) -> None:
        row = self.rows.add(page)
        missing = self.rows.capacity - len(self.places)
        self.places.extend(array("i", [NO_ROW]) * missing)
        self.ranks.extend([(0.0, 0)] * missing)
        self.known[row] = (page, use)
        parent = self.rows.parent(row)
        if parent >= 0:
            self.leaves.drop(parent)
        self.rank(row, score)

    def rank(self, row: Row, score: float) -> None:
        self.events += 1
        self.ranks[row] = (score, self.events)
        self._put_leaf(row)

    def pin(self, row: Row) -> None:
        self.events += 1
        self.rows.pins[row] = 1
        self.leaves.drop(row)

    def unpin(self, row: Row) -> None:
        self.events += 1
        self.rows.pins[row] = 0
        self._put_leaf(row)

    def remove(self, row: Row) -> None:
        self.events += 1
        self.leaves.drop(row)
        del self.known[row]
        parent = self.rows.remove(row)
        if parent >= 0:
            self._put_leaf(parent)

    def _put_leaf(self, row: Row) -> None:
        if not self.rows.children[row] and not self.rows.pins[row]:
            self.leaves.put(row)

    def in_order(self) -> Iterator[Row]:
        rows, ranks, events = self.rows, self.ranks, self.events
        gone: dict[Row, int] = {}
        # Pages of which all that come after them have been proposed here.
        bared: list[tuple[tuple[float, int], Row]] = []
        leaves = self.leaves.in_order()
        leaf = next(leaves, NO_ROW)
        while leaf >= 0 or bared:
            if bared and (leaf < 0 or bared[0][0] < ranks[leaf]):
                row = heapq.heappop(bared)[1]
            else:
                row = leaf
                leaf = next(leaves, NO_ROW)
            yield row
            if self.events != events:
                return
            parent = rows.parent(row)
            if parent >= 0:
                gone[parent] = gone.get(parent, 0) + 1
                if gone[parent] == rows.children[parent] and not rows.pins[parent]:
                    heapq.heappush(bared, (ranks[parent], parent))

    def check(self) -> None:
        self.rows.check()
        self.leaves.check()
        held = set(self.rows)
        assert held == self.known.keys()
        bare = {row for row in held if not self.rows.children[row] and not self.rows.pins[row]}
        assert {row for row, place in enumerate(self.places) if place >= 0} == bare


def _checked(score: float) -> float:
    """Return a score that can be compared.

    Raises:
        ValueError: It is no number.
    """
    if math.isnan(score):
        raise ValueError("a score must be a number, and is nan")
    return score
