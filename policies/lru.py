"""`lru`: the page unused for longest leaves first, and no page before its children.

Covers one built-in retention policy. Does not cover pins (`pie.policies.manager`).

A page is of no use without the pages before it, so a page that has a held child (the next page of
a sequence, same part, same tier) is not proposed before that child. This is the order that radix
caches use (SGLang's RadixAttention, vLLM's reversed free list).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.retention import PageView

_Page = tuple[PageKey, Part]


@dataclass(slots=True)
class _Held:
    parent: _Page
    used: int
    """Tick of the last use; unique, so that the order of victims never depends on hashing."""


class LruRetention:
    """Least recently used, leaves first.

    Events cost O(log n) amortised, and a proposed page O(log n). Order comes from the order of
    events, not from the clock.
    """

    def __init__(self) -> None:
        self._held: dict[_Page, _Held] = {}
        self._children: dict[_Page, int] = {}
        self._leaves: list[tuple[int, _Page]] = []
        """Heap by tick. Has an entry for every leaf, and stale ones, told by their tick."""
        self._tick = 0

    def stored(self, page: PageView, now_s: float) -> None:  # noqa: ARG002
        """Learn that `page` is held from now on; one that is held already was just used."""
        at = (page.key, page.part)
        if at in self._held:
            self._touch(at)
            return
        parent = (PageKey(page.parent), page.part)
        self._tick += 1
        self._held[at] = _Held(parent, self._tick)
        self._children[parent] = self._children.get(parent, 0) + 1
        if at not in self._children:
            self._push(self._tick, at)

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:  # noqa: ARG002
        """Learn that a held page was used; others are ignored."""
        if (key, part) in self._held:
            self._touch((key, part))

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held; others are ignored."""
        held = self._held.pop((key, part), None)
        if held is None:
            return
        left = self._children[held.parent] - 1
        if left:
            self._children[held.parent] = left
        else:
            del self._children[held.parent]
            parent = self._held.get(held.parent)
            if parent is not None:
                self._push(parent.used, held.parent)
        self._compact()

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[_Page]:  # noqa: ARG002
        """Propose every held page, best victim first, as if each proposed one had left."""
        orphaned: list[tuple[int, _Page]] = []
        children_gone: dict[_Page, int] = {}
        taken: list[tuple[int, _Page]] = []
        try:
            while self._leaves or orphaned:
                if not orphaned or (self._leaves and self._leaves[0] < orphaned[0]):
                    entry = heapq.heappop(self._leaves)
                    if not self._is_leaf(entry):
                        continue
                    if taken and taken[-1] == entry:
                        continue
                    taken.append(entry)
                else:
                    entry = heapq.heappop(orphaned)
                page = entry[1]
                held = self._held.get(page)
                if held is None:
                    continue
                yield page
                gone = children_gone[held.parent] = children_gone.get(held.parent, 0) + 1
                parent = self._held.get(held.parent)
                if parent is not None and gone == self._children.get(held.parent):
                    heapq.heappush(orphaned, (parent.used, held.parent))
        finally:
            for entry in taken:
                self._push(*entry)

    def check(self) -> None:
        """Assert that the policy agrees with itself; slow, for tests."""
        children: dict[_Page, int] = {}
        for held in self._held.values():
            children[held.parent] = children.get(held.parent, 0) + 1
        assert children == self._children
        leaves = {(held.used, page) for page, held in self._held.items() if page not in children}
        assert leaves <= set(self._leaves)
        assert len(self._leaves) <= _heap_limit(len(self._held))

    def _touch(self, page: _Page) -> None:
        self._tick += 1
        self._held[page].used = self._tick
        if page not in self._children:
            self._push(self._tick, page)

    def _is_leaf(self, entry: tuple[int, _Page]) -> bool:
        used, page = entry
        held = self._held.get(page)
        return held is not None and held.used == used and page not in self._children

    def _push(self, used: int, page: _Page) -> None:
        heapq.heappush(self._leaves, (used, page))
        self._compact()

    def _compact(self) -> None:
        if len(self._leaves) > _heap_limit(len(self._held)):
            self._leaves = sorted({entry for entry in self._leaves if self._is_leaf(entry)})


def _heap_limit(pages: int) -> int:
    """Return the most heap entries for so many pages: stale ones stay a constant share."""
    return 2 * pages + 64
