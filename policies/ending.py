"""Ending a policy that does not come back, so that it does not keep a core busy until the process ends.

Covers raising an error inside the thread that runs it, which ends loops of Python. Does not cover when that is due
(`pie.policies.aside`, `pie.router.aside`). What no error reaches goes on: code that catches whatever comes, a call
into C that does not return, a wait without a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

ENDS_S = 5.0
"""What a policy may take before it is ended; its deadline is far shorter."""
_AGAIN_S = 1.0
"""The time between two attempts, in which the thread has left what it ran if it ever does."""

_T = TypeVar("_T")


class PolicyEndedError(BaseException):
    """Raised inside a policy that has not come back; no `Exception`, so that few policies catch it."""


class Endable:
    """Runs a policy's code in one thread, one call at a time, so that another thread can end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._sent = False
        """Whether an error was raised in what runs."""
        self._tried_s = float("-inf")
        self.was_ended = False
        """Whether any call was told to end, for one that was is in no known state."""

    def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work` does.

        Raises:
            PolicyEndedError: It was ended.
            BaseException: What it raised.
        """
        try:
            with self._lock:
                self._thread = threading.get_ident()
            return work()
        finally:
            while True:
                # An error may arrive here too, where calls and jumps are, and is then taken.
                try:
                    self._take_back()
                    break
                except PolicyEndedError:
                    continue

    def _take_back(self) -> None:
        """Let no error be left over for what this thread does next; may be done again."""
        with self._lock:
            sent, self._sent = self._sent, False
            thread, self._thread = self._thread, 0
        if sent:
            # One may still be on its way. To take it back (`None`) would leave Python with a mark that an error
            # is due, for good: all code runs slower then, and traced code not at all. So another one takes its
            # place, which certainly comes, and is taken.
            with contextlib.suppress(PolicyEndedError):
                if _raise_in(thread):
                    while True:
                        time.sleep(0)

    def end(self) -> bool:
        """End what runs; say whether there is something, and it has not been tried just now."""
        now_s = time.monotonic()
        with self._lock:
            if not self._thread or now_s - self._tried_s < _AGAIN_S:
                return False
            self._tried_s = now_s
            self.was_ended = self._sent = True
            _raise_in(self._thread)
            return True


def _raise_in(thread: int) -> bool:
    """Raise `PolicyEndedError` in a thread soon, in place of one that is on its way; say whether it is there."""
    return bool(
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(PolicyEndedError)
        )
    )
