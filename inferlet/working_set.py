"""A program's view of one sequence's memory.

Covers which slots there are, dropping, gathering, sealing and forking. Does not cover running tokens
(`pie.inferlet.pipeline`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pie.inferlet.connection import Connection, Pending, u32
from pie.wire.programs import (
    CloseSet,
    CompactSet,
    DropSlots,
    ForkSet,
    FromHost,
    OpenSet,
    ParkSet,
    PassPart,
    SealSet,
    SetState,
)

Slots = Iterable[int] | NDArray[np.integer[Any]]
"""Numbers of slots."""


class WorkingSet:
    """The slots of one sequence. Make one with `Context.working_set` or `fork`.

    A token takes the next slot when it runs, and keeps that number and its position for good, whatever is
    dropped around it. What is asked of a set is carried out in the order in which it was asked.
    """

    def __init__(self, connection: Connection, number: int | None = None) -> None:
        self._connection = connection
        self.number = connection.next_set() if number is None else number
        self._live = np.empty(0, np.int64)
        self._length = 0
        self._pages = 0
        self._cached_tokens = 0
        if number is None:
            connection.tell(OpenSet(connection.next_call(), self.number))

    @property
    def length(self) -> int:
        """The next slot's number: all tokens that were run so far, dropped ones included."""
        return self._length

    @property
    def slots(self) -> NDArray[np.int64]:
        """The live slots in order, those of passes under way included."""
        return self._live.copy()

    @property
    def pages(self) -> int:
        """Pages that it held when a call on it was last answered; shared ones count in full."""
        return self._pages

    def cached_tokens(self) -> int:
        """Return how many tokens were not computed, because their pages were there already."""
        return self._cached_tokens

    def drop(self, slots: Slots) -> Pending[None]:
        """Take slots out of every later pass. A page whose slots are all dropped is free at once.

        From then on the set's new pages are its own: forks share them, other requests do not find them.

        Raises:
            NeverWrittenError: One of them was never written.
        """
        gone, undo = _numbers(slots), self.undo()
        self._live = self._live[~np.isin(self._live, gone)]
        call = self._connection.next_call()
        message = DropSlots(call, self.number)
        return self._connection.call(call, message, self._take, [u32(gone)], undo)

    def compact(self) -> Pending[None]:
        """Gather the live slots into as few pages as they need; slots and positions stay.

        Dropping frees pages whose slots are all gone; this frees the rest of what was dropped, at
        the price of one copy. Attention over gathered slots is as fast as over any others.

        Raises:
            OutOfPagesError: There is no room for the copy.
        """
        call = self._connection.next_call()
        return self._connection.call(call, CompactSet(call, self.number), self._take)

    def seal(self) -> Pending[None]:
        """Freeze the writable buffer as it is: forks share it too, and the next token begins a page."""
        call = self._connection.next_call()
        return self._connection.call(call, SealSet(call, self.number), self._take)

    def park(self) -> Pending[None]:
        """Let the pages wait in host memory while the program does something else.

        They come back by themselves with the next call on this set, which raises `OutOfPagesError` where
        there is no room for them then; they stay parked, so it can be made again.

        Raises:
            OutOfPagesError: There is no room for them in host memory.
        """
        call = self._connection.next_call()
        return self._connection.call(call, ParkSet(call, self.number), self._take)

    def fork(self, pipe: object = None) -> WorkingSet:  # noqa: ARG002
        """Return a set that goes on from here by itself.

        Both share all frozen pages; only the writable buffer, at most one page, is copied.

        Args:
            pipe: The pipeline that the fork is for; forks are carried out in order with its passes.
        """
        return self.forks(1)[0]

    def forks(self, count: int) -> list[WorkingSet]:
        """Return `count` forks, made in one call."""
        connection = self._connection
        made = []
        for _ in range(count):
            twin = copy.copy(self)
            twin.number = connection.next_set()
            made.append(twin)
        call = connection.next_call()
        message = ForkSet(call, self.number, tuple(one.number for one in made))
        connection.call(call, message, self._take)
        return made

    def close(self) -> None:
        """Let go of all its pages."""
        self._connection.tell(CloseSet(self._connection.next_call(), self.number))
        self._live, self._length, self._pages = self._live[:0], 0, 0

    def undo(self) -> Callable[[], None]:
        """Return what takes it back to where it is now: for calls that fail."""
        live, length = self._live, self._length

        def back() -> None:
            self._live, self._length = live, length

        return back

    def wrote(self, tokens: int, first: int | None = None) -> None:
        """Note that a pass writes slots: for `ForwardPass`."""
        if first is not None and first < self._length:
            self._live = self._live[self._live < first]
            self._length = first
        end = self._length + tokens
        self._live = np.concatenate([self._live, np.arange(self._length, end)])
        self._length = end

    def learned(self, part: PassPart) -> None:
        """Note what a pass told: for `ForwardPass`."""
        self._pages, self._cached_tokens = part.pages, part.cached_tokens

    def extended(self, length: int, pages: int, cached_tokens: int) -> None:
        """Note how far the engine went on by itself: for `Context.generate`."""
        self.wrote(length - self._length)
        self._pages, self._cached_tokens = pages, cached_tokens

    def _take(self, message: FromHost, frames: Sequence[bytes]) -> None:  # noqa: ARG002
        assert isinstance(message, SetState)
        self._pages, self._cached_tokens = message.pages, message.cached_tokens


def _numbers(slots: Slots) -> NDArray[np.int64]:
    array = slots if isinstance(slots, np.ndarray) else np.array(list(slots), np.int64)
    return array.astype(np.int64).reshape(-1)
