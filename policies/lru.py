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
        self._version = 0

    def stored(self, page: PageView, now_s: float) -> None:  # noqa: ARG002
        """Learn that `page` is held from now on; one that is held already was just used."""
        self._version += 1
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
        self._version += 1
        if (key, part) in self._held:
            self._touch((key, part))

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held; others are ignored."""
        self._version += 1
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
        """Propose every held page, best victim first, as if each proposed one had left.

        The proposals end where an event comes in before they are read.
        """
        while self._leaves and not self._is_leaf(self._leaves[0]):
            heapq.heappop(self._leaves)
        version = self._version
        leaves = self._leaves
        # The smallest entries of a heap, without changing it: an entry comes after its ancestors.
        ahead = [(leaves[0], 0)] if leaves else []
        orphaned: list[tuple[int, _Page]] = []
        children_gone: dict[_Page, int] = {}
        before: tuple[int, _Page] | None = None
        while ahead or orphaned:
            if ahead and (not orphaned or ahead[0][0] < orphaned[0]):
                entry, at = heapq.heappop(ahead)
                for below in (2 * at + 1, 2 * at + 2):
                    if below < len(leaves):
                        heapq.heappush(ahead, (leaves[below], below))
                if entry == before or not self._is_leaf(entry):
                    continue
                before = entry
            else:
                entry = heapq.heappop(orphaned)
            page = entry[1]
            yield page
            if self._version != version:
                return
            parent = self._held[page].parent
            gone = children_gone[parent] = children_gone.get(parent, 0) + 1
            if parent in self._held and gone == self._children[parent]:
                heapq.heappush(orphaned, (self._held[parent].used, parent))

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
