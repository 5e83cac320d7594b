"""Pages of programs' working sets that wait in host memory while their program does something else.

Covers copying them out and back within a cap. Does not cover which set is parked when
(`pie.worker.programs.roster`) or what else a set is (`pie.worker.programs.slots`). For the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pie.page.events import Part
from pie.wire.programs import Trouble
from pie.worker.batch import PageSlot, StateSlot
from pie.worker.page_copies import PageMemory
from pie.worker.programs.trouble import CallError

_Payloads = tuple[tuple[Part, memoryview], ...]


@dataclass(frozen=True, slots=True)
class ParkedPages:
    """The pages of one set, in order."""

    payloads: tuple[_Payloads, ...]
    bytes: int
    state: memoryview | None = None
    """The recurrent state at the end."""


class ParkingLot:
    """Host memory for parked pages.

    Args:
        memory: Where pages are copied from and to.
        parts: What a page has.
        page_bytes: Bytes of a page.
        budget_bytes: Most bytes of all parked pages.
        state_bytes: Of a sequence's recurrent states.
    """

    def __init__(
        self,
        memory: PageMemory,
        parts: Sequence[Part],
        *,
        page_bytes: int,
        budget_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        self._memory = memory
        self._parts = tuple(parts)
        self._page_bytes = page_bytes
        self._state_bytes = state_bytes
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    def take(self, pages: Sequence[PageSlot], state: StateSlot | None = None) -> ParkedPages:
        """Copy pages out, and a recurrent state.

        Raises:
            CallError: There is no room for them; nothing was changed.
        """
        size = len(pages) * self._page_bytes + (0 if state is None else self._state_bytes)
        if self.used_bytes + size > self.budget_bytes:
            raise CallError(
                Trouble.OUT_OF_PAGES,
                f"{len(pages)} pages cannot be parked: {self.used_bytes} of "
                f"{self.budget_bytes} bytes are taken (model.program_host_budget)",
            )
        payloads = tuple(
            tuple((part, self._memory.export(page, part)) for part in self._parts) for page in pages
        )
        copied = None if state is None else self._memory.export(state, Part.STATE)
        self.used_bytes += size
        return ParkedPages(payloads, size, copied)

    def bring_back(self, parked: ParkedPages, index: int, page: PageSlot) -> None:
        """Copy one of a set's pages to a page that is writable."""
        for part, payload in parked.payloads[index]:
            self._memory.load(page, part, payload)

    def bring_back_state(self, parked: ParkedPages, slot: StateSlot) -> None:
        """Copy a set's recurrent state to a slot that is writable."""
        if parked.state is not None:
            self._memory.load(slot, Part.STATE, parked.state)

    def drop(self, parked: ParkedPages) -> None:
        """Forget a set's pages."""
        self.used_bytes -= parked.bytes
