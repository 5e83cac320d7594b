"""One sequence's recurrent state: the slot that it goes on from, and the one that it writes.

Covers taking slots, leaving snapshots behind, going on from one, and forking. Does not cover when a
snapshot is due or which slots there are (`pie.worker.state_table`).

No states are copied for a snapshot: the slot that the sequence has written is frozen as it is, and
the next pass reads it and writes another. So a slot is read or written by a pass, never both for
two sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pie.page.key import PageKey
from pie.worker.batch import StateSlot
from pie.worker.page_table import FrozenPage


class StateSlots(Protocol):
    """Where slots come from: `pie.worker.state_table.StateTable`, or a share of it."""

    def holds(self, key: PageKey) -> bool:
        """Say whether there is a snapshot under `key`."""
        ...

    def use(self, key: PageKey, now_s: float) -> StateSlot:
        """Return the slot of a snapshot that there is, with one more user."""
        ...

    def share(self, slot: StateSlot) -> None:
        """Add a user to a snapshot."""

    def allocate(self, now_s: float) -> StateSlot | None:
        """Take a slot to write; None where there is none."""

    def freeze(self, slot: StateSlot, page: FrozenPage, now_s: float) -> StateSlot:
        """Make a writable slot the snapshot at a page's end; return the slot that holds the key now."""
        ...

    def release(self, slots: Sequence[StateSlot]) -> None:
        """Take one user from each slot."""

    def skip(self) -> None:
        """Count a snapshot that was due, and for which there was no slot."""


class WorkingState:
    """The recurrent state of the computed tokens of one sequence."""

    def __init__(self, table: StateSlots) -> None:
        self.source: StateSlot | None = None
        """Holds the state after the computed tokens; None before any."""
        self.target: StateSlot | None = None
        """Its own, which the next pass writes; often the source itself. None before any pass."""
        self._table = table

    @property
    def slots(self) -> list[StateSlot]:
        """The slots that it uses."""
        return [slot for slot in dict.fromkeys((self.source, self.target)) if slot is not None]

    def grow(self, now_s: float) -> bool:
        """Have a slot to write; False, and no change, where there is none."""
        if self.target is None:
            self.target = self._table.allocate(now_s)
        return self.target is not None

    def restore(self, key: PageKey, now_s: float) -> None:
        """Go on from the snapshot under `key`, which there is."""
        source = self._table.use(key, now_s)
        self._leave_source()
        self.source = source

    def restored(self) -> None:
        """Learn that the target holds the state after the computed tokens."""
        self._leave_source()
        self.source = self.target

    def advance(self, due: FrozenPage | None, now_s: float) -> bool:
        """Learn that a pass has written the target; leave it behind as a snapshot where one is due.

        Returns whether there is a snapshot that nobody had before.
        """
        assert self.target is not None, "a pass has written nowhere"
        self._leave_source()
        self.source = self.target
        if due is None or self._table.holds(due.key):
            return False
        fresh = self._table.allocate(now_s)
        if fresh is None:
            self._table.skip()
            return False
        self.source = self._table.freeze(self.target, due, now_s)
        self.target = fresh
        return True

    def fork(self, now_s: float) -> tuple[WorkingState, tuple[StateSlot, StateSlot] | None] | None:
        """Return the same state for another sequence; None where there is no slot.

        Beside it, where there is something to copy before either goes on, from which slot to which
        (`Arena.copy_state`). A snapshot is shared.
        """
        other = WorkingState(self._table)
        if self.source is None:
            return other, None
        if self.source != self.target:
            self._table.share(self.source)
            other.source = self.source
            return other, None
        if not other.grow(now_s):
            return None
        assert other.target is not None
        other.source = other.target
        return other, (self.source, other.target)

    def release(self) -> None:
        """Let go of all slots; snapshots stay in the table as long as there is room."""
        self._table.release(self.slots)
        self.source = self.target = None

    def _leave_source(self) -> None:
        if self.source is not None and self.source != self.target:
            self._table.release([self.source])
        self.source = None
