"""A limit on bytes under way.

Covers waiting for room in order of arrival. Does not cover what the bytes are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class ByteBudget:
    """So many bytes may be under way; more wait. For one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes under way now."""
        return self._used

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Count `size` bytes as under way, when there is room for them.

        One transfer larger than the limit goes alone.
        """
        size = min(size, self._limit)
        await self._take(size)
        try:
            yield
        finally:
            self._used -= size
            self._wake()

    async def _take(self, size: int) -> None:
        if not self._waiting and self._used + size <= self._limit:
            self._used += size
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._used -= size  # The turn came together with the cancellation.
            else:
                self._waiting.remove(entry)
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and self._used + self._waiting[0][0] <= self._limit:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._used += size
                turn.set_result(None)
