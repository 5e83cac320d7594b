"""A program's view of one sequence's memory.

Covers which slots there are, dropping, gathering, sealing and forking. Does not cover running tokens
(`pie.inferlet.pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pie.inferlet.connection import Connection, Pending, u32, whole
from pie.inferlet.errors import BadCallError
from pie.inferlet.slot_steps import Change, Slots, SlotStep, SlotSteps
from pie.wire.frames import Buffer
from pie.wire.programs import (
    CloseSet,
    CompactSet,
    Drawn,
    DropSlots,
    ForkSet,
    FromHost,
    OpenSet,
    ParkSet,
    PassPart,
    SealSet,
    SetState,
)

SlotNumbers = Iterable[int] | NDArray[np.integer[Any]]


class WorkingSet:
    """The slots of one sequence. Make one with `Context.working_set` or `fork`.

    A token takes the next slot when it runs, and keeps that number and its position for good, whatever is
    dropped around it. What is asked of a set is carried out in the order in which it was asked.
    """

    def __init__(self, connection: Connection, number: int | None = None) -> None:
        self._connection = connection
        self.number = connection.next_set() if number is None else number
        self._slots = SlotSteps(Slots())
        self._pages = 0
        self._cached_tokens = 0
        self._is_closed = False
        if number is None:
            connection.tell(OpenSet(connection.next_call(), self.number))

    @property
    def length(self) -> int:
        """The next slot's number: all tokens that were run so far, dropped ones and passes under way included.

        Passes under way count as if they go well; a call that fails takes back what it would have done.
        """
        return self._slots.ahead.length

    @property
    def slots(self) -> NDArray[np.int64]:
        """The live slots in order, those of passes under way included."""
        return self._slots.ahead.live.copy()

    @property
    def pages(self) -> int:
        """Pages that it held when a call on it was last answered; shared ones count in full."""
        return self._pages

    def cached_tokens(self) -> int:
        """Return how many tokens were not computed, because their pages were there already."""
        return self._cached_tokens

    def drop(self, slots: SlotNumbers) -> Pending[None]:
        """Take slots out of every later pass. A page whose slots are all dropped is free at once.

        From then on the set's new pages are its own: forks share them, other requests do not find them.

        Raises:
            NeverWrittenError: One of them was never written.
        """
        gone = whole(slots, "slots")

        def change(before: Slots) -> Slots:
            return Slots(before.live[~np.isin(before.live, gone)], before.length)

        message = DropSlots(self._connection.next_call(), self.number)
        return self._call(message, change, [u32(gone)])

    def compact(self) -> Pending[None]:
        """Gather the live slots into as few pages as they need; slots and positions stay.

        Dropping frees pages whose slots are all gone; this frees the rest of what was dropped, at
        the price of one copy. Attention over gathered slots is as fast as over any others.

        Raises:
            OutOfPagesError: There is no room for the copy.
        """
        return self._call(CompactSet(self._connection.next_call(), self.number))

    def seal(self) -> Pending[None]:
        """Freeze the writable buffer as it is: forks share it too, and the next token begins a page."""
        return self._call(SealSet(self._connection.next_call(), self.number))

    def park(self) -> Pending[None]:
        """Let the pages wait in host memory while the program does something else.

        They come back by themselves with the next call on this set, which raises `OutOfPagesError` where
        there is no room for them then; they stay parked, so it can be made again.

        Raises:
            OutOfPagesError: There is no room for them in host memory.
        """
        return self._call(ParkSet(self._connection.next_call(), self.number))

    def fork(self, pipe: object = None) -> WorkingSet:  # noqa: ARG002
        """Return a set that goes on from here by itself.

        Both share all frozen pages; only the writable buffer, at most one page, is copied.

        Args:
            pipe: The pipeline that the fork is for; forks are carried out in order with its passes.
        """
        return self.forks(1)[0]

    def forks(self, count: int) -> list[WorkingSet]:
        """Return `count` forks, made in one call.

        Raises:
            BadCallError: It is closed.
        """
        if self._is_closed:
            raise BadCallError(f"working set {self.number} is closed")
        connection = self._connection
        made = []
        for _ in range(count):
            twin = WorkingSet(connection, connection.next_set())
            twin._pages, twin._cached_tokens = self._pages, self._cached_tokens
            made.append(twin)
        message = ForkSet(connection.next_call(), self.number, tuple(one.number for one in made))
        self._call(message, made=made)
        return made

    def close(self) -> None:
        """Let go of all its pages."""
        self._connection.tell(CloseSet(self._connection.next_call(), self.number))
        self._slots.close()
        self._is_closed = True
        self._pages = 0

    def write(self, tokens: int, first: int | None = None) -> SlotStep:
        """Note that a pass writes slots, from `first` on: for `Pipeline`."""

        def change(before: Slots) -> Slots:
            return before.written(first, (before.length if first is None else first) + tokens)

        return self._slots.begin(change)

    def ran(self, step: SlotStep, part: PassPart | None) -> None:
        """Note what a pass told, None where it failed: for `Pipeline`."""
        if part is None:
            self._slots.failed(step)
            return
        self._slots.done(step, lambda before: before.written(part.first_slot, part.length))
        self._pages, self._cached_tokens = part.pages, part.cached_tokens

    def generate(self) -> SlotStep:
        """Note that the engine goes on by itself, nobody knows how far: for `Context.generate`."""
        return self._slots.begin(lambda before: before)

    def generated(self, step: SlotStep, end: FromHost) -> None:
        """Note how far it went: for `Context.generate`."""
        if isinstance(end, Drawn):
            self._slots.done(step, lambda before: before.written(None, end.length))
            self._pages, self._cached_tokens = end.pages, end.cached_tokens
        else:
            self._slots.failed(step)

    def _call(
        self,
        message: DropSlots | CompactSet | SealSet | ParkSet | ForkSet,
        change: Change = lambda before: before,
        frames: Sequence[Buffer] = (),
        made: Sequence[WorkingSet] = (),
    ) -> Pending[None]:
        """Make a call that is answered by the set's state, which those that it makes begin with."""
        steps = [(self._slots, self._slots.begin(change))]
        ahead = self._slots.ahead
        steps += [(one._slots, one._slots.begin(lambda _: ahead)) for one in made]  # noqa: SLF001

        def learn(answer: FromHost, got: Sequence[bytes]) -> None:
            if not isinstance(answer, SetState):
                for slots, step in steps:
                    slots.failed(step)
                return
            live = np.frombuffer(got[0], "<u4").astype(np.int64)
            found = Slots(live, answer.length)
            for slots, step in steps:
                slots.done(step, lambda _: found)
            self._pages, self._cached_tokens = answer.pages, answer.cached_tokens

        return self._connection.call(message.call, message, _nothing, frames, learn)


def _nothing(_message: FromHost, _frames: Sequence[bytes]) -> None:
    """Take an answer that was learned from as it came."""
