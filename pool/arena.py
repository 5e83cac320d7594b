"""One block of memory that payloads lie in, and what of it is really there.

Covers the mapping, the byte cap and giving memory back to the system. Does not cover what the
extents hold (`pie.pool.ram`) or how gaps are chosen (`pie.pool.extents`).

The mapping is reserved as a whole and becomes resident as it is first touched. What was touched
counts until it is given back, so the cap holds for physical memory, not for what is in use:
`resident_bytes` = touched units × their size + bookkeeping.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap

from pie.pool.errors import NoArenaError
from pie.pool.extents import ExtentAllocator, rounded

ENTRY_BYTES = 2048
"""Bookkeeping of one page in a node: header, tables, policy, manager. Measured 1.5 KB."""

_HUGE_BYTES = 2 << 20
_HUGE_FROM_BYTES = 64 << 20
"""From this budget on memory comes in huge pages: first touch at 1.7 GB/s instead of 0.3."""


class Arena:
    """Extents of one mapping under one cap. Not thread-safe; views may be used anywhere."""

    def __init__(self, budget_bytes: int) -> None:
        """Reserve address space; nothing is resident yet.

        Raises:
            NoArenaError: The system refuses to map so much.
        """
        self.budget_bytes = budget_bytes
        huge = budget_bytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
        self._unit = _HUGE_BYTES if huge else mmap.PAGESIZE
        units = budget_bytes // self._unit
        try:
            # One unit more than is used, so that the first one can start at a multiple of its size.
            self._map: mmap.mmap | None = mmap.mmap(-1, (units + 1) * self._unit)
        except (OSError, ValueError, OverflowError) as error:
            raise NoArenaError(f"no mapping of {budget_bytes} bytes: {error}") from error
        if huge:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        # Counting is exact only where our units are the system's.
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._base = -address % self._unit
        self._view = memoryview(self._map)[self._base :][: units * self._unit]
        self._extents = ExtentAllocator(units * self._unit)
        self._users = [0] * units
        """How many extents reach into each unit."""
        self._touched = bytearray(units)
        self._touched_units = 0
        self._idle: set[int] = set()
        """Units that are touched and that no extent reaches into."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents that are taken, rounding and bookkeeping included."""
        return self._extents.allocated_bytes + self._extents.extents * ENTRY_BYTES

    @property
    def resident_bytes(self) -> int:
        """Upper bound of the physical memory now taken; never over the budget."""
        return self._touched_units * self._unit + self._extents.extents * ENTRY_BYTES

    def allocate(self, size: int) -> int | None:
        """Take room for `size` bytes and return its offset, or None where there is none."""
        start = self._extents.allocate(size)
        if start is None:
            return None
        units = self._units(start, rounded(size))
        for unit in units:
            self._users[unit] += 1
            self._idle.discard(unit)
        new = sum(not self._touched[unit] for unit in units)
        excess = self.resident_bytes + new * self._unit - self.budget_bytes
        if excess > 0 and not self._give_back(excess):
            self.free(start)
            return None
        for unit in units:
            if not self._touched[unit]:
                self._touched[unit] = 1
                self._touched_units += 1
        return start

    def free(self, start: int) -> None:
        """Give an extent back. Its memory stays for the next one as long as the cap allows."""
        for unit in self._units(start, self._extents.size_of(start)):
            self._users[unit] -= 1
            if self._touched[unit] and not self._users[unit]:
                self._idle.add(unit)
        self._extents.free(start)

    def view(self, start: int, size: int) -> memoryview:
        """Return the `size` bytes at an offset, writable."""
        return self._view[start : start + size]

    @property
    def extents(self) -> int:
        """Number of extents that are taken."""
        return self._extents.extents

    def release(self) -> None:
        """Let go of the mapping; it goes as soon as nobody holds a view of it."""
        self._view = memoryview(b"")
        self._map = None
        self._extents = ExtentAllocator(0)
        self._users, self._touched, self._touched_units = [], bytearray(), 0
        self._idle.clear()

    def check(self) -> None:
        """Assert that the cap holds and that tables agree."""
        self._extents.check()
        assert self.used_bytes <= self.budget_bytes
        assert self.resident_bytes <= self.budget_bytes
        assert self._touched_units == sum(self._touched)
        for unit, (users, touched) in enumerate(zip(self._users, self._touched, strict=True)):
            assert touched or not users, "memory in use that is not counted"
            assert (unit in self._idle) == bool(touched and not users)

    def _units(self, start: int, size: int) -> range:
        return range(start // self._unit, (start + size - 1) // self._unit + 1)

    def _give_back(self, excess: int) -> bool:
        """Return touched, unused units to the system until `excess` bytes are."""
        need = -(-excess // self._unit)
        if self._map is None or len(self._idle) < need:
            return False
        # The highest first: the lowest are the next to be taken.
        for unit in heapq.nlargest(need, self._idle):
            offset = self._base + unit * self._unit
            self._map.madvise(mmap.MADV_DONTNEED, offset, self._unit)
            self._touched[unit] = 0
            self._idle.remove(unit)
        self._touched_units -= need
        return True
