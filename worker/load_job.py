"""One load: what it is to bring, and what came.

Covers its time, and writing pages into device memory from any thread until the load is ended. Does
not cover where pages come from (`pie.worker.offload`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.key import PageKey
from pie.pool.tier import PageId, StoredPage
from pie.worker.batch import StateSlot
from pie.worker.load_choice import Loaded, LoadTier
from pie.worker.loadable import Loadable
from pie.worker.page_copies import PageCopies, Piece

log = logging.getLogger("pie.worker.load_job")

_LATE = 0.9
"""A load that took this part of its time was given up; event loops round to milliseconds."""


@dataclass(frozen=True, slots=True)
class PageToLoad:
    """Parts of a page, where each goes, and the first key of its group of pages."""

    pieces: tuple[Piece, ...]
    key: PageKey
    group: PageKey

    def with_state(self, slot: StateSlot) -> PageToLoad:
        """Return it with the recurrent state after it, which goes to `slot`."""
        piece = Piece(PageId(self.key, Part.STATE), slot)
        return PageToLoad((*self.pieces, piece), self.key, self.group)


@dataclass(frozen=True, slots=True)
class RunToLoad:
    """Consecutive pages in one tier."""

    tier: LoadTier
    pages: tuple[PageToLoad, ...]


class LoadJob:
    """A load under way.

    Args:
        sequence: Who waits for it.
        runs: What to bring, in order.
        copies: Writes pages.
        state_slot: Where the recurrent state after the last page goes, in a model that has one.
        wanted_s: How long it may take to fetch pages.
        limit_s: How long it may take with writing them.
    """

    def __init__(
        self,
        sequence: Loadable,
        runs: Many[RunToLoad],
        copies: PageCopies,
        *,
        state_slot: StateSlot | None = None,
        wanted_s: float,
        limit_s: float,
    ) -> None:
        self.sequence = sequence
        self.runs = runs
        self.wanted_s = wanted_s
        self.loaded: list[Loaded] = []
        self.pages = 0
        """Leading pages that have been written."""
        self.has_state = False
        """Whether the recurrent state after the last of them has been written."""
        self.state_slot = state_slot
        self.overran = False
        self._copies = copies
        self._began_s = time.monotonic()
        self.until_s = self._began_s + wanted_s
        """Until when pages may be fetched; later where it had to wait for its turn."""
        self.write_until_s = self._began_s + max(wanted_s, limit_s)
        self._ended = False
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """How long it has been under way."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """How long pages may still be fetched."""
        return self.until_s - time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether its time is over, or as good as that."""
        return self.left_s <= (1 - _LATE) * self.wanted_s

    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return self.sequence.is_wanted

    def goes_on(self) -> bool:
        """Say whether more pages should be fetched."""
        return not self._ended and self.left_s > 0 and self.is_wanted()

    def waiting_in(self, tier: LoadTier) -> int:
        """Return how many pages it still wants from a tier."""
        left, before = 0, self.pages
        for run in self.runs:
            left += max(0, len(run.pages) - max(0, before)) if run.tier is tier else 0
            before -= len(run.pages)
        return left

    def begin(self, asked_s: float) -> None:
        """Begin a run that was queued at `asked_s`: its wait for others is no part of its time."""
        waited_s = time.monotonic() - asked_s
        with self._lock:
            self.until_s = min(self.until_s + waited_s, self.write_until_s)

    def write(self, page: PageToLoad, parts: Many[StoredPage]) -> bool:
        """Write the next page; False where the load is over, or the page cannot be written."""
        # With the lock, so that nothing writes a page any more once the load has ended.
        with self._lock:
            if self._ended or time.monotonic() > self.write_until_s:
                return False
            try:
                for piece, part in zip(page.pieces, parts, strict=True):
                    self._copies.write(piece.slot, (part,))
                    self.has_state |= piece.page.part is Part.STATE
            except Exception:
                log.exception("a page that was loaded could not be written")
                return False
            self.pages += 1
            return True

    def end(self) -> int:
        """Let nobody write any more; return how many leading pages came."""
        with self._lock:
            self._ended = True
            return self.pages
