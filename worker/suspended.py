"""What sequences that had to yield had computed of their last page.

Covers keeping the writable page of a pre-empted sequence in host memory, within a cap, and giving
it back. Does not cover its frozen pages, which leave and come back like all others
(`pie.worker.offload`), or who yields (`pie.worker.scheduler`). For the step thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.layout import PageLayout
from pie.worker.page_copies import PageMemory, PageNames
from pie.worker.sequence import Sequence

log = logging.getLogger("pie.worker.suspended")

_MOST_TAILS = 64
"""As many sequences as a worker runs by default."""
_LARGEST_SHARE = 16
"""At most this part of host memory's budget."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The computed part of a page that was not full."""

    frozen: int
    """Pages before it."""
    computed: int
    """Tokens of the sequence up to its end."""
    parts: tuple[tuple[Part, memoryview], ...]


class SuspendedPages:
    """Tails of suspended sequences, by the sequence's number.

    Args:
        memory: Where pages are copied from and to.
        names: Says which parts a page has.
        budget_bytes: What all tails may take together.
    """

    def __init__(self, memory: PageMemory, names: PageNames, budget_bytes: int) -> None:
        self._memory = memory
        self._layout = names.layout
        self._tails: dict[int, _Tail] = {}
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.suspended = 0
        """Sequences that yielded and kept all that they had computed."""
        self.resumed = 0
        """Of them, those that went on from there."""

    def suspend(self, sequence: Sequence) -> None:
        """Keep what a sequence has computed beyond its frozen pages, where there is room.

        Its pages must still be there.
        """
        if Part.STATE in self._layout.parts:
            # A recurrent layer's state is not a page's: such a sequence goes on from a snapshot.
            return
        working_set = sequence.working_set
        frozen, computed = working_set.frozen, working_set.computed
        older = self._tails.get(sequence.number)
        if older is not None and older.computed >= computed:
            return  # It yielded again before it was given back what it had.
        self.drop(sequence)
        parts: tuple[tuple[Part, memoryview], ...] = ()
        if computed > frozen * self._layout.page_tokens:
            if self.used_bytes + self._layout.page_bytes > self.budget_bytes:
                return
            slot = working_set.pages[frozen]
            try:
                parts = tuple((p, self._memory.export(slot, p)) for p in self._layout.parts)
            except Exception:
                log.exception("what a sequence had computed could not be kept")
                return
            self.used_bytes += self._layout.page_bytes
        self._tails[sequence.number] = _Tail(frozen, computed, parts)
        self.suspended += 1

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Give a sequence its tail back, once the pages before it are there."""
        tail = self._tails.get(sequence.number)
        if tail is None:
            return
        working_set = sequence.working_set
        start = tail.frozen * self._layout.page_tokens
        if working_set.frozen < tail.frozen:
            return
        if working_set.frozen == tail.frozen and working_set.computed <= start:
            if tail.parts:
                slot = working_set.restore(tail.computed, now_s)
                if slot is None:
                    return
                for part, payload in tail.parts:
                    self._memory.load(slot, part, payload)
            self.resumed += 1
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's tail, if there is one."""
        tail = self._tails.pop(sequence.number, None)
        if tail is not None and tail.parts:
            self.used_bytes -= self._layout.page_bytes

    def check(self) -> None:
        """Raise `AssertionError` where the count of bytes is wrong or over the cap."""
        tails = sum(bool(tail.parts) for tail in self._tails.values())
        assert self.used_bytes == tails * self._layout.page_bytes
        assert self.used_bytes <= self.budget_bytes or not tails


def suspended_budget(host_bytes: int, layout: PageLayout) -> int:
    """Return how much of host memory's budget is kept for tails; recurrent models have none."""
    if Part.STATE in layout.parts:
        return 0
    return min(host_bytes // _LARGEST_SHARE, _MOST_TAILS * layout.page_bytes)
