"""The slots of one sequence of a program, and where each lies.

Covers numbers, cells and positions. Does not cover pages (`pie.worker.programs.slots`).

A slot's number is given once and never changes. Where a slot lies is its **cell**: its place in the
sequence's list of pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pie.wire.programs import Trouble
from pie.worker.programs.trouble import CallError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DEAD = -1
"""In a cell that nobody reads any more."""


class Cells:
    """What lies in which cell."""

    def __init__(self) -> None:
        self.cells: Ints = np.empty(0, np.int64)
        """The slot in each cell, -1 where it is dead."""
        self.positions: Ints = np.empty(0, np.int64)
        """The position of each cell's token."""
        self.next_slot = 0
        self.next_position = 0
        """One more than the largest so far: dropping slots takes none back."""

    @property
    def used(self) -> int:
        """Cells in use, dead ones included: the next one's number."""
        return len(self.cells)

    @property
    def live(self) -> Ints:
        """The live slots in order."""
        alive: Ints = self.cells[self.cells != DEAD]
        return alive

    @property
    def is_whole(self) -> bool:
        """Whether no cell is dead."""
        return not bool((self.cells == DEAD).any())

    @property
    def is_plain(self) -> bool:
        """Whether every cell's position is its number."""
        return bool((self.positions == np.arange(self.used)).all()) and self.is_whole

    def cells_of(self, slots: Ints) -> Ints:
        """Return the cells of slots, which must be alive.

        Raises:
            CallError: One was never written, or was dropped.
        """
        alive = np.flatnonzero(self.cells != DEAD)
        there = self.cells[alive]
        self.check_written(slots)
        at = np.searchsorted(there, slots)
        found = np.zeros(len(slots), np.bool_)
        inside = at < len(there)
        found[inside] = there[at[inside]] == slots[inside]
        if not found.all():
            slot = int(slots[~found][0])
            raise CallError(Trouble.DROPPED, f"slot {slot} was dropped", slot)
        result: Ints = alive[at]
        return result

    def append(self, positions: Ints) -> None:
        """Give the tokens at `positions` the next slots, in cells after the last."""
        count = len(positions)
        slots = np.arange(self.next_slot, self.next_slot + count)
        self.cells = np.concatenate([self.cells, slots])
        self.positions = np.concatenate([self.positions, positions])
        self.next_slot += count
        self.next_position = max(self.next_position, int(positions.max()) + 1)

    def check_written(self, slots: Ints) -> None:
        """Refuse slots that were never written.

        Raises:
            CallError: Names the first of them.
        """
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


def addresses(pages: Sequence[int], cells: Sequence[int] | Ints, size: int) -> list[int]:
    """Return where cells lie in an arena: page times page tokens and the place in it."""
    at = np.asarray(cells, np.int64)
    found: list[int] = (np.asarray(pages, np.int64)[at // size] * size + at % size).tolist()
    return found
