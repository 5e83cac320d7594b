"""What is put on a shelf behind the back of who puts it there.

Covers a bounded queue, told in batches, and kept while Redis is away. Does not cover the shelf
(`pie.index.shelf`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from pie.index.errors import PageIndexError
from pie.index.shelf import Shelf, entry_bytes
from pie.index.tasks import end

log = logging.getLogger("pie.index.shelf_behind")

BEHIND_S = 0.05
"""How long a value waits for others to be put with it."""
_AGAIN_S = 1.0
_MOST_AT_ONCE = 64
_MOST = 4096
_MOST_BYTES = 8 << 20
_CLOSE_S = 1.0


class Behind:
    """Puts values on a shelf soon. For one event loop.

    Args:
        shelf: Where they go.
        on_dropped: Told how many could not be kept: the first ones, where there are too many.
    """

    def __init__(self, shelf: Shelf, on_dropped: Callable[[int], object] = lambda _: None) -> None:
        self._shelf = shelf
        self._on_dropped = on_dropped
        self._queue: deque[tuple[str, bytes]] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, name: str, value: bytes) -> None:
        """Put a value on the shelf soon."""
        self._queue.append((name, value))
        self._bytes += entry_bytes(name, value)
        dropped = 0
        while len(self._queue) > _MOST or self._bytes > _MOST_BYTES:
            self._pop()
            dropped += 1
        if dropped:
            self._on_dropped(dropped)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Put what waits, if that can be done soon."""
        self._closed = True
        if self._task is not None:
            await end([self._task])
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self._queue:
                    await self._put_some()
        except (TimeoutError, PageIndexError):
            self._on_dropped(len(self._queue))

    async def _run(self) -> None:
        while self._queue and not self._closed:
            await asyncio.sleep(BEHIND_S)
            try:
                while self._queue and not self._closed:
                    await self._put_some()
            except PageIndexError as error:
                log.debug("%d values wait: %s", len(self._queue), error)
                await asyncio.sleep(_AGAIN_S)
            except Exception:
                log.exception("values were not put on their shelf")
                await asyncio.sleep(_AGAIN_S)
        self._task = None

    async def _put_some(self) -> None:
        some = [self._queue[at] for at in range(min(_MOST_AT_ONCE, len(self._queue)))]
        await self._shelf.put(some)
        for one in some:
            # Others may have been dropped meanwhile to make room.
            if self._queue and self._queue[0] is one:
                self._pop()

    def _pop(self) -> None:
        self._bytes -= entry_bytes(*self._queue.popleft())
