"""What the object tier does from time to time, on one thread.

Covers when small pages, removals and lists are sent, when the bucket is looked at again and when a
store that was off is asked whether it answers. Does not cover how (`pie.pool.object`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("pie.pool.object")

TICK_S = 0.25


class Kept(Protocol):
    """What is looked after."""

    def tick(self) -> None:
        """Do what is due within moments."""
        ...

    def look(self) -> None:
        """Look at what is in the bucket."""
        ...


class ObjectKeeper:
    """A thread that looks after a tier, from `start` to `close`."""

    def __init__(self, kept: Kept, look_s: float, clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            kept: The tier.
            look_s: Seconds between two looks at the bucket.
            clock: Seconds, going forward only.
        """
        self._kept = kept
        self._look_s = look_s
        self._clock = clock
        self._look_at_s = clock() + look_s
        self._should_look = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pie-object-keeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def look_soon(self) -> None:
        """Look at the bucket at the next tick."""
        self._should_look = True

    def close(self, limit_s: float) -> None:
        """End after what is being done, or leave that behind after `limit_s`."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(limit_s)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self._kept.tick()
                if self._should_look or self._clock() >= self._look_at_s:
                    self._should_look = False
                    self._look_at_s = self._clock() + self._look_s
                    self._kept.look()
            except Exception:
                # The next tick tries again.
                log.exception("the object tier could not be looked after")
