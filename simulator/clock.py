"""Time that passes only when nothing is left to do at its present moment.

Covers the contract of clocks that a mock engine runs on, and the virtual one. Does not cover a clock
that follows the real one (`pie.simulator.fast_clock`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> None:
        """Let it not happen; harmless once it has."""
        ...


class Clock(Protocol):
    """What tells the time, and calls back at one."""

    def now_s(self) -> float:
        """Return the time in seconds, from anywhere, going forward."""
        ...

    def at(self, time_s: float, call: Callable[[], None]) -> Timer:
        """Call back at a time, at once where that is past; never from within this call."""
        ...


class _Event:
    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Let it not happen."""
        self.call = None


class VirtualClock:
    """A clock that jumps from event to event. Events of one moment happen in the order they were set."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, _Event]] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        """Return the time of the event under way."""
        return self._now_s

    def at(self, time_s: float, call: Callable[[], None]) -> Timer:
        """Call back at a time."""
        event = _Event(call)
        heapq.heappush(self._events, (max(time_s, self._now_s), next(self._numbers), event))
        return event

    def run(self) -> None:
        """Let everything happen, until nothing is left."""
        while self._events:
            time_s, _, event = heapq.heappop(self._events)
            if event.call is not None:
                self._now_s = time_s
                event.call()
