"""Which bytes of an arena are taken.

Covers a best-fit allocator with coalescing. Pure: it hands out offsets and touches no memory.
Does not cover the memory (`pie.pool.arena`).

Why best fit and not slabs: a node holds few distinct sizes (one for each model and part) in long
runs, so a freed extent is an exact fit for the next page of its kind and nothing is wasted. Slabs
strand whole slabs in the sizes of yesterday's model, and a buddy allocator rounds a page of
360 KiB up to 512. Neighbouring free extents merge at once; among equal fits the lowest offset
wins, so that the arena's end stays untouched as long as possible.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGN_BYTES = 64
"""A cache line; small payloads waste at most this much."""

PAGE_BYTES = 4096
"""Large payloads start and end on a memory page and so never share one."""


def rounded(size: int) -> int:
    """Return the bytes that a payload of `size` takes; less than an eighth more from 512 on."""
    unit = PAGE_BYTES if size >= 8 * PAGE_BYTES else ALIGN_BYTES
    return max(unit, -(-size // unit) * unit)


class ExtentAllocator:
    """Hands out extents of `[0, capacity)`. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated_bytes = 0
        self._sizes: dict[int, int] = {}
        self._free_sizes: dict[int, int] = {}
        """Size of the free extent that starts at an offset."""
        self._free_starts: dict[int, int] = {}
        """Start of the free extent that ends at an offset."""
        self._by_size: list[tuple[int, int]] = []
        """Free extents as `(size, start)`, in order. A few thousand at most in practice: an
        insertion into a list of 10,000 pairs takes 2 µs."""
        if capacity:
            self._add_free(0, capacity)

    def allocate(self, size: int) -> int | None:
        """Take `rounded(size)` bytes and return their offset, or None where no gap is as large."""
        need = rounded(size)
        at = bisect_left(self._by_size, (need, 0))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        self._drop_free(start, found)
        if found > need:
            self._add_free(start + need, found - need)
        self._sizes[start] = need
        self.allocated_bytes += need
        return start

    def free(self, start: int) -> None:
        """Give an extent back; it merges with free neighbours."""
        size = self._sizes.pop(start)
        self.allocated_bytes -= size
        before = self._free_starts.get(start)
        after = self._free_sizes.get(start + size)
        if after is not None:
            self._drop_free(start + size, after)
            size += after
        if before is not None:
            self._drop_free(before, start - before)
            start, size = before, size + start - before
        self._add_free(start, size)

    @property
    def extents(self) -> int:
        """Number of extents that are taken."""
        return len(self._sizes)

    def size_of(self, start: int) -> int:
        """Return the bytes that the extent at `start` takes."""
        return self._sizes[start]

    def check(self) -> None:
        """Assert that taken and free extents tile the arena and that no two gaps touch."""
        taken = [(start, size, True) for start, size in self._sizes.items()]
        free = [(start, size, False) for start, size in self._free_sizes.items()]
        at, last_taken = 0, True
        for start, size, is_taken in sorted(taken + free):
            assert start == at, f"a hole or an overlap at {at}"
            assert size > 0
            assert is_taken or last_taken, f"two gaps touch at {start}"
            at, last_taken = start + size, is_taken
        assert at == self.capacity
        assert self.allocated_bytes == sum(self._sizes.values())
        assert self._by_size == sorted((size, start) for start, size, _ in free)
        assert self._free_starts == {start + size: start for start, size, _ in free}

    def _add_free(self, start: int, size: int) -> None:
        self._free_sizes[start] = size
        self._free_starts[start + size] = start
        insort(self._by_size, (size, start))

    def _drop_free(self, start: int, size: int) -> None:
        del self._free_sizes[start]
        del self._free_starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
