"""The threads of a node, in lanes: who waits for one tier keeps nobody waiting who needs another.

Covers which threads what may wait is done on. Does not cover what that is (`pie.pool.serving`).
"""

from __future__ import annotations

import time
from concurrent.futures import Executor

from pie.pool.side_threads import CLOSE_S, SideThreads

_WAITING_THREADS = 3
"""Of each lane whose work waits for a disk or a bucket."""


class Lanes:
    """Threads for what only copies and checks, for loads of each lower tier, and for stores that evict."""

    def __init__(self, check_threads: int, levels: int) -> None:
        """Be ready for a cache of so many `levels`; threads start with their work."""
        self._check = SideThreads("pie-pool-check", check_threads)
        self._store = SideThreads("pie-pool-store", _WAITING_THREADS)
        self._loads = [
            SideThreads(f"pie-pool-load-{level}", _WAITING_THREADS) for level in range(1, levels)
        ]

    @property
    def check(self) -> Executor:
        """For what waits for no tier but the first, and is too large for the event loop."""
        return self._check

    @property
    def store(self) -> Executor:
        """For what may have to let pages leave for lower tiers, or from them."""
        return self._store

    def load(self, level: int) -> Executor:
        """Return what loads from a tier are done on; 0 is the first."""
        return self._loads[level - 1] if level else self._check

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """End all within `limit_s`, and say whether they did; those that did not are left behind."""
        until_s = time.monotonic() + limit_s
        threads = (self._check, self._store, *self._loads)
        ended = [each.close(until_s - time.monotonic()) for each in threads]
        return all(ended)
