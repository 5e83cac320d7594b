"""Reading from a bucket: several at once, ahead of those who wait, and nobody waits for long.

Covers threads, limits and what is read ahead. Does not cover what was read (`pie.pool.object`).
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

from pie.pool.object_errors import NotAskedError, ObjectStoreError, StoreFailure
from pie.pool.object_store import ObjectStore

AHEAD_BYTES = 32 << 20
"""Read ahead at most, taken or not."""
_AHEAD_AGE_S = 30.0
"""How long what was read ahead is kept for somebody to take it."""
_RUN_BYTES = 4 << 20
_GAP_BYTES = 64 << 10
"""Bytes between two pages of one pack that are cheaper to read than another request."""
_MOST_WAITING = 256
"""Requests; more are refused at once."""


class Span(NamedTuple):
    """Bytes of an object."""

    name: str
    start: int
    length: int
    is_whole: bool = False
    """All of the object is meant, whatever its size: another node may have packed it better."""


class _Ahead(NamedTuple):
    future: Future[bytes | None]
    start: int
    """Where in what is read the span begins."""
    since_s: float = 0.0


class ObjectReader:
    """Reads spans on threads of its own. Thread-safe."""

    def __init__(
        self, store: ObjectStore, threads: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """Start no thread before the first read.

        Args:
            store: What is read.
            threads: Requests at once.
            timeout_s: How long `read` waits.
            clock: Seconds, going forward only.
        """
        self.read_bytes = 0
        self._store = store
        self._timeout_s = timeout_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pie-object-read")
        self._ahead: OrderedDict[Span, _Ahead] = OrderedDict()
        self._ahead_bytes = 0
        self._waiting = 0
        self._lock = threading.RLock()  # A future that is done already calls back at once.

    def read(self, span: Span) -> bytes | None:
        """Return the bytes of a span, or fewer where the object ends; None where there is no object.

        Raises:
            ObjectStoreError: The store did not give them, or not in time.
        """
        with self._lock:
            ahead = self._take(span)
            if ahead is None:
                ahead = _Ahead(self._submit(span), 0)
        try:
            data = ahead.future.result(self._timeout_s)
        except (
            TimeoutError,
            CancelledError,
        ):  # Another reader of the same bytes may have given up.
            ahead.future.cancel()
            # Also where it only waited for a thread: others have had no answer for as long.
            raise ObjectStoreError(
                StoreFailure.TIMEOUT, f"no answer within {self._timeout_s:g} s"
            ) from None
        if data is None or span.is_whole or len(data) == span.length:
            return data
        return data[ahead.start : ahead.start + span.length]

    def expect(self, spans: Iterable[Span]) -> None:
        """Begin to read what will be wanted soon, in that order, as far as the limit goes.

        Neighbours in one object are read together. What fails, or is not there, is asked for anew by
        `read`: it may be there by then.
        """
        for run in _runs(spans):
            size = run[-1].start + run[-1].length - run[0].start
            with self._lock:
                self._forget(AHEAD_BYTES - size)
                if self._ahead_bytes + size > AHEAD_BYTES or self._waiting >= _MOST_WAITING:
                    return
                whole = Span(run[0].name, run[0].start, size, run[0].is_whole)
                if all(span in self._ahead for span in run):
                    continue
                future = self._submit(whole)
                for span in run:
                    self._take(span)
                    self._ahead[span] = _Ahead(future, span.start - whole.start, self._clock())
                    self._ahead_bytes += span.length
                future.add_done_callback(functools.partial(self._drop_useless, run))

    def tick(self) -> None:
        """Drop what was read ahead long ago and never taken."""
        until_s = self._clock() - _AHEAD_AGE_S
        with self._lock:
            for span, ahead in list(self._ahead.items()):
                if ahead.since_s <= until_s and ahead.future.done():
                    self._take(span)

    def close(self) -> None:
        """End the threads; what they wait for ends by its own time-out."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ahead.clear()
            self._ahead_bytes = 0

    def _take(self, span: Span) -> _Ahead | None:
        ahead = self._ahead.pop(span, None)
        if ahead is not None:
            self._ahead_bytes -= span.length
        return ahead

    def _forget(self, most_bytes: int) -> None:
        """Drop what was read ahead first, and never taken, until so much is left."""
        for span, ahead in list(self._ahead.items()):
            if self._ahead_bytes <= most_bytes:
                return
            if ahead.future.done():
                self._take(span)

    def _drop_useless(self, run: Sequence[Span], future: Future[bytes | None]) -> None:
        if not future.cancelled() and future.exception() is None and future.result() is not None:
            return
        with self._lock:
            for span in run:
                ahead = self._ahead.get(span)
                if ahead is not None and ahead.future is future:
                    self._take(span)

    def _submit(self, span: Span) -> Future[bytes | None]:
        if self._waiting >= _MOST_WAITING:
            raise NotAskedError(StoreFailure.TIMEOUT, "too many requests wait already")
        try:
            future = self._threads.submit(self._read, span)
        except RuntimeError as error:
            raise NotAskedError(StoreFailure.UNREACHABLE, "closed") from error
        self._waiting += 1
        future.add_done_callback(self._done)
        return future

    def _read(self, span: Span) -> bytes | None:
        where = () if span.is_whole else (span.start, span.length)
        data = self._store.get(span.name, *where)
        with self._lock:
            self.read_bytes += 0 if data is None else len(data)
        return data

    def _done(self, _future: Future[bytes | None]) -> None:
        with self._lock:
            self._waiting -= 1


def _runs(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Cut spans into runs of neighbours, each to be read by one request."""
    run: list[Span] = []
    for span in spans:
        if run:
            gap = span.start - (run[-1].start + run[-1].length)
            is_near = span.name == run[-1].name and 0 <= gap <= _GAP_BYTES
            if not is_near or span.start + span.length - run[0].start > _RUN_BYTES:
                yield run
                run = []
        run.append(span)
    if run:
        yield run
