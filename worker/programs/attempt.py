"""What one call does to a working set, until it is known whether it went well.

Covers keeping it, and going back to what was before: a call that fails has changed nothing. Does not cover
when a call ends (`pie.worker.programs.roster`).
"""

from __future__ import annotations

from pie.worker.batch import PageSlot
from pie.worker.programs.ledger import PageLedger, out_of_pages
from pie.worker.programs.slots import SlotMemory, SlotSet


class Attempt:
    """A working set as it was before a call, which only goes on behind its frozen pages.

    Args:
        one: The set. Nobody else changes it until `keep` or `take_back`.
        ledger: Where its pages come from.
        memory: Where they lie.
    """

    def __init__(self, one: SlotSet, ledger: PageLedger, memory: SlotMemory) -> None:
        one.trim()
        self._set = one
        self._ledger = ledger
        self._memory = memory
        # Neither array is ever written in place.
        self._cells, self._positions = one.cells, one.positions
        self._next = (one.next_slot, one.next_position)
        self._cached_tokens = one.cached_tokens
        self._frozen = one.frozen
        self._put_back_names = one.names.mark()
        self.kept: PageSlot | None = None
        """The writable buffer as it was, where slots of it are written again."""

    def write_again(self, slot: int, now_s: float) -> None:
        """Make `slot` the next one to write; it and what follows it are forgotten.

        Raises:
            CallError: It may not be written, or there is no room for a copy of the writable buffer.
        """
        one = self._set
        start = one.cell_to_write(slot)
        if start < one.used:
            fresh = self._ledger.allocate(1, now_s, after=one.pages[-1])
            if fresh is None:
                raise out_of_pages(self._ledger, 1)
            self.kept, one.pages[-1] = one.pages[-1], fresh[0]
            self._memory.copy(self.kept, fresh[0])
            one.next_position = int(one.positions[start])
            one.cells, one.positions = one.cells[:start], one.positions[:start]
            one.names.cut(start)
        one.next_slot = slot

    def keep(self) -> None:
        """Let what was done be."""
        if self.kept is not None:
            self._ledger.release([self.kept])
            self.kept = None

    def take_back(self, now_s: float) -> None:
        """Make the set what it was: slots, positions, tokens and keys.

        Where the writable buffer was filled meanwhile and there is no page for a copy of it, it is sealed, so
        that what comes next begins a page without a key. The state of a recurrent model is lost where it has
        gone on.
        """
        one, first = self._set, self._frozen
        if one.state is not None and one.used != len(self._cells):
            one.state.release()
        buffer = [] if self.kept is None else [self.kept]
        if self.kept is None and len(self._cells) > first * one.page_tokens:
            buffer = one.pages[first : first + 1]
        gone = one.pages[first if self.kept is not None else first + len(buffer) :]
        self._ledger.release(gone)
        is_filled = self.kept is None and bool(buffer) and one.frozen > first
        one.pages, one.frozen, self.kept = [*one.pages[:first], *buffer], first, None
        one.cells, one.positions = self._cells, self._positions
        one.next_slot, one.next_position = self._next
        one.cached_tokens = self._cached_tokens
        self._put_back_names()
        if is_filled and not self._copy_last(now_s):
            one.names.spoil()
            one.pad()

    def _copy_last(self, now_s: float) -> bool:
        """Put a writable copy in the place of the last page; False where there is no room for one."""
        last = self._set.pages[-1]
        fresh = self._ledger.allocate(1, now_s, after=last)
        if fresh is None:
            return False
        self._memory.copy(last, fresh[0])
        self._ledger.release([last])
        self._set.pages[-1] = fresh[0]
        return True
