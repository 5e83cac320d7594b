"""A program's working set: which of its slots are alive, and where they lie.

Covers growing, matching a cached prefix, freezing, forking, dropping slots, freeing pages and gathering what is
left. Does not cover passes over it (`pie.worker.programs.run`) or the pages' contents, which
`SlotMemory` copies.

A new set's cells (`pie.worker.programs.cells`) are its slots; after `drop` a cell may be dead, a page without
a live cell is released and the cells after it move up, and `compact` moves slots to other cells. So
attention reads pages that are still there and no others, however long the sequence has been.

As long as all that was ever written were plain tokens at their own positions, full pages are frozen
under their keys (DESIGN's purity rule); from then on they are sealed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Protocol

import numpy as np

from pie.page.key import PageKey, RootKey
from pie.wire.programs import Trouble
from pie.worker.batch import PageSlot
from pie.worker.programs.cells import DEAD, Cells, Ints, addresses
from pie.worker.programs.ledger import PageLedger, StateLedger, out_of_pages, out_of_states
from pie.worker.programs.naming import Naming
from pie.worker.programs.parking import ParkedPages, ParkingLot
from pie.worker.programs.trouble import CallError, lost_state, recurrent
from pie.worker.stores import PageToStore
from pie.worker.working_set import ForkMemory
from pie.worker.working_state import WorkingState


class SlotMemory(ForkMemory, Protocol):
    """What working sets of programs need of `pie.worker.arena.Arena`."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the arena onto others, none of which is a source."""


class SlotSet(Cells):
    """One working set.

    Args:
        ledger: Where its pages come from.
        root: Names the model, and the tenant where there is a salt.
        page_tokens: Tokens in a page.
        tenant_tag: Of its frozen pages.
        session_tag: The same.
        states: Where a recurrent model's states come from.
    """

    def __init__(
        self,
        ledger: PageLedger,
        root: RootKey,
        *,
        page_tokens: int,
        tenant_tag: str = "",
        session_tag: str = "",
        states: StateLedger | None = None,
    ) -> None:
        super().__init__()
        self.pages: list[PageSlot] = []
        self.frozen = 0
        """Leading pages that are immutable; of a model without attention, those that are full."""
        self.cached_tokens = 0
        self.names = Naming(
            root, page_tokens=page_tokens, tenant_tag=tenant_tag, session_tag=session_tag
        )
        self.state = None if states is None else WorkingState(states)
        """A recurrent model's; None for any other."""
        self.new_pages: list[PageToStore] = []
        """Pages and snapshots that were frozen and that nobody held before."""
        self.page_tokens = page_tokens
        self._parked: ParkedPages | None = None
        """Where its pages are while it is parked; it has none then."""
        self._ledger = ledger
        self._states = states

    @property
    def is_pure(self) -> bool:
        """Whether all that was ever written were plain tokens at their own positions."""
        return self.names.is_pure

    def upcoming(self, tokens: Sequence[int]) -> list[PageKey]:
        """Return keys of the pages that `tokens` would fill; none where they would have none."""
        if not self.is_pure or self.used % self.page_tokens:
            return []
        return self.names.upcoming(tokens)

    def due(self, count: int) -> Iterator[int]:
        """List the boundaries within the next `count` tokens, in pages, where a snapshot is due."""
        if self._states is None or not self.is_pure:
            return iter(())
        return self._states.due(self.used, self.used + count, self.page_tokens)

    def match(self, tokens: Sequence[int], keys: Sequence[PageKey], now_s: float) -> int:
        """Take frozen pages for the first of `tokens`, whose keys are given; return how many.

        The last token is never among them: its logits are not in a page. A recurrent model goes on
        from a snapshot, or not at all.
        """
        if self.used % self.page_tokens or not self.is_pure:
            return 0
        self.trim()
        keys = keys[: (len(tokens) - 1) // self.page_tokens]
        if self._states is not None:
            keys = keys[: self._restorable(keys, self._states)]
        pages = self._ledger.match(keys, now_s)
        count = len(pages)
        if self._states is not None and self.state is not None and keys:
            is_short = self._ledger.is_paged and count < len(keys)
            state = None if is_short else self._states.restored(self.state, keys[-1], now_s)
            if state is None:
                self._ledger.release(pages)
                return 0
            self.state, count = state, len(keys)
        self.frozen += count
        self.pages.extend(pages)
        return self._gain(count, tokens, keys)

    def take_loaded(
        self,
        pages: Sequence[PageSlot],
        count: int,
        tokens: Sequence[int],
        keys: Sequence[PageKey],
        now_s: float,
        state: WorkingState | None = None,
    ) -> int:
        """Take what a load wrote for `count` pages of `tokens`; return how many tokens that is.

        `pages` are writable, and none for a model without attention; a recurrent model's `state` after
        them is in its target.
        """
        first = self.frozen
        self.pages.extend(pages)
        won = self._gain(count, tokens, keys)
        for index in range(first, len(self.pages)):
            # They are where they came from already: nothing to store.
            self.pages[index] = self._immutable(index, now_s, is_new=False)
        self.frozen = first + count
        if self.state is not None and state is not None and count:
            self.state.release()
            self.state = state
            state.advance(self.names.page(self.frozen - 1), now_s)
        return won

    def reserve(self, count: int, now_s: float) -> bool:
        """Make room for `count` more cells; False, and no change, where there is none."""
        missing = -(-(self.used + count) // self.page_tokens) - len(self.pages)
        pages: list[PageSlot] | None = []
        if missing > 0 and self._ledger.is_paged:
            after = self.pages[-1] if self.pages else None
            pages = self._ledger.allocate(missing, now_s, after=after)
        if pages is None:
            return False
        if self.state is not None and not self.state.grow(now_s):
            self._ledger.release(pages)
            return False
        self.pages.extend(pages)
        return True

    def no_room(self, count: int) -> CallError:
        """Return the error of a call for which there is no room for `count` more cells."""
        if self._states is not None and self.state is not None and self.state.target is None:
            return out_of_states(self._states)
        return out_of_pages(self._ledger, -(-count // self.page_tokens))

    def advance(
        self,
        tokens: Sequence[int],
        positions: Ints,
        now_s: float,
        *,
        is_pure: bool,
        ahead: int = 0,
    ) -> None:
        """Learn that tokens were written to the cells after the last; freeze pages that filled.

        Args:
            tokens: What was written; zeros for embeddings.
            positions: Of each.
            now_s: The time.
            is_pure: Whether they are plain tokens that attended to all before them.
            ahead: How many tokens are known to follow.
        """
        straight = np.arange(self.used, self.used + len(tokens))
        if not is_pure or not bool((positions == straight).all()) or not self.is_whole:
            self.names.spoil()
        due = next(self.due(len(tokens) + ahead), 0)
        self.append(positions)
        self.names.add(tokens)
        self.names.extend()
        self._freeze(self.used // self.page_tokens, now_s)
        if self.state is not None:
            is_due = due > 0 and self.used == due * self.page_tokens
            page = self.names.page(due - 1) if is_due else None
            is_new = self.state.advance(page, now_s)
            if is_new and page is not None and self.state.source is not None:
                group = self.names.group(due - 1)
                self.new_pages.append(PageToStore(self.state.source, page, group, is_state=True))

    def cell_to_write(self, slot: int) -> int:
        """Return the cell at which `slot` would be written next.

        Raises:
            CallError: It lies in a frozen page, or is beyond the next one; or there is a recurrent state,
                which holds it.
        """
        if self.state is not None and slot < self.next_slot:
            raise recurrent(
                f"slot {slot} cannot be written again; fork before what may be taken back"
            )
        if slot > self.next_slot:
            raise CallError(
                Trouble.NEVER_WRITTEN,
                f"slot {slot} cannot be written next: slot {self.next_slot} was never written",
                self.next_slot,
            )
        behind = np.flatnonzero(self.cells >= slot)
        start = int(behind[0]) if len(behind) else self.used
        if start < min(self.frozen * self.page_tokens, self.used):
            raise CallError(
                Trouble.FROZEN_PAGE,
                f"slot {slot} lies in a frozen page and cannot be written",
                slot,
            )
        return start

    def drop(self, slots: Ints) -> None:
        """Take slots out of every later pass, and release pages without a live one.

        Raises:
            CallError: One was never written, or one is named twice.
        """
        self.check_written(slots)
        if len(slots) > self.next_slot:
            raise CallError(Trouble.BAD_CALL, "a slot to drop is named twice")
        gone = np.isin(self.cells, slots)
        if not gone.any():
            return
        self.names.spoil()
        self.trim()
        self.cells = np.where(gone, DEAD, self.cells)
        size = self.page_tokens
        padded = np.full(len(self.pages) * size, DEAD, np.int64)
        padded[: self.used] = self.cells
        alive = (padded.reshape(-1, size) != DEAD).any(1)
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
        dead = np.flatnonzero(self.cells == DEAD)
        if not len(dead):
            return
        first = int(dead[0]) // size
        alive = np.flatnonzero(self.cells != DEAD)
        moved = alive[alive >= first * size]
        count = -(-len(moved) // size)
        after = self.pages[first - 1] if first else None
        pages = self._ledger.allocate(count, now_s, after=after)
        if pages is None:
            raise out_of_pages(self._ledger, count)
        try:
            if len(moved):
                memory.move(
                    addresses(self.pages, moved, size), addresses(pages, range(len(moved)), size)
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

    def lose_state(self) -> None:
        """Learn that a pass over it failed: a state that was written in place is none of its tokens' now."""
        state = self.state
        if state is not None and state.source is not None and state.source == state.target:
            state.release()

    def check_usable(self) -> None:
        """Refuse what goes on from a state that is lost.

        Raises:
            CallError: It is.
        """
        if self.state is not None and self.used and self.state.source is None:
            raise lost_state()

    def seal(self) -> None:
        """Freeze the writable buffer as it is; what is written next begins a page."""
        self.trim()
        if len(self.pages) <= self.frozen:
            return
        self.names.spoil()
        self._ledger.seal(self.pages[-1])
        self.pad()

    def pad(self) -> None:
        """Count the rest of the last page, which is immutable, as cells that are dead from the start."""
        self.frozen = len(self.pages)
        room = self.frozen * self.page_tokens - self.used
        self.cells = np.append(self.cells, np.full(room, DEAD, np.int64))
        self.positions = np.append(self.positions, np.zeros(room, np.int64))

    def park(self, lot: ParkingLot) -> None:
        """Let the pages wait in host memory; `bring_back` is to be called before anything else.

        Raises:
            CallError: There is no room for them there; nothing was changed.
        """
        self.trim()
        if self._parked is None and self.used:
            self.check_usable()
            self._parked = lot.take(self.pages, None if self.state is None else self.state.source)
            self._ledger.release(self.pages)
            self.pages = []
            if self.state is not None:
                self.state.release()

    def bring_back(self, lot: ParkingLot, now_s: float) -> None:
        """End being parked; nothing where it is not. Pages that others have under its keys are shared.

        Raises:
            CallError: There is no room for the pages; it stays parked.
        """
        parked = self._parked
        if parked is None:
            return
        if self.state is not None and not self.state.grow(now_s):
            raise self.no_room(0)
        count = len(parked.payloads)
        found = self._ledger.match(self.names.keys[: self.frozen], now_s)
        after = found[-1] if found else None
        made = self._ledger.allocate(count - len(found), now_s, after=after)
        if made is None:
            self._ledger.release(found)
            if self.state is not None:
                self.state.release()
            raise out_of_pages(self._ledger, count - len(found))
        for index, page in enumerate(made, len(found)):
            lot.bring_back(parked, index, page)
        self.pages = [*found, *made]
        for index in range(len(found), min(self.frozen, len(self.pages))):
            self.pages[index] = self._immutable(index, now_s)
        if self.state is not None and self.state.target is not None:
            lot.bring_back_state(parked, self.state.target)
            self.state.restored()
        lot.drop(parked)
        self._parked = None

    def take_new_pages(self) -> list[PageToStore]:
        """Return the pages and snapshots that were frozen since the last call, and that nobody held before."""
        new, self.new_pages = self.new_pages, []
        return new

    def leave(self, lot: ParkingLot) -> None:
        """Let go of all pages, parked ones too."""
        if self._parked is not None:
            lot.drop(self._parked)
            self._parked = None
        self.release()

    def fork(self, count: int, memory: ForkMemory, now_s: float) -> list[SlotSet]:
        """Return `count` sets that go on from here, each by itself, sharing all but the writable buffer.

        Raises:
            CallError: There is no room for copies of the buffer or the state; nothing was changed.
        """
        self.trim()
        self.check_usable()
        states = []
        if self._states is not None and self.state is not None:
            states = self._states.fork(self.state, count, now_s)
        own = self.pages[self.frozen :]
        copies = self._ledger.allocate(len(own) * count, now_s)
        if copies is None:
            for state, _ in states:
                state.release()
            raise out_of_pages(self._ledger, len(own) * count)
        shared = self.pages[: self.frozen]
        # All at once: a page at a time takes as many steps as there are pages, not pages and forks.
        self._ledger.share(shared, count)
        twins = []
        for at in range(count):
            twin = copy(self)
            pages = [*shared, *copies[at * len(own) : (at + 1) * len(own)]]
            twin.diverge(pages, states[at][0] if states else None)
            twins.append(twin)
        try:
            for _, (from_slot, to_slot) in states:
                if from_slot != to_slot:
                    memory.copy_state(from_slot, to_slot)
            for twin in twins:
                for source, target in zip(own, twin.pages[self.frozen :], strict=True):
                    memory.copy(source, target)
        except BaseException:
            for twin in twins:
                twin.release()
            raise
        return twins

    def diverge(self, pages: list[PageSlot], state: WorkingState | None) -> None:
        """Go on by itself, on `pages` and from `state`, as the copy of another set: for `fork`."""
        self.pages, self.state = pages, state
        self.cached_tokens, self.new_pages = 0, []
        # Cells are never written in place, so they are shared until one of the two goes on.
        self.names = self.names.twin()

    def release(self) -> None:
        """Let go of all pages and the state."""
        self._ledger.release(self.pages)
        if self.state is not None:
            self.state.release()
        self.pages, self.frozen = [], 0
        self.cells, self.positions = self.cells[:0], self.positions[:0]

    def check(self) -> None:
        """Raise `AssertionError` where it contradicts itself."""
        size = self.page_tokens
        assert len(self.cells) == len(self.positions)
        if self._parked is not None:
            assert not self.pages
            assert self.state is None or not self.state.slots
        elif self._ledger.is_paged:
            assert self.used <= len(self.pages) * size
            assert self.frozen in (self.used // size, len(self.pages))
        else:
            assert not self.pages
            assert self.frozen == self.used // size
        live = self.live
        assert bool((np.diff(live) > 0).all()), "slots are in order"
        assert not len(live) or live[-1] < self.next_slot
        if self.is_pure:
            assert self.is_plain
            assert len(self.names.tokens) == self.used == self.next_position

    def _gain(self, count: int, tokens: Sequence[int], keys: Sequence[PageKey]) -> int:
        """Go on behind `count` pages that hold the first of `tokens`; return how many tokens that is."""
        won = count * self.page_tokens
        if won:
            self.names.keys.extend(keys[:count])
            self.names.add(tokens[:won])
            self.append(np.arange(self.used, self.used + won))
            self.cached_tokens += won
        return won

    def _restorable(self, keys: Sequence[PageKey], states: StateLedger) -> int:
        """Return how many of `keys` lead up to the last snapshot that can be gone on from."""
        end = self._ledger.matching(keys) if self._ledger.is_paged else len(keys)
        return next((at for at in range(end, 0, -1) if states.may_use(keys[at - 1])), 0)

    def trim(self) -> None:
        """Release pages that were reserved and hold nothing."""
        needed = -(-self.used // self.page_tokens)
        if needed < len(self.pages):
            self._ledger.release(self.pages[needed:])
            del self.pages[needed:]

    def _freeze(self, end: int, now_s: float) -> None:
        for index in range(self.frozen, end if self._ledger.is_paged else 0):
            self.pages[index] = self._immutable(index, now_s)
        self.frozen = max(self.frozen, end)

    def _immutable(self, index: int, now_s: float, *, is_new: bool = True) -> PageSlot:
        """Make one of the pages immutable, under its key where it has one; return the page that has it."""
        page = self.pages[index]
        if not self.is_pure:
            self._ledger.seal(page)
            return page
        frozen = self.names.page(index)
        held = self._ledger.freeze(page, frozen, now_s)
        if held == page and is_new:
            self.new_pages.append(PageToStore(held, frozen, self.names.group(index)))
        return held
