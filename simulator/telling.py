"""Which simulated workers have something to tell the router by now.

Covers finding them among a thousand without asking each. Does not cover what they tell
(`pie.simulator.engine.MockEngine.take_load`).
"""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol

_EARLY_S = 1e-6
"""The engine itself says when a step has ended: it is asked from a little before on."""


class Teller(Protocol):
    """What tells."""

    def tell_load(self) -> None:
        """Tell what is new."""

    def next_tells_s(self) -> float | None:
        """Return when something is new next, as things are; None where that will be said by `Telling.later`."""


class Telling:
    """Workers by when they have something to tell."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Teller]] = []
        self._latest: dict[Teller, int] = {}
        self._numbers = itertools.count()

    def later(self, teller: Teller) -> None:
        """Learn that somebody will have something to tell, whatever was said of it before."""
        due_s = teller.next_tells_s()
        number = self._latest[teller] = next(self._numbers)
        if due_s is not None:
            heapq.heappush(self._due, (due_s - _EARLY_S, number, teller))

    def tell(self, now_s: float) -> None:
        """Let everybody tell what is new."""
        told = []
        while self._due and self._due[0][0] <= now_s:
            _, number, teller = heapq.heappop(self._due)
            if self._latest[teller] == number:
                teller.tell_load()
                told.append(teller)
        for teller in told:
            self.later(teller)
