"""A clock that follows the real one, so many times as fast.

Covers time for a mock engine in an event loop. Does not cover time that jumps (`pie.simulator.clock`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from pie.simulator.clock import Timer
from pie.simulator.errors import SetupError


class FastClock:
    """A `pie.simulator.clock.Clock` of the running event loop. It begins at 0.

    What is late in the event loop is late here, `speed` times as much: a clock that is too fast for its
    machine makes everything on it slow.

    Args:
        speed: Its seconds in one real second.
    """

    def __init__(self, speed: float) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise SetupError(f"speed must be a number above 0, not {speed}")
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    def now_s(self) -> float:
        """Return the time."""
        return (self._loop.time() - self._began_s) * self._speed

    def at(self, time_s: float, call: Callable[[], None]) -> Timer:
        """Call back at a time."""
        return self._loop.call_at(self._began_s + time_s / self._speed, call)
