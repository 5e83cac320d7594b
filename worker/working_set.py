"""One sequence's view of the device pages: its tokens, their keys, and the pages that hold them.

Covers growing, matching, freezing, forking and letting go. Does not cover which sequence runs when
(`pie.worker.scheduler`) or which physical pages are taken (`pie.worker.page_table`).

Of a working set's pages the first `frozen` are shared and immutable. The rest are its own: full
ones that are not computed yet, and the writable buffer at the end. After a pass that was not pure the
pages that fill have no key: forks share them, and nobody finds them.

A recurrent model's working set has a state beside its pages (`pie.worker.working_state`), and goes
on only from a boundary that has a snapshot. Without attention layers it has no pages at all:
`frozen` then counts the full pages of computed tokens.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Protocol

from pie.page.key import PageKey, RootKey, page_keys
from pie.worker.batch import PageSlot, StateSlot
from pie.worker.page_table import FrozenPage, Held, PageTable
from pie.worker.state_table import StateTable
from pie.worker.working_state import WorkingState


class ForkMemory(Protocol):
    """What forks need of `pie.worker.arena.Arena`."""

    def copy(self, source_id: PageSlot, target_id: PageSlot) -> None:
        """Copy a whole page onto another."""

    def copy_state(self, source_slot: StateSlot, target_slot: StateSlot) -> None:
        """Copy the states in a slot onto another."""


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
        session_tag: str = "",
        states: StateTable | None = None,
    ) -> None:
        self.tokens = array("I", tokens)
        self.pages: list[PageSlot] = []
        self.computed = 0
        """Leading tokens whose state the pages hold and that need not run through the model."""
        self.frozen = 0
        """Leading pages that are frozen."""
        self.keys: list[PageKey] = []
        """Keys of the full pages of `tokens`, as far as they are pure."""
        self.state = WorkingState(states) if states is not None else None
        """A recurrent model's; None for any other."""
        self.own_from: int | None = None
        """Tokens from here on it computes itself, whatever is held of them: what the model gives for
        them is wanted. None where it is not."""
        self.new_snapshot: int | None = None
        """The page at whose end the last pass left a snapshot that nobody had before."""
        self._states = states
        self._is_opaque = False
        self._table = table
        self._root = root
        self._page_tokens = page_tokens
        self._tenant_tag = tenant_tag
        self._session_tag = session_tag
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
        """Keys of what others may wait for: the full pages that are not frozen yet.

        Of a recurrent model's, those at whose end a snapshot is due.
        """
        if self._states is None:
            return self.keys[self.frozen :]
        return [self.keys[pages - 1] for pages in self._due()]

    @property
    def loadable_keys(self) -> list[PageKey]:
        """Keys of the full pages that are not frozen yet, and of which a load would be of use."""
        return self.keys[
            self.frozen : self._takeable if self._states is None else self._last_boundary
        ]

    @property
    def until_snapshot(self) -> int | None:
        """Tokens up to the next boundary where a snapshot is due; None where there is none."""
        pages = next(self._due(), None)
        return None if pages is None else pages * self._page_tokens - self.computed

    def shared_pages(self, other: WorkingSet) -> int:
        """Return how many leading pages it can take over from `other`, once that has made them.

        Those are the full pages with the same tokens; of a recurrent model's, those up to a
        snapshot that `other` will leave behind.
        """
        both = range(min(len(self.keys), len(other.keys)))
        # A key names all tokens up to its page's end: from the first that differs on, all do.
        same = bisect.bisect_left(both, True, key=lambda at: self.keys[at] != other.keys[at])
        if self._states is None:
            return min(same, self._takeable)
        usable = min(same, self._last_boundary)
        return max((pages for pages in other._due() if pages <= usable), default=0)

    def leading_tokens(self, keys: Container[PageKey]) -> int:
        """Return how many of the next tokens lie in pages that `keys` names.

        None in the middle of a page: what is there of it cannot be exchanged for another's.
        """
        if self.computed != self.frozen * self._page_tokens:
            return 0
        if self._states is None:
            ahead_keys = self.keys[self.frozen : self._takeable]
            found = sum(1 for _ in itertools.takewhile(keys.__contains__, ahead_keys))
            return found * self._page_tokens
        ahead = range(self._last_boundary, self.frozen, -1)
        end = next((pages for pages in ahead if self.keys[pages - 1] in keys), self.frozen)
        return (end - self.frozen) * self._page_tokens

    def held(self) -> Held:
        """Return what there is of its leading pages that it could go on from, without any effect."""
        if self._states is None:
            return self._table.matching(self.keys[: self._takeable])
        pages = self._restorable(0)
        return Held(pages, self._table.matching(self.keys[:pages]).idle)

    @property
    def state_slots(self) -> list[StateSlot]:
        """The state slots that it uses; none where the model is not recurrent."""
        return [] if self.state is None else self.state.slots

    @property
    def wants_state_slot(self) -> bool:
        """Whether it has to take a state slot before it can run."""
        return self.state is not None and self.state.target is None

    def takes_idle_snapshot(self) -> bool:
        """Say whether it would begin with a snapshot that nobody uses now."""
        if self._states is None:
            return False
        pages = self._restorable(self.frozen)
        return pages > self.frozen and self._states.is_idle(self.keys[pages - 1])

    def append(self, token: int) -> None:
        """Add a token that was drawn."""
        self.tokens.append(token)
        if len(self.tokens) % self._page_tokens == 0:
            self._extend_keys()

    def pages_for(self, tokens: int) -> int:
        """Return how many pages to add so that the first `tokens` tokens have one."""
        if not self._table.total:
            return 0
        return max(0, -(-tokens // self._page_tokens) - len(self.pages))

    def match(self, now_s: float) -> int:
        """Take frozen pages for tokens that are not computed yet; return the tokens won.

        Pages of its own that it had for those tokens are released.
        """
        if self.computed != self.frozen * self._page_tokens:
            return 0  # in the middle of a page
        end = self._takeable if self._states is None else self._restorable(self.frozen)
        found = self._table.match(self.keys[self.frozen : end], now_s)
        if self.state is not None:
            if end == self.frozen:
                return 0
            self.state.restore(self.keys[end - 1], now_s)
        elif not found:
            return 0
        else:
            end = self.frozen + len(found)
        self._table.release(self.pages[self.frozen : end])
        self.pages[self.frozen : end] = found
        before = self.computed
        self._set_frozen(end)
        return self.computed - before

    def grow(self, tokens: int, now_s: float) -> bool:
        """Make room for the first `tokens` tokens; False, and no change, where there is none."""
        count = self.pages_for(tokens)
        after = self.pages[-1] if self.pages else None
        pages = self._table.allocate(count, now_s, after=after) if count else []
        if pages is None:
            return False
        if self.state is not None and not self.state.grow(now_s):
            self._table.release(pages)
            return False
        self.pages.extend(pages)
        return True

    def advance(self, tokens: int, now_s: float, *, is_pure: bool = True) -> list[int]:
        """Learn that the next `tokens` tokens have been computed; freeze the pages that filled.

        Returns the indices of pages that nobody held before.

        Args:
            tokens: How many.
            now_s: The time.
            is_pure: Whether what was written is a function of the tokens alone
                (`pie.worker.batch.Pass.is_pure`). Once it is not, this page and all later ones are
                opaque: forks share them, but they have no key.
        """
        assert tokens <= self.missing, "more tokens were computed than there are"
        if not is_pure:
            self._is_opaque = True
            at = self.computed // self._page_tokens
            self._table.note_opaque(self.keys[at:])
            del self.keys[at:]
        due = next(self._due(), 0)
        self.computed += tokens
        new = self._freeze(self.computed // self._page_tokens, now_s)
        if self.state is not None:
            is_due = self.computed == due * self._page_tokens
            is_new = self.state.advance(self.page(due - 1) if is_due else None, now_s)
            self.new_snapshot = due - 1 if is_new else None
        return new

    def begin_load(self, count: int, now_s: float) -> list[PageSlot] | None:
        """Reserve the next `count` pages for a load; None where there is no room."""
        is_paged = self._table.total > 0
        assert len(self.pages) == self.frozen * is_paged, "a load comes before any computing"
        if not self.grow((self.frozen + count) * self._page_tokens, now_s):
            return None
        pages = self.pages[self.frozen :]
        self._table.begin_load(pages)
        return pages

    def end_load(self, loaded: int, now_s: float, *, has_state: bool = False) -> int:
        """End a load whose first `loaded` pages came; return the tokens won.

        The other pages stay reserved, to be computed. A recurrent model wins nothing without the
        state after the last page; others may make use of the pages.
        """
        self._table.end_load(self.pages[self.frozen :])
        before, start = self.computed, self.frozen
        self._freeze(start + loaded, now_s)
        if self.state is not None and loaded:
            if has_state:
                self.state.advance(self.page(self.frozen - 1), now_s)
            else:
                self._table.release(self.pages[start : self.frozen])
                del self.pages[start : self.frozen]
                self.frozen = start
        self._set_frozen(self.frozen)
        return self.computed - before

    def restore(self, frozen: int, computed: int, now_s: float) -> bool:
        """Go on from where it was when it yielded, with room for copies of what was its own.

        Those are the page after the frozen ones, where `computed` lies beyond them, and a recurrent
        model's state, in the slot that it is to write.

        Args:
            frozen: Leading pages that were frozen.
            computed: Tokens that were computed.
            now_s: The time.

        Returns:
            Whether it does. Else a frozen page is not held, or there is no room, and it has what is
            frozen alone.
        """
        before = self.frozen
        assert before <= frozen <= computed // self._page_tokens
        assert computed < len(self.tokens)
        if self._table.total:
            keys = self.keys[before:frozen]
            if len(keys) < frozen - before or self._table.matching(keys).pages < len(keys):
                return False
            self._table.release(self.pages[before:])
            self.pages[before:] = self._table.match(keys, now_s)
        self.frozen = frozen
        if not self.grow(computed, now_s):
            self._table.release(self.pages[before:])
            del self.pages[before:]
            self.frozen = before
            return False
        self.computed = computed
        return True

    def is_twin_of(self, other: WorkingSet) -> bool:
        """Say whether both have the same tokens under the same root."""
        is_pure = not self._is_opaque and not other._is_opaque
        return is_pure and self._root == other._root and self.tokens == other.tokens

    def twin(self) -> WorkingSet:
        """Return a working set of the same tokens that holds no pages."""
        twin = WorkingSet(
            self._table,
            self._root,
            (),
            page_tokens=self._page_tokens,
            tenant_tag=self._tenant_tag,
            session_tag=self._session_tag,
            states=self._states,
        )
        twin.tokens, twin.keys = self.tokens[:], self.keys[:]
        twin._is_opaque = self._is_opaque
        return twin

    def fork(self, memory: ForkMemory, now_s: float) -> WorkingSet | None:
        """Return a working set that goes on from here by itself; None where there is no room.

        Both share the frozen pages and a snapshot, by count; only the page and the recurrent state
        that are being written, if any, are copied. Either may fork again, go on or end before the
        other.
        """
        twin = self.twin()
        own = self.computed - self.frozen * self._page_tokens
        assert own < self._page_tokens, "a page that is full has been frozen"
        copied = self._table.allocate(1, now_s) if own > 0 and self._table.total else []
        if copied is None:
            return None
        to_copy: tuple[StateSlot, StateSlot] | None = None
        if self.state is not None:
            forked = self.state.fork(now_s)
            if forked is None:
                self._table.release(copied)
                return None
            twin.state, to_copy = forked
        shared = self.pages[: self.frozen]
        for page in shared:
            self._table.acquire(page)
        twin.pages = [*shared, *copied]
        twin.frozen, twin.computed = self.frozen, self.computed
        try:
            if to_copy is not None:
                memory.copy_state(*to_copy)
            for page in copied:
                memory.copy(self.pages[self.frozen], page)
        except BaseException:
            twin.release()
            raise
        return twin

    def release(self) -> None:
        """Let go of all pages and the state; frozen ones stay in the table while there is room."""
        self._table.release(self.pages)
        if self.state is not None:
            self.state.release()
        self.pages = []
        self.frozen = self.computed = 0

    def page(self, index: int) -> FrozenPage:
        """Return what names the page at `index`."""
        parent = self.keys[index - 1] if index else self._root
        return FrozenPage(
            self.keys[index], bytes(parent), index, self._tenant_tag, self._session_tag
        )

    def _freeze(self, end: int, now_s: float) -> list[int]:
        new: list[int] = []
        for index in range(self.frozen, end if self._table.total else 0):
            if index >= len(self.keys):
                self._table.seal(self.pages[index])
                continue
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

    @property
    def _last_boundary(self) -> int:
        """Pages before the last token: a recurrent model can go on from no later snapshot."""
        return min((len(self.tokens) - 1) // self._page_tokens, self._takeable)

    @property
    def _takeable(self) -> int:
        """Leading pages that may be taken from others."""
        pages = len(self.keys)
        return pages if self.own_from is None else min(pages, self.own_from // self._page_tokens)

    def _due(self) -> Iterator[int]:
        """List the boundaries ahead, in pages, where a snapshot is due."""
        if self._states is None or self._is_opaque:
            return iter(())
        return self._states.due(self.computed, len(self.tokens), self._page_tokens)

    def _restorable(self, start: int) -> int:
        """Return the longest boundary after `start`, in pages, that has a snapshot and all pages.

        `start` itself where there is none; pages up to there are held.
        """
        assert self._states is not None
        end = self._last_boundary
        if self._table.total:
            end = start + self._table.matching(self.keys[start:end]).pages
        ahead = range(end, start, -1)
        return next((at for at in ahead if self._states.holds(self.keys[at - 1])), start)

    def _extend_keys(self) -> None:
        if self._is_opaque:
            return
        start = len(self.keys)
        parent = self.keys[-1] if self.keys else self._root
        tail: Sequence[int] = self.tokens[start * self._page_tokens :]
        self.keys.extend(page_keys(parent, tail, self._page_tokens))
