"""Memory that payloads wait in between both phases of a store.

Covers lending and reusing buffers. Does not cover how many stores may be under way: that is the
number of threads that store.
"""

from __future__ import annotations

import threading
from collections import defaultdict

_IDLE_BYTES = 32 << 20
"""Kept for the next ones: memory that the system hands out anew comes at 0.3 GB/s on machines
where a page fault is dear."""


class Staging:
    """Buffers by size. Thread-safe."""

    def __init__(self, idle_bytes: int = _IDLE_BYTES) -> None:
        self._most_idle = idle_bytes
        self._idle: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def lend(self, size: int) -> memoryview:
        """Return `size` writable bytes."""
        with self._lock:
            if self._idle[size]:
                self._idle_bytes -= size
                return memoryview(self._idle[size].pop())
        return memoryview(bytearray(size))

    def give_back(self, room: memoryview) -> None:
        """Take a buffer back; nobody may write in it any more."""
        buffer = room.obj
        assert isinstance(buffer, bytearray)
        with self._lock:
            if self._idle_bytes + len(buffer) > self._most_idle:
                self._idle.clear()
                self._idle_bytes = 0
            if len(buffer) <= self._most_idle:
                self._idle[len(buffer)].append(buffer)
                self._idle_bytes += len(buffer)
