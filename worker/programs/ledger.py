"""The pages and recurrent states that all programs of a worker hold together.

Covers taking, sharing and releasing pages of the page table and slots of the state table within caps of their
own, so that programs leave room for requests. Pure, like the table. Does not cover which slots lie in them
(`pie.worker.programs.slots`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pie.page.key import PageKey
from pie.wire.programs import Trouble
from pie.worker.batch import PageSlot, StateSlot
from pie.worker.page_table import FrozenPage, PageTable
from pie.worker.programs.trouble import CallError
from pie.worker.state_table import StateTable
from pie.worker.working_state import WorkingState


class PageLedger:
    """Pages in use by programs.

    Args:
        table: Where they are taken from.
        cap: Most of them at a time.
    """

    def __init__(self, table: PageTable, cap: int) -> None:
        self._table = table
        self.cap = cap
        self._users: Counter[PageSlot] = Counter()

    def __len__(self) -> int:
        return len(self._users)

    @property
    def is_paged(self) -> bool:
        """Whether the model has layers with attention, which need pages."""
        return self._table.total > 0

    @property
    def room(self) -> int:
        """Pages that can be taken now."""
        return min(self.cap - len(self._users), self._table.available)

    def allocate(
        self, count: int, now_s: float, *, after: PageSlot | None = None
    ) -> list[PageSlot] | None:
        """Take writable pages; None, and no change, where there are not so many."""
        if len(self._users) + count > self.cap:
            return None
        pages = self._table.allocate(count, now_s, after=after) if count else []
        if pages is not None:
            self._users.update(pages)
        return pages

    def matching(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages of `keys` are held by anybody, without any effect."""
        return self._table.matching(keys).pages

    def match(self, keys: Sequence[PageKey], now_s: float) -> list[PageSlot]:
        """Take the frozen pages of the longest leading run of `keys` that fits under the cap."""
        keys = keys[: max(0, self.cap - len(self._users))]
        pages = self._table.match(keys, now_s) if keys else []
        self._users.update(pages)
        return pages

    def share(self, pages: Sequence[PageSlot], count: int) -> None:
        """Add `count` users to pages that programs hold already, none of them writable."""
        for page in pages:
            self._table.acquire(page, count)
            self._users[page] += count

    def release(self, pages: Sequence[PageSlot]) -> None:
        """Take one user from each page."""
        self._table.release(pages)
        for page in pages:
            self._forget(page)

    def freeze(self, page: PageSlot, frozen: FrozenPage, now_s: float) -> PageSlot:
        """Name a full page; return the page that holds the key from now on."""
        held = self._table.freeze(page, frozen, now_s)
        if held != page:
            self._forget(page)
            self._users[held] += 1
        return held

    def begin_load(self, pages: Sequence[PageSlot]) -> None:
        """Mark writable pages as being written by a load: they cannot be released meanwhile."""
        self._table.begin_load(pages)

    def end_load(self, pages: Sequence[PageSlot]) -> None:
        """Make pages whose load has ended writable again."""
        self._table.end_load(pages)

    def seal(self, page: PageSlot) -> None:
        """Make a page immutable without a name."""
        self._table.seal(page)

    def users(self) -> list[PageSlot]:
        """List every page as often as it is used."""
        return list(self._users.elements())

    def _forget(self, page: PageSlot) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]


class StateLedger:
    """State slots in use by programs: a `pie.worker.working_state.StateSlots`.

    Args:
        table: Where they are taken from.
        cap: Most of them at a time.
    """

    def __init__(self, table: StateTable, cap: int) -> None:
        self._table = table
        self.cap = cap
        self._users: Counter[StateSlot] = Counter()

    def __len__(self) -> int:
        return len(self._users)

    def due(self, computed: int, length: int, page_tokens: int) -> Iterator[int]:
        """See `StateTable.due`."""
        return self._table.due(computed, length, page_tokens)

    def holds(self, key: PageKey) -> bool:
        """Say whether there is a snapshot under `key`."""
        return self._table.holds(key)

    def may_use(self, key: PageKey) -> bool:
        """Say whether there is a snapshot under `key`, and room for one more slot in use."""
        return len(self._users) < self.cap and self._table.holds(key)

    def use(self, key: PageKey, now_s: float) -> StateSlot:
        """Return the slot of a snapshot that there is, with one more user."""
        slot = self._table.use(key, now_s)
        self._users[slot] += 1
        return slot

    def restored(self, state: WorkingState, key: PageKey, now_s: float) -> WorkingState | None:
        """Return what takes the place of `state`: it goes on from a snapshot that there is.

        None, and no change, where there is no slot to write. Not `WorkingState.restore` alone: one that
        waits for a slot with a snapshot in its hands may wait for another that does the same.
        """
        if state.target is None:
            fresh = WorkingState(self)
            fresh.restore(key, now_s)
            if not fresh.grow(now_s):
                fresh.release()
                return None
            state.release()
            return fresh
        state.restore(key, now_s)
        return state

    def share(self, slot: StateSlot) -> None:
        """Add a user to a snapshot."""
        self._table.share(slot)
        self._users[slot] += 1

    def allocate(self, now_s: float) -> StateSlot | None:
        """Take a slot to write; None where there is none."""
        if len(self._users) >= self.cap:
            return None
        slot = self._table.allocate(now_s)
        if slot is not None:
            self._users[slot] += 1
        return slot

    def freeze(self, slot: StateSlot, page: FrozenPage, now_s: float) -> StateSlot:
        """Make a writable slot the snapshot at a page's end; return the slot that holds the key now."""
        held = self._table.freeze(slot, page, now_s)
        if held != slot:
            self._forget(slot)
            self._users[held] += 1
        return held

    def release(self, slots: Sequence[StateSlot]) -> None:
        """Take one user from each slot."""
        self._table.release(slots)
        for slot in slots:
            self._forget(slot)

    def skip(self) -> None:
        """Count a snapshot that was due, and for which there was no slot."""
        self._table.skip()

    def fork(
        self, state: WorkingState, count: int, now_s: float
    ) -> list[tuple[WorkingState, tuple[StateSlot, StateSlot]]]:
        """Return a state for each of `count` forks, and from which slot to which it is to be copied.

        The two are one where it is shared, or there is nothing yet.

        Raises:
            CallError: There is no room; nothing was changed.
        """
        made: list[tuple[WorkingState, tuple[StateSlot, StateSlot]]] = []
        for _ in range(count):
            forked = state.fork(now_s)
            if forked is None:
                for other, _ in made:
                    other.release()
                raise out_of_states(self)
            made.append((forked[0], forked[1] or (0, 0)))
        return made

    def users(self) -> list[StateSlot]:
        """List every slot as often as it is used."""
        return list(self._users.elements())

    def _forget(self, slot: StateSlot) -> None:
        self._users[slot] -= 1
        if not self._users[slot]:
            del self._users[slot]


def out_of_pages(ledger: PageLedger, wanted: int) -> CallError:
    """Return the error of a call that finds no room."""
    return CallError(
        Trouble.OUT_OF_PAGES,
        f"{wanted} pages are wanted and {max(0, ledger.room)} can be had: programs hold "
        f"{len(ledger)} of at most {ledger.cap} pages",
    )


def out_of_states(ledger: StateLedger) -> CallError:
    """Return the error of a call that finds no room for another recurrent state."""
    return CallError(
        Trouble.OUT_OF_PAGES,
        f"no recurrent state can be had: programs hold {len(ledger)} of at most {ledger.cap}, and each "
        "working set needs one or two",
    )
