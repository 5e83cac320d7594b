"""One sequence's view of the device pages: its tokens, their keys, and the pages that hold them.

Covers growing, matching, freezing, forking and letting go. Does not cover which sequence runs when
(`pie.worker.scheduler`) or which physical pages are taken (`pie.worker.page_table`).

Of a working set's pages the first `frozen` are shared and immutable. The rest are its own: full
ones that are not computed yet, and the writable buffer at the end.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Container, Iterable, Sequence

from pie.page.key import PageKey, RootKey, page_keys
from pie.worker.batch import PageSlot
from pie.worker.page_table import FrozenPage, PageTable

CopyPage = Callable[[PageSlot, PageSlot], None]
"""Copies the first physical page's contents onto the second."""


class WorkingSet:
    """The tokens of one sequence and the pages that hold their state."""

    def __init__(
        self,
        table: PageTable,
        root: RootKey,
        tokens: Iterable[int],
        *,
        page_tokens: int,
        tenant_tag: str = "",
    ) -> None:
        self.tokens = array("I", tokens)
        self.pages: list[PageSlot] = []
        self.computed = 0
        """Leading tokens whose state the pages hold and that need not run through the model."""
        self.frozen = 0
        """Leading pages that are frozen."""
        self.keys: list[PageKey] = []
        """Keys of the full pages of `tokens`."""
        self._table = table
        self._root = root
        self._page_tokens = page_tokens
        self._tenant_tag = tenant_tag
        self._extend_keys()

    @property
    def missing(self) -> int:
        """Tokens that must run through the model before the next token can be drawn.

        Never 0: the last token runs even where its state is held, because its logits are not.
        """
        return len(self.tokens) - self.computed

    @property
    def writes(self) -> bool:
        """Whether the next pass writes state; not where it only reads the last frozen page."""
        return self.computed >= self.frozen * self._page_tokens

    @property
    def next_keys(self) -> list[PageKey]:
        """Keys of the full pages that are not frozen yet."""
        return self.keys[self.frozen :]

    def shared_pages(self, other: WorkingSet) -> int:
        """Return how many leading full pages hold the same tokens as those of `other`."""
        both = range(min(len(self.keys), len(other.keys)))
        # A key names all tokens up to its page's end: from the first that differs on, all do.
        return bisect.bisect_left(both, True, key=lambda at: self.keys[at] != other.keys[at])

    def leading_tokens(self, keys: Container[PageKey]) -> int:
        """Return how many of the next tokens lie in pages that `keys` names.

        None in the middle of a page: what is there of it cannot be exchanged for another's.
        """
        if self.computed != self.frozen * self._page_tokens:
            return 0
        found = sum(1 for _ in itertools.takewhile(keys.__contains__, self.next_keys))
        return found * self._page_tokens

    def append(self, token: int) -> None:
        """Add a token that was drawn."""
        self.tokens.append(token)
        if len(self.tokens) % self._page_tokens == 0:
            self._extend_keys()

    def pages_for(self, tokens: int) -> int:
        """Return how many pages to add so that the first `tokens` tokens have one."""
        return max(0, -(-tokens // self._page_tokens) - len(self.pages))

    def match(self, now_s: float) -> int:
        """Take frozen pages for tokens that are not computed yet; return the tokens won.

        Pages of its own that it had for those tokens are released.
        """
        if self.computed != self.frozen * self._page_tokens:
            return 0  # in the middle of a page
        found = self._table.match(self.keys[self.frozen :], now_s)
        if not found:
            return 0
        start, end = self.frozen, self.frozen + len(found)
        self._table.release(self.pages[start:end])
        self.pages[start:end] = found
        before = self.computed
        self._set_frozen(end)
        return self.computed - before

    def grow(self, tokens: int, now_s: float) -> bool:
        """Make room for the first `tokens` tokens; False, and no change, where there is none."""
        count = self.pages_for(tokens)
        if not count:
            return True
        after = self.pages[-1] if self.pages else None
        pages = self._table.allocate(count, now_s, after=after)
        if pages is None:
            return False
        self.pages.extend(pages)
        return True

    def advance(self, tokens: int, now_s: float) -> list[int]:
        """Learn that the next `tokens` tokens have been computed; freeze the pages that filled.

        Returns the indices of pages that nobody held before.
        """
        assert tokens <= self.missing, "more tokens were computed than there are"
        self.computed += tokens
        return self._freeze(self.computed // self._page_tokens, now_s)

    def begin_load(self, count: int, now_s: float) -> list[PageSlot] | None:
        """Reserve the next `count` pages for a load; None where there is no room."""
        assert len(self.pages) == self.frozen, "a load comes before any computing"
        if not self.grow((self.frozen + count) * self._page_tokens, now_s):
            return None
        pages = self.pages[self.frozen :]
        self._table.begin_load(pages)
        return pages

    def end_load(self, loaded: int, now_s: float) -> int:
        """End a load whose first `loaded` pages came; return the tokens won.

        The other pages stay reserved, to be computed.
        """
        self._table.end_load(self.pages[self.frozen :])
        before = self.computed
        self._freeze(self.frozen + loaded, now_s)
        self._set_frozen(self.frozen)
        return self.computed - before

    def restore(self, computed: int, now_s: float) -> PageSlot | None:
        """Reserve the page after the frozen ones for a copy that holds the first `computed` tokens.

        Returns None, and changes nothing, where there is no room.
        """
        assert self.frozen * self._page_tokens < computed < len(self.tokens)
        if not self.grow(computed, now_s):
            return None
        self.computed = computed
        return self.pages[self.frozen]

    def is_twin_of(self, other: WorkingSet) -> bool:
        """Say whether both have the same tokens under the same root."""
        return self._root == other._root and self.tokens == other.tokens

    def twin(self) -> WorkingSet:
        """Return a working set of the same tokens that holds no pages."""
        twin = WorkingSet(
            self._table,
            self._root,
            (),
            page_tokens=self._page_tokens,
            tenant_tag=self._tenant_tag,
        )
        twin.tokens, twin.keys = self.tokens[:], self.keys[:]
        return twin

    def fork(self, copy_page: CopyPage, now_s: float) -> WorkingSet | None:
        """Return a working set that goes on from here by itself; None where there is no room.

        Both share the frozen pages, by count; only the page that is being written, if any, is
        copied. Either may fork again, go on or end before the other.

        Args:
            copy_page: Called with the page being written and the one that is to be like it.
            now_s: The time.
        """
        twin = self.twin()
        own = self.computed - self.frozen * self._page_tokens
        assert own < self._page_tokens, "a page that is full has been frozen"
        copied: Sequence[PageSlot] = ()
        if own > 0:
            taken = self._table.allocate(1, now_s)
            if taken is None:
                return None
            copied = taken
            copy_page(self.pages[self.frozen], copied[0])
        shared = self.pages[: self.frozen]
        for page in shared:
            self._table.acquire(page)
        twin.pages = [*shared, *copied]
        twin.frozen, twin.computed = self.frozen, self.computed
        return twin

    def release(self) -> None:
        """Let go of all pages; the frozen ones stay in the table as long as there is room."""
        self._table.release(self.pages)
        self.pages = []
        self.frozen = self.computed = 0

    def page(self, index: int) -> FrozenPage:
        """Return what names the page at `index`."""
        parent = self.keys[index - 1] if index else self._root
        return FrozenPage(self.keys[index], bytes(parent), index, self._tenant_tag)

    def _freeze(self, end: int, now_s: float) -> list[int]:
        new: list[int] = []
        for index in range(self.frozen, end):
            frozen = self.page(index)
            held = self._table.freeze(self.pages[index], frozen, now_s)
            if held == self.pages[index]:
                new.append(index)
            self.pages[index] = held
        self.frozen = max(self.frozen, end)
        return new

    def _set_frozen(self, frozen: int) -> None:
        self.frozen = frozen
        self.computed = min(frozen * self._page_tokens, len(self.tokens) - 1)

    def _extend_keys(self) -> None:
        start = len(self.keys)
        parent = self.keys[-1] if self.keys else self._root
        tail: Sequence[int] = self.tokens[start * self._page_tokens :]
        self.keys.extend(page_keys(parent, tail, self._page_tokens))
