"""A thread that does one thing after another beside the others.

Covers its queue, and ending it without waiting for ever. Does not cover what it does. A pool of
threads from the standard library is joined when the interpreter ends, and a disk that hangs would
hold the process.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

log = logging.getLogger("pie.worker.side_thread")

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 5.0
"""How long the end of a thread waits for what it is doing."""


class SideThread(concurrent.futures.Executor):
    """An executor of one daemon thread. Who hands it work bounds how much waits."""

    def __init__(self, name: str) -> None:
        """Be ready; the thread starts with the first piece of work, and log lines call it `name`."""
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Queue a call.

        Raises:
            RuntimeError: The thread has been closed.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} has been closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.put(
                functools.partial(self._do, future, functools.partial(fn, *args, **kwargs))
            )
        return future

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """Give up what waits, end after what is being done, and say whether that was in time.

        A thread that does not end in time is left behind, and told of in the log.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
            self._work.put(None)
        if thread is None:
            return True
        thread.join(max(0.0, limit_s))
        if thread.is_alive():
            log.warning("%s does not end within %.1f s and is left behind", self._name, limit_s)
        return not thread.is_alive()

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
            work()


def within(limit_s: float, name: str, work: Callable[[], None]) -> bool:
    """Do work on a thread that is left behind at the limit; say whether it ended in time.

    Raises:
        Exception: What the work raised, in time.
    """
    thread = SideThread(name)
    done = thread.submit(work)
    concurrent.futures.wait([done], min(max(0.0, limit_s), threading.TIMEOUT_MAX))
    ended = done.done()
    thread.close(CLOSE_S if ended else 0.0)
    if ended:
        done.result()
    return ended
