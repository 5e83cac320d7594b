"""Which state slot holds which snapshot, and who uses it.

Covers the device's recurrent states: the slots that running sequences write, and the snapshots at
page boundaries, each under the key of the page that ends there. Pure. Does not cover what lies in
the slots (`pie.worker.arena`) or one sequence's own state (`pie.worker.working_state`).

A slot goes through the states of a page, so a page table keeps them: a sequence's own state is
writable, a snapshot is frozen, in use while a sequence goes on from it and idle otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.key import PageKey, RootKey
from pie.policies.manager import RetentionManager
from pie.policies.retention import NO_ROOT
from pie.worker.batch import StateSlot
from pie.worker.page_table import Change, FrozenPage, PageTable


@dataclass(frozen=True, slots=True)
class StateStatus:
    """How many slots are in each state, and what became of snapshots."""

    slots: int = 0
    free: int = 0
    running: int = 0
    idle: int = 0
    in_use: int = 0
    taken: int = 0
    skipped: int = 0


class StateTable:
    """The state slots of one arena.

    Not thread-safe: it belongs to the step thread. Time comes in as `now_s`.

    Args:
        total: Slots.
        state_bytes: Size of one.
        stride_pages: A snapshot is due at every so many pages of a sequence.
        retention: Chooses victims among idle snapshots.
        model_root: Of the model whose snapshots they are, for policies.
        page_tokens: Tokens in a page of that, for policies; 0 where it is not known.
    """

    def __init__(
        self,
        total: int,
        *,
        state_bytes: int,
        stride_pages: int,
        retention: RetentionManager,
        model_root: RootKey = NO_ROOT,
        page_tokens: int = 0,
    ) -> None:
        assert stride_pages > 0
        self.slots = PageTable(
            total,
            state_bytes,
            Part.STATE,
            retention,
            model_root=model_root,
            page_tokens=page_tokens,
        )
        """The slots, as a page table keeps pages."""
        self._stride_pages = stride_pages
        self.taken = 0
        """Snapshots made."""
        self.skipped = 0
        """Snapshots that were due, and for which there was no slot."""

    @property
    def total(self) -> int:
        """All slots."""
        return self.slots.total

    @property
    def available(self) -> int:
        """Slots that can be allocated: free ones, and idle snapshots that would be evicted."""
        return self.slots.available

    def status(self) -> StateStatus:
        """Return how many slots are in each state, and what became of snapshots."""
        counts = self.slots.counts()
        return StateStatus(
            slots=self.total,
            free=counts.free,
            running=counts.writable,
            idle=counts.idle,
            in_use=counts.in_use,
            taken=self.taken,
            skipped=self.skipped,
        )

    def due(self, computed: int, length: int, page_tokens: int) -> Iterator[int]:
        """List the boundaries ahead, in pages, where a sequence's snapshot is due, in order.

        They are at every stride, and the last one before the sequence's last token: there a
        prompt like it goes on, and computes no more than a page.

        Args:
            computed: Tokens behind.
            length: All of its tokens so far.
            page_tokens: Tokens in a page.
        """
        stride = self._stride_pages
        done, last = computed // page_tokens, (length - 1) // page_tokens
        strides = range((done // stride + 1) * stride, length // page_tokens + 1, stride)
        yield from (pages for pages in strides if pages < last)
        if last > done:
            yield last
        yield from (pages for pages in strides if pages > last)

    def holds(self, key: PageKey) -> bool:
        """Say whether there is a snapshot under `key`."""
        return self.slots.has(key)

    def is_idle(self, key: PageKey) -> bool:
        """Say whether there is a snapshot under `key` that nobody uses."""
        return self.slots.matching([key]).idle > 0

    def use(self, key: PageKey, now_s: float) -> StateSlot:
        """Return the slot of a snapshot that there is, with one more user."""
        (slot,) = self.slots.match([key], now_s)
        return slot

    def share(self, slot: StateSlot) -> None:
        """Add a user to a snapshot."""
        self.slots.acquire(slot)

    def allocate(self, now_s: float) -> StateSlot | None:
        """Take a slot to write, evicting an idle snapshot if need be; None where all are in use."""
        slots = self.slots.allocate(1, now_s)
        return slots[0] if slots else None

    def freeze(self, slot: StateSlot, page: FrozenPage, now_s: float) -> StateSlot:
        """Make a writable slot the snapshot at a page's end; return the slot that holds the key now."""
        self.taken += 1
        return self.slots.freeze(slot, page, now_s)

    def skip(self) -> None:
        """Count a snapshot that was due, and for which there was no slot."""
        self.skipped += 1

    def release(self, slots: Sequence[StateSlot]) -> None:
        """Take one user from each slot. A writable one becomes free, a snapshot stays."""
        self.slots.release(slots)

    def take_changes(self) -> list[Change]:
        """Return what was stored and removed since the last call, in order."""
        return self.slots.take_changes()

    def check(self, users: Iterable[Sequence[StateSlot]] | None = None) -> None:
        """Raise `AssertionError` where the table contradicts itself, or its `users` if given."""
        self.slots.check(users)
