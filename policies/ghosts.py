"""Ghosts: what is remembered of pages that have left.

Covers a table of fixed size that forgets by itself: a newer ghost takes the place of an older one
whose key falls on the same slot. Does not cover what a policy makes of a ghost.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

_SPREAD = 0x9E3779B97F4A7C15
_PART_SPREAD = 0xC2B2AE3D27D4EB4F
_64_BITS = (1 << 64) - 1


class Ghost(NamedTuple):
    """A page that has left."""

    tick: int
    """When, in the ticks of who remembers it."""
    note: int
    """A number from 0 to 255 that goes with it."""


class GhostTable:
    """Remembers up to `slots` pages, by 32 bits of their keys: 13 bytes each.

    About one look-up in 2^32 finds another page's ghost.
    """

    def __init__(self, slots: int) -> None:
        """Make room; `slots` is rounded up to a power of two."""
        size = 1 << max(6, (slots - 1).bit_length())
        self._mask = size - 1
        self.held = 0
        """Ghosts in the table."""
        self._prints = array("I", bytes(4 * size))
        self.ticks = array("q", [-1]) * size
        """When each slot's ghost left; -1 where there is none."""
        self.notes = array("B", bytes(size))

    def __len__(self) -> int:
        """How many slots there are."""
        return self._mask + 1

    def fitting(self, slots: int) -> GhostTable:
        """Return this table, or an empty one where a tier has grown to need so many slots.

        While a tier grows little leaves it, so there is little to forget.
        """
        return self if slots <= len(self) else GhostTable(slots)

    def add(self, key: bytes, part: int, tick: int, note: int = 0) -> None:
        """Remember a page that leaves."""
        mixed = _mix(key, part)
        at = mixed & self._mask
        self._prints[at] = mixed >> 32
        self.held += self.ticks[at] < 0
        self.ticks[at] = tick
        self.notes[at] = note

    def take(self, key: bytes, part: int) -> Ghost | None:
        """Forget a page that is back, and return what was known of it."""
        mixed = _mix(key, part)
        at = mixed & self._mask
        tick = self.ticks[at]
        if tick < 0 or self._prints[at] != mixed >> 32:
            return None
        self.ticks[at] = -1
        self.held -= 1
        return Ghost(tick, self.notes[at])


def _mix(key: bytes, part: int) -> int:
    """Return 64 bits of a key; not Python's `hash`, so that a run can be repeated."""
    mixed = (int.from_bytes(key[:8], "little") + part * _PART_SPREAD) * _SPREAD & _64_BITS
    return mixed ^ (mixed >> 29)
