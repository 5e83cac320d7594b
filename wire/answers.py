"""The answers to one request.

Covers keeping them until they are taken. Does not cover how many may come: credit bounds them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from pie.wire.messages import Message

Answer = tuple[Message, Sequence[memoryview]]


class Answers:
    """Answers of one request in the order in which they came, then perhaps an error."""

    def __init__(self) -> None:
        self._items: deque[Answer] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, answer: Answer) -> None:
        """Add an answer."""
        self._items.append(answer)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let the taker raise `error` once the answers before it are taken."""
        self._error = error
        self._wake()

    def drop(self) -> list[Answer]:
        """Return, and forget, what nobody has taken."""
        left = list(self._items)
        self._items.clear()
        return left

    async def take(self) -> Answer:
        """Wait for the next answer.

        Raises:
            Exception: What `fail` was called with.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
