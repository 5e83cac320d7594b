"""Python's garbage collector in a process that serves.

Covers keeping its pauses short. Does not cover memory of other kinds.

A full collection looks at every object that there is: with a model's libraries, a tokenizer and an index
that takes a quarter of a second, in which no stream gets a token. Nearly all of those objects stay for
good, so what a long collection has left is not looked at again.
"""

from __future__ import annotations

import gc
import threading
import time

_LONG_S = 0.02
"""A full collection that takes longer is worth to be the last one over these objects."""
_MOST_FREEZES = 16
"""What becomes garbage later and is a cycle stays for ever, so that this must not go on for ever."""
_YOUNG_OBJECTS = 10_000
"""How many more objects there are before the youngest are looked at: most of a request's have gone by then."""


class _Watch:
    """Freezes what long collections leave."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._left = _MOST_FREEZES

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != 2:
            return
        if phase == "start":
            self._began_s = time.perf_counter()
        elif self._left and time.perf_counter() - self._began_s > _LONG_S:
            self._left -= 1
            gc.freeze()


_lock = threading.Lock()
_watching = False


def keep_pauses_short() -> None:
    """Let no full collection of this process look at what an earlier long one has left.

    Collects once, now. Safe to call again, which does just that.
    """
    global _watching  # noqa: PLW0603 - there is one collector in a process
    with _lock:
        if not _watching:
            _watching = True
            gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
            gc.callbacks.append(_Watch())
    gc.collect()
