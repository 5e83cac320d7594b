"""A program's tokens whose pages come from below device memory, on the way of all loads.

Covers what a load is told of a working set, and what becomes of the pages that it wrote. Does not
cover whether to load and from where (`pie.worker.offload`), or when (`pie.worker.programs.lane`).

The pages that are being written belong to the load and not to the set, which stays as it is: so a
program may end, or its call fail, while the load goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pie.page.key import PageKey
from pie.wire.messages import LoadDecision
from pie.worker.batch import PageSlot
from pie.worker.programs.ledger import PageLedger, StateLedger
from pie.worker.programs.run import Run
from pie.worker.working_state import WorkingState

if TYPE_CHECKING:
    from pie.worker.programs.roster import Job


class ProgramLoad:
    """A `pie.worker.loadable.Loadable`, and what it loads into. For the step thread.

    Args:
        job: The call that it is for.
        run: Whose next pages it brings, at a page's beginning.
        ledger: Where pages come from.
        states: Where a recurrent model's states come from.
    """

    def __init__(
        self, job: Job, run: Run, ledger: PageLedger, states: StateLedger | None = None
    ) -> None:
        self.job = job
        self.run = run
        self.load_wish: LoadDecision | None = None
        self.load_decision: LoadDecision | None = None
        self.load_s = 0.0
        self.is_wanted = True
        self.missing = run.left
        held = run.set
        self.frozen = held.frozen
        self.loadable_keys = run.loadable_keys()
        self.keys: list[PageKey] = [*held.names.keys, *self.loadable_keys]
        self.pages: list[PageSlot] = held.pages[: self.frozen]
        self.state = None if states is None else WorkingState(states)
        """Its own until it has ended, as `reserved` is."""
        self.reserved: list[PageSlot] = []
        """Pages that the load writes: its own until it has ended."""
        self._ledger = ledger

    @property
    def working_set(self) -> ProgramLoad:
        """See `pie.worker.loadable.Loadable`."""
        return self

    def reserve(self, count: int, now_s: float) -> bool:
        """Have room for the next `count` pages; False, and no change, where there is none."""
        after = self.pages[-1] if self.pages else None
        wanted = count if self._ledger.is_paged else 0
        pages = self._ledger.allocate(wanted, now_s, after=after)
        if pages is None:
            return False
        if self.state is not None and not self.state.grow(now_s):
            self._ledger.release(pages)
            return False
        self._ledger.begin_load(pages)
        self.reserved = pages
        self.pages += pages
        return True

    def end(self, count: int, now_s: float, *, has_state: bool = False) -> None:
        """Let its run go on behind the first `count` pages, which came, and let go of what is of no use.

        A recurrent model goes on from the state after the last of them, or not at all.
        """
        is_of_use = self.is_wanted and self.run.is_in_place
        if not is_of_use or (self.state is not None and not has_state):
            count = 0
        came, left = self.reserved[:count], self.reserved[count:]
        self._ledger.end_load(self.reserved)
        self.reserved, state = [], self.state
        if count:
            self.state = None
            self.run.take_loaded(came, count, state, now_s)
        elif state is not None:
            state.release()
        self._ledger.release(left)
