"""How far a sender may be ahead of its receiver.

Covers counting what is under way in messages and bytes, and waiting for room in order. Does not
cover who says that something has been handled: `Credit` messages, or answers to requests.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Window:
    """Room for so many messages and bytes under way.

    One message may be larger than all the room, when nothing else is under way. Waiters get room
    in the order in which they came.
    """

    def __init__(self, messages: int, size_bytes: int) -> None:
        self._messages = messages
        self._bytes = size_bytes
        self._used_messages = 0
        self._used_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._end: Exception | None = None

    @property
    def used(self) -> tuple[int, int]:
        """Messages and bytes under way."""
        return self._used_messages, self._used_bytes

    @property
    def has_room(self) -> bool:
        """Whether a small message would not have to wait."""
        return self.has_room_for(1)

    def has_room_for(self, size_bytes: int) -> bool:
        """Whether a message of this size would not have to wait."""
        return self._end is None and not self._waiters and self._fits(size_bytes)

    async def take(self, size_bytes: int) -> None:
        """Take room for one message, and wait for it as long as it takes.

        Raises:
            Exception: What `end` was called with.
        """
        if self._end is not None:
            raise self._end
        if self.has_room_for(size_bytes):
            self._take(size_bytes)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (size_bytes, future)
        self._waiters.append(waiter)
        try:
            await future
        except asyncio.CancelledError:
            # Cancelled after room came and before this task ran again: the room goes on.
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._wake()
            elif not future.cancelled() and future.exception() is None:
                self.give(size_bytes)
            raise

    def give(self, size_bytes: int) -> None:
        """Give back the room that one message took."""
        self._used_messages -= 1
        self._used_bytes -= size_bytes
        self._wake()

    def end(self, error: Exception) -> None:
        """Let every waiter, now and later, raise `error`."""
        self._end = error
        while self._waiters:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_exception(error)

    def check(self) -> None:
        """Assert that the counts agree."""
        assert self._used_messages >= 0
        assert self._used_bytes >= 0
        assert self._used_messages <= self._messages
        assert self._used_messages <= 1 or self._used_bytes <= self._bytes
        if self._waiters and not self._waiters[0][1].done():
            assert not self._fits(self._waiters[0][0])

    def _fits(self, size_bytes: int) -> bool:
        if self._used_messages == 0:
            return True
        return self._used_messages < self._messages and self._used_bytes + size_bytes <= self._bytes

    def _take(self, size_bytes: int) -> None:
        self._used_messages += 1
        self._used_bytes += size_bytes

    def _wake(self) -> None:
        while self._waiters:
            size_bytes, future = self._waiters[0]
            if future.done():
                self._waiters.popleft()
            elif self._fits(size_bytes):
                self._waiters.popleft()
                self._take(size_bytes)
                future.set_result(None)
            else:
                return


class CreditWindow(Window):
    """A window whose room comes back in the order in which messages were sent, by count."""

    def __init__(self, messages: int, size_bytes: int) -> None:
        super().__init__(messages, size_bytes)
        self._sent: deque[int] = deque()

    def sent(self, size_bytes: int) -> None:
        """Note that a message which took room has been sent."""
        self._sent.append(size_bytes)

    def credit(self, messages: int) -> None:
        """Take in that the receiver has handled so many more messages.

        Credit for more than was sent counts for nothing.
        """
        for _ in range(min(messages, len(self._sent))):
            self.give(self._sent.popleft())
