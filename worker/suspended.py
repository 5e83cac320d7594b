"""What sequences that had to yield had to themselves: their last page, and a recurrent model's state.

Covers keeping the writable page and the state of a pre-empted sequence in host memory, within a cap,
and giving them back. Does not cover its frozen pages, which leave and come back like all others
(`pie.worker.offload`), or who yields (`pie.worker.scheduler`). For the step thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.layout import PageLayout
from pie.worker.batch import StateSlot
from pie.worker.page_copies import PageMemory, PageNames
from pie.worker.sequence import Sequence
from pie.worker.working_set import WorkingSet

log = logging.getLogger("pie.worker.suspended")

_MOST_TAILS = 64
"""As many sequences as a worker runs by default."""
_LARGEST_SHARE = 16
"""At most this part of host memory's budget."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The computed part of a page that was not full, and the recurrent state at its end."""

    frozen: int
    """Pages before it."""
    computed: int
    """Tokens of the sequence up to its end."""
    parts: tuple[tuple[Part, memoryview], ...]

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(payload.nbytes for _, payload in self.parts)


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
        working_set = sequence.working_set
        older = self._tails.get(sequence.number)
        if older is not None and older.computed >= working_set.computed:
            return  # It yielded again before it was given back what it had.
        self.drop(sequence)
        state = working_set.state
        own = self._own(working_set, None if state is None else state.source)
        if self.used_bytes + sum(self._layout.part_bytes(part) for part in own) > self.budget_bytes:
            return
        try:
            parts = tuple((part, self._memory.export(slot, part)) for part, slot in own.items())
        except Exception:
            log.exception("what a sequence had computed could not be kept")
            return
        tail = _Tail(working_set.frozen, working_set.computed, parts)
        self._tails[sequence.number] = tail
        self.used_bytes += tail.bytes
        self.suspended += 1

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Give a sequence its tail back, once the pages before it are there."""
        tail = self._tails.get(sequence.number)
        if tail is None:
            return
        working_set = sequence.working_set
        is_behind = working_set.computed < tail.computed
        if is_behind:
            # A recurrent model finds no pages beyond its last snapshot by itself.
            if working_set.state is None and working_set.frozen < tail.frozen:
                return
            if not working_set.restore(tail.frozen, tail.computed, now_s):
                return
            state = working_set.state
            own = self._own(working_set, None if state is None else state.target)
            for part, payload in tail.parts:
                self._memory.load(own[part], part, payload)
            if state is not None:
                state.restored()
        if is_behind or not tail.parts:
            self.resumed += 1
        self.drop(sequence)

    def _own(self, working_set: WorkingSet, state: StateSlot | None) -> dict[Part, int]:
        """Return the parts that a sequence shares with nobody, and the slot of each."""
        own: dict[Part, int] = {}
        if (
            working_set.computed > working_set.frozen * self._layout.page_tokens
            and working_set.pages
        ):
            own = dict.fromkeys(self._layout.attention_parts, working_set.pages[working_set.frozen])
        if state is not None:
            own[Part.STATE] = state
        return own

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's tail, if there is one."""
        tail = self._tails.pop(sequence.number, None)
        if tail is not None:
            self.used_bytes -= tail.bytes

    def check(self) -> None:
        """Raise `AssertionError` where the count of bytes is wrong or over the cap."""
        assert self.used_bytes == sum(tail.bytes for tail in self._tails.values())
        assert self.used_bytes <= self.budget_bytes


def suspended_budget(host_bytes: int, layout: PageLayout) -> int:
    """Return how much of host memory's budget is kept for tails."""
    return min(host_bytes // _LARGEST_SHARE, _MOST_TAILS * (layout.page_bytes + layout.state_bytes))
