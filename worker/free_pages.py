"""Which physical pages are free, and which of them to take.

Covers choosing neighbouring pages: attention gathers a run of them at twice the speed of scattered
ones. Does not cover what pages hold (`pie.worker.page_table`).
"""

from __future__ import annotations

from collections.abc import Iterable


class FreePages:
    """The free pages of an arena of `total` pages.

    New sequences start apart from each other, so that each finds its next page beside its last one.
    """

    def __init__(self, total: int, *, gap: int = 8) -> None:
        self._free = bytearray(b"\x01" * total)
        self._count = total
        self._gap = gap
        self._cursor = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        return bool(self._free[page])

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Take `count` pages, of which there must be so many.

        Args:
            count: How many.
            after: Go on beside this page where that is free.
        """
        assert count <= self._count, "more pages taken than are free"
        taken: list[int] = []
        if after is not None:
            page = after + 1
            while len(taken) < count and page < len(self._free) and self._free[page]:
                taken.append(page)
                self._free[page] = 0
                page += 1
        run = count - len(taken)
        while len(taken) < count:
            run = min(run, count - len(taken))
            start = self._find(run)
            if start < 0:
                run = (run + 1) // 2
                continue
            self._free[start : start + run] = bytes(run)
            taken.extend(range(start, start + run))
            self._cursor = start + run
        self._count -= count
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Make pages free again."""
        for page in pages:
            assert not self._free[page], f"page {page} freed twice"
            self._free[page] = 1
            self._count += 1

    def check(self) -> None:
        """Raise `AssertionError` where the count is wrong."""
        assert self._count == sum(self._free)

    def _find(self, run: int) -> int:
        """Return where `run` free pages start, with a gap before them if possible; -1 if nowhere."""
        roomy = b"\x01" * (run + 2 * self._gap)
        start = self._free.find(roomy, self._cursor)
        if start < 0:
            start = self._free.find(roomy)
        if start >= 0:
            return start + self._gap
        return self._free.find(b"\x01" * run)
