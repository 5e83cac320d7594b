"""Threads that do work beside the others.

Covers their queue, and ending them without waiting for ever. Does not cover what they do. A pool of
threads from the standard library is joined when the interpreter ends, and a disk that hangs would
hold the process.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

log = logging.getLogger("pie.pool.side_threads")

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 5.0
"""How long the end of threads waits for what they are doing."""


class SideThreads(concurrent.futures.Executor):
    """An executor of daemon threads. Who hands it work bounds how much waits."""

    def __init__(self, name: str, threads: int = 1) -> None:
        """Be ready; a thread starts when work comes and no other is free.

        Args:
            name: What log lines call them.
            threads: How many there are at most; one does one thing after another.
        """
        self._name = name
        self._most = threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._left = 0
        """Pieces of work that wait or are being done."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Queue a call.

        Raises:
            RuntimeError: The threads have been closed.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} has been closed")
            self._left += 1
            if len(self._threads) < min(self._left, self._most):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._work.put(
                functools.partial(self._do, future, functools.partial(fn, *args, **kwargs))
            )
        return future

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """Give up what waits, end after what is being done, and say whether that was in time.

        Threads that do not end in time are left behind, and told of in the log.
        """
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._work.put(None)
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if not ended:
            log.warning("%s does not end within %.1f s and is left behind", self._name, limit_s)
        return ended

    def _do(self, future: concurrent.futures.Future[T], work: Callable[[], T]) -> None:
        if self._closed:
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 – as the standard library's executors do
            future.set_exception(error)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            finally:
                with self._lock:
                    self._left -= 1


def within(limit_s: float, name: str, work: Callable[[], object]) -> bool:
    """Do work on a thread that is left behind at the limit; say whether it ended in time.

    Raises:
        Exception: What the work raised, in time.
    """
    thread = SideThreads(name)
    done = thread.submit(work)
    concurrent.futures.wait([done], min(max(0.0, limit_s), threading.TIMEOUT_MAX))
    ended = done.done()
    thread.close(CLOSE_S if ended else 0.0)
    if ended:
        done.result()
    return ended
