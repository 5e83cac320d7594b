"""A program's working set: which of its slots are alive, and where they lie.

Covers growing, matching a cached prefix, freezing, forking, dropping slots, freeing pages and gathering what is
left. Does not cover passes over it (`pie.worker.programs.run`) or the pages' contents, which
`SlotMemory` copies.

A slot's number is given once and never changes. Where a slot lies is its **cell**: its place in the
set's list of pages. A new set's cells are its slots; after `drop` a cell may be dead, a page without
a live cell is released and the cells after it move up, and `compact` moves slots to other cells. So
attention reads pages that are still there and no others, however long the sequence has been.

As long as all that was ever written were plain tokens at their own positions, full pages are frozen
under their keys (DESIGN's purity rule); from then on they are sealed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pie.page.key import PageKey, RootKey, page_keys
from pie.pool.placement import GROUP_PAGES
from pie.wire.programs import Trouble
from pie.worker.batch import PageSlot
from pie.worker.page_table import FrozenPage
from pie.worker.programs.ledger import PageLedger
from pie.worker.programs.parking import ParkedPages, ParkingLot
from pie.worker.programs.trouble import CallError
from pie.worker.working_set import ForkMemory

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_DEAD = -1


class SlotMemory(ForkMemory, Protocol):
    """What working sets of programs need of `pie.worker.arena.Arena`."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the arena onto others, none of which is a source."""


class SlotSet:
    """One working set.

    Args:
        ledger: Where its pages come from.
        root: Names the model, and the tenant where there is a salt.
        page_tokens: Tokens in a page.
        tenant_tag: Of its frozen pages.
    """

    def __init__(
        self, ledger: PageLedger, root: RootKey, *, page_tokens: int, tenant_tag: str = ""
    ) -> None:
        self.pages: list[PageSlot] = []
        self.frozen = 0
        """Leading pages that are immutable."""
        self.cells: Ints = np.empty(0, np.int64)
        """The slot in each cell, -1 where it is dead."""
        self.positions: Ints = np.empty(0, np.int64)
        """The position of each cell's token."""
        self.next_slot = 0
        self.next_position = 0
        """One more than the largest so far: dropping slots takes none back."""
        self.cached_tokens = 0
        self.is_pure = True
        self.new_pages: list[tuple[PageSlot, FrozenPage, PageKey]] = []
        """Pages that were frozen and that nobody held before: where, what, its group's key."""
        self._tokens = array("I")
        self._keys: list[PageKey] = []
        self._parked: ParkedPages | None = None
        """Where its pages are while it is parked; it has none then."""
        self._ledger = ledger
        self._root = root
        self.page_tokens = page_tokens
        self._tenant_tag = tenant_tag

    @property
    def used(self) -> int:
        """Cells in use, dead ones included: the next one's number."""
        return len(self.cells)

    @property
    def live(self) -> Ints:
        """The live slots in order."""
        alive: Ints = self.cells[self.cells != _DEAD]
        return alive

    @property
    def is_whole(self) -> bool:
        """Whether no cell is dead."""
        return not bool((self.cells == _DEAD).any())

    @property
    def is_plain(self) -> bool:
        """Whether every cell's position is its number."""
        return bool((self.positions == np.arange(self.used)).all()) and self.is_whole

    def cells_of(self, slots: Ints) -> Ints:
        """Return the cells of slots, which must be alive.

        Raises:
            CallError: One was never written, or was dropped.
        """
        alive = np.flatnonzero(self.cells != _DEAD)
        there = self.cells[alive]
        self._check_written(slots)
        at = np.searchsorted(there, slots)
        found = np.zeros(len(slots), np.bool_)
        inside = at < len(there)
        found[inside] = there[at[inside]] == slots[inside]
        if not found.all():
            slot = int(slots[~found][0])
            raise CallError(Trouble.DROPPED, f"slot {slot} was dropped", slot)
        result: Ints = alive[at]
        return result

    @property
    def keys(self) -> Sequence[PageKey]:
        """Keys of its full pages; none once it is not pure any more."""
        return self._keys

    def upcoming(self, tokens: Sequence[int]) -> list[PageKey]:
        """Return keys of the pages that `tokens` would fill; none where they would have none."""
        if not self.is_pure or self.used % self.page_tokens:
            return []
        parent = self._keys[-1] if self._keys else self._root
        return page_keys(parent, tokens, self.page_tokens)

    def match(self, tokens: Sequence[int], keys: Sequence[PageKey], now_s: float) -> int:
        """Take frozen pages for the first of `tokens`, whose keys are given; return how many.

        The last token is never among them: its logits are not in a page.
        """
        if self.used % self.page_tokens or not self.is_pure:
            return 0
        self.trim()
        most = (len(tokens) - 1) // self.page_tokens
        pages = self._ledger.match(keys[:most], now_s)
        self.frozen += len(pages)
        return self._gain(pages, tokens, keys)

    def take_loaded(
        self,
        pages: Sequence[PageSlot],
        tokens: Sequence[int],
        keys: Sequence[PageKey],
        now_s: float,
    ) -> int:
        """Take writable pages that hold the first of `tokens`; return how many those are."""
        first = len(self.pages)
        count = self._gain(pages, tokens, keys)
        for index in range(first, len(self.pages)):
            # They are where they came from already: nothing to store.
            self.pages[index] = self._immutable(index, now_s, is_new=False)
        self.frozen = len(self.pages)
        return count

    def reserve(self, count: int, now_s: float) -> bool:
        """Make room for `count` more cells; False, and no change, where there is none."""
        missing = -(-(self.used + count) // self.page_tokens) - len(self.pages)
        if missing <= 0:
            return True
        after = self.pages[-1] if self.pages else None
        pages = self._ledger.allocate(missing, now_s, after=after)
        if pages is None:
            return False
        self.pages.extend(pages)
        return True

    def advance(
        self, tokens: Sequence[int], positions: Ints, now_s: float, *, is_pure: bool
    ) -> None:
        """Learn that tokens were written to the cells after the last; freeze pages that filled.

        Args:
            tokens: What was written; zeros for embeddings.
            positions: Of each.
            now_s: The time.
            is_pure: Whether they are plain tokens that attended to all before them.
        """
        straight = np.arange(self.used, self.used + len(tokens))
        if not is_pure or not bool((positions == straight).all()) or not self.is_whole:
            self._spoil()
        self._append(tokens, positions)
        if self.is_pure:
            done = len(self._keys) * self.page_tokens
            parent = self._keys[-1] if self._keys else self._root
            self._keys.extend(page_keys(parent, self._tokens[done:], self.page_tokens))
        self._freeze(self.used // self.page_tokens, now_s)

    def rewind(self, slot: int) -> Callable[[], None]:
        """Make `slot` the next one to write; it and what follows it are forgotten.

        Returns what undoes it, to be called before anything else is done.

        Raises:
            CallError: One of them lies in a frozen page, or `slot` is beyond the next one.
        """
        if slot > self.next_slot:
            raise CallError(
                Trouble.NEVER_WRITTEN,
                f"slot {slot} cannot be written next: slot {self.next_slot} was never written",
                self.next_slot,
            )
        behind = np.flatnonzero(self.cells >= slot)
        start = int(behind[0]) if len(behind) else self.used
        if start < self._frozen_cells:
            raise CallError(
                Trouble.FROZEN_PAGE,
                f"slot {slot} lies in a frozen page and cannot be written",
                slot,
            )
        before = (self.cells, self.positions, self.next_slot, self.next_position)
        tokens = self._tokens[start:]

        def undo() -> None:
            self.cells, self.positions, self.next_slot, self.next_position = before
            self._tokens.extend(tokens)

        if len(behind):
            self.next_position = int(self.positions[start])
        self.cells, self.positions = self.cells[:start], self.positions[:start]
        if self.is_pure:
            del self._tokens[start:]
        self.next_slot = slot
        return undo

    def drop(self, slots: Ints) -> None:
        """Take slots out of every later pass, and release pages without a live one.

        Raises:
            CallError: One was never written.
        """
        self._check_written(slots)
        gone = np.isin(self.cells, slots)
        if not gone.any():
            return
        self._spoil()
        self.trim()
        self.cells = np.where(gone, _DEAD, self.cells)
        size = self.page_tokens
        padded = np.full(len(self.pages) * size, _DEAD, np.int64)
        padded[: self.used] = self.cells
        alive = (padded.reshape(-1, size) != _DEAD).any(1)
        if alive.all():
            return
        stays = np.repeat(alive, size)[: self.used]
        self.cells, self.positions = self.cells[stays], self.positions[stays]
        self._ledger.release([page for page, on in zip(self.pages, alive, strict=True) if not on])
        self.frozen = int(alive[: self.frozen].sum())
        self.pages = [page for page, on in zip(self.pages, alive, strict=True) if on]

    def compact(self, memory: SlotMemory, now_s: float) -> None:
        """Move live slots together into as few pages as they need; positions stay.

        Raises:
            CallError: There is no room for the copies; nothing was changed.
        """
        self.trim()
        size = self.page_tokens
        dead = np.flatnonzero(self.cells == _DEAD)
        if not len(dead):
            return
        first = int(dead[0]) // size
        alive = np.flatnonzero(self.cells != _DEAD)
        moved = alive[alive >= first * size]
        count = -(-len(moved) // size)
        after = self.pages[first - 1] if first else None
        pages = self._ledger.allocate(count, now_s, after=after)
        if pages is None:
            raise out_of_pages(self._ledger, count)
        try:
            if len(moved):
                memory.move(
                    _addresses(self.pages, moved, size), _addresses(pages, range(len(moved)), size)
                )
        except BaseException:
            self._ledger.release(pages)
            raise
        self._ledger.release(self.pages[first:])
        self.pages = [*self.pages[:first], *pages]
        self.frozen = min(self.frozen, first)
        keep = np.concatenate([np.arange(first * size), moved])
        self.cells, self.positions = self.cells[keep], self.positions[keep]
        self._freeze(self.used // size, now_s)

    def seal(self) -> None:
        """Freeze the writable buffer as it is; what is written next begins a page."""
        self.trim()
        if len(self.pages) == self.frozen:
            return
        self._spoil()
        self._ledger.seal(self.pages[-1])
        self.frozen = len(self.pages)
        room = self.frozen * self.page_tokens - self.used
        # Cells that nobody writes any more are dead from the start.
        self.cells = np.append(self.cells, np.full(room, _DEAD, np.int64))
        self.positions = np.append(self.positions, np.zeros(room, np.int64))

    def park(self, lot: ParkingLot) -> None:
        """Let the pages wait in host memory; `bring_back` is to be called before anything else.

        Raises:
            CallError: There is no room for them there; nothing was changed.
        """
        self.trim()
        if self._parked is None and self.pages:
            self._parked = lot.take(self.pages)
            self._ledger.release(self.pages)
            self.pages = []

    def bring_back(self, lot: ParkingLot, now_s: float) -> None:
        """End being parked; nothing where it is not. Pages that others have under its keys are shared.

        Raises:
            CallError: There is no room for the pages; it stays parked.
        """
        parked = self._parked
        if parked is None:
            return
        count = len(parked.payloads)
        found = self._ledger.match(self._keys[: self.frozen], now_s) if self.is_pure else []
        after = found[-1] if found else None
        made = self._ledger.allocate(count - len(found), now_s, after=after)
        if made is None:
            self._ledger.release(found)
            raise out_of_pages(self._ledger, count - len(found))
        for index, page in enumerate(made, len(found)):
            lot.bring_back(parked, index, page)
        self.pages = [*found, *made]
        for index in range(len(found), self.frozen):
            self.pages[index] = self._immutable(index, now_s)
        lot.drop(parked)
        self._parked = None

    def leave(self, lot: ParkingLot) -> None:
        """Let go of all pages, parked ones too."""
        if self._parked is not None:
            lot.drop(self._parked)
            self._parked = None
        self.release()

    def fork(self, count: int, memory: ForkMemory, now_s: float) -> list[SlotSet]:
        """Return `count` sets that go on from here, each by itself, sharing all but the writable buffer.

        Raises:
            CallError: There is no room for copies of the buffer; nothing was changed.
        """
        self.trim()
        own = self.pages[self.frozen :]
        copies = self._ledger.allocate(len(own) * count, now_s)
        if copies is None:
            raise out_of_pages(self._ledger, len(own) * count)
        shared = self.pages[: self.frozen]
        # All at once: a page at a time takes as many steps as there are pages, not pages and forks.
        self._ledger.share(shared, count)
        twins = []
        for at in range(count):
            twin = copy(self)
            twin.diverge([*shared, *copies[at * len(own) : (at + 1) * len(own)]])
            twins.append(twin)
        try:
            for twin in twins:
                for source, target in zip(own, twin.pages[self.frozen :], strict=True):
                    memory.copy(source, target)
        except BaseException:
            for twin in twins:
                twin.release()
            raise
        return twins

    def diverge(self, pages: list[PageSlot]) -> None:
        """Go on by itself, on `pages`, as the copy of another set: for `fork`."""
        self.pages = pages
        self.cached_tokens, self.new_pages = 0, []
        # Cells are never written in place, so they are shared until one of the two goes on.
        self._tokens, self._keys = self._tokens[:], self._keys[:]

    def release(self) -> None:
        """Let go of all pages."""
        self._ledger.release(self.pages)
        self.pages, self.frozen = [], 0
        self.cells, self.positions = self.cells[:0], self.positions[:0]

    def check(self) -> None:
        """Raise `AssertionError` where it contradicts itself."""
        size = self.page_tokens
        assert len(self.cells) == len(self.positions)
        if self._parked is None:
            assert self.used <= len(self.pages) * size
            assert self.frozen in (self.used // size, len(self.pages))
        else:
            assert not self.pages
            assert self.used <= len(self._parked.payloads) * size
        live = self.live
        assert bool((np.diff(live) > 0).all()), "slots are in order"
        assert not len(live) or live[-1] < self.next_slot
        if self.is_pure:
            assert self.is_plain
            assert len(self._tokens) == self.used == self.next_position

    @property
    def _frozen_cells(self) -> int:
        return min(self.frozen * self.page_tokens, self.used)

    def _append(self, tokens: Sequence[int], positions: Ints) -> None:
        count = len(tokens)
        slots = np.arange(self.next_slot, self.next_slot + count)
        self.cells = np.concatenate([self.cells, slots])
        self.positions = np.concatenate([self.positions, positions])
        self.next_slot += count
        self.next_position = max(self.next_position, int(positions.max()) + 1)
        if self.is_pure:
            self._tokens.extend(tokens)

    def _gain(
        self, pages: Sequence[PageSlot], tokens: Sequence[int], keys: Sequence[PageKey]
    ) -> int:
        """Go on behind pages that hold the first of `tokens`; return how many tokens that is."""
        count = len(pages) * self.page_tokens
        if pages:
            self.pages.extend(pages)
            self._keys.extend(keys[: len(pages)])
            self._append(tokens[:count], np.arange(self.used, self.used + count))
            self.cached_tokens += count
        return count

    def trim(self) -> None:
        """Release pages that were reserved and hold nothing."""
        needed = -(-self.used // self.page_tokens)
        if needed < len(self.pages):
            self._ledger.release(self.pages[needed:])
            del self.pages[needed:]

    def _spoil(self) -> None:
        """Give no page a key from now on."""
        self.is_pure = False
        self._tokens, self._keys = array("I"), []

    def _freeze(self, end: int, now_s: float) -> None:
        for index in range(self.frozen, end):
            self.pages[index] = self._immutable(index, now_s)
        self.frozen = max(self.frozen, end)

    def _immutable(self, index: int, now_s: float, *, is_new: bool = True) -> PageSlot:
        """Make one of the pages immutable, under its key where it has one; return the page that has it."""
        page = self.pages[index]
        if not self.is_pure:
            self._ledger.seal(page)
            return page
        parent = self._keys[index - 1] if index else self._root
        frozen = FrozenPage(self._keys[index], bytes(parent), index, self._tenant_tag)
        held = self._ledger.freeze(page, frozen, now_s)
        if held == page and is_new:
            group = self._keys[index - index % GROUP_PAGES]
            self.new_pages.append((held, frozen, group))
        return held

    def _check_written(self, slots: Ints) -> None:
        beyond = slots[(slots >= self.next_slot) | (slots < 0)]
        if len(beyond):
            slot = int(beyond[0])
            raise CallError(
                Trouble.NEVER_WRITTEN,
                f"slot {slot} was never written: this working set has slots 0 to "
                f"{self.next_slot - 1}"
                if self.next_slot
                else f"slot {slot} was never written: this working set has no slots yet",
                slot,
            )


def out_of_pages(ledger: PageLedger, wanted: int) -> CallError:
    """Return the error of a call that finds no room."""
    return CallError(
        Trouble.OUT_OF_PAGES,
        f"{wanted} pages are wanted and {max(0, ledger.room)} can be had: programs hold "
        f"{len(ledger)} of at most {ledger.cap} pages",
    )


def _addresses(pages: Sequence[PageSlot], cells: Sequence[int] | Ints, size: int) -> list[int]:
    at = np.asarray(cells, np.int64)
    found: list[int] = (np.asarray(pages, np.int64)[at // size] * size + at % size).tolist()
    return found
