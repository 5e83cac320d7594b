"""Work that takes long, in threads, its tenants in turn.

Covers whose work is next, how much may wait, and work that nobody wants any more. Does not cover what the work
is (`pie.router.prompt`). For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from pie.router.errors import overloaded

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    tenant: str
    work: Callable[[], Any]
    over: asyncio.Future[Any]


class Turns:
    """Lets tenants have their turn at some threads.

    However much of one tenant's work waits, another one's is next; and where tenants have names, one of several
    threads is left to the others, so that they do not wait for what is under way either.

    Args:
        threads: Where work is done.
        at_once: How many threads it has.
        most_waiting: Most work of one tenant that waits.
        retry_after_s: What a client is told to wait for whose work there is no room.
    """

    def __init__(
        self, threads: Executor, *, at_once: int, most_waiting: int, retry_after_s: float = 2.0
    ) -> None:
        self._threads = threads
        self._at_once = at_once
        self._most_waiting = most_waiting
        self._retry_after_s = retry_after_s
        self._waiting: dict[str, deque[_Job]] = {}
        """By tenant; whose turn was longest ago comes first."""
        self._running: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """How much work waits."""
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Do work of a tenant in a thread and return what comes of it.

        Cancelling this drops work that waits; what has begun goes on to its end, and keeps its thread until then.

        Args:
            tenant: Its name; empty for whoever has none.
            work: What to do; it may raise.

        Raises:
            ApiError: 429 where too much of the tenant's waits.
        """
        if len(self._waiting.get(tenant, ())) >= self._most_waiting:
            raise overloaded(
                f"{self._most_waiting} long requests wait to be read.", self._retry_after_s
            )
        job = _Job(tenant, work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(job)
        self._begin()
        try:
            done: T = await job.over
            return done
        finally:
            self._drop(job)

    def close(self) -> None:
        """Drop all that waits."""
        for job in [job for jobs in self._waiting.values() for job in jobs]:
            job.over.cancel()
        self._waiting.clear()

    def _begin(self) -> None:
        """Begin as much as there are threads for."""
        while self._running.total() < self._at_once and (tenant := self._next()) is not None:
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind the others
            self._running[tenant] += 1
            try:
                self._start(job)
            except RuntimeError as error:
                # The threads were shut down.
                self._ended(job, None, error)

    def _next(self) -> str | None:
        """Return the tenant whose turn it is; None where nobody's is."""
        for tenant in self._waiting:
            most = max(1, self._at_once - 1) if tenant else self._at_once
            if self._running[tenant] < most:
                return tenant
        return None

    def _start(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()

        def do() -> None:
            done, error = None, None
            try:
                done = job.work()
            except BaseException as raised:  # noqa: BLE001 - whoever waits for it is told
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._ended, job, done, error)

        self._threads.submit(do)

    def _ended(self, job: _Job, done: object, error: BaseException | None) -> None:
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if not job.over.done():
            if error is None:
                job.over.set_result(done)
            else:
                job.over.set_exception(error)
        self._begin()

    def _drop(self, job: _Job) -> None:
        """Let work go that has not begun."""
        jobs = self._waiting.get(job.tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.tenant]
